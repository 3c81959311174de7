"""Durable files: on a real disk, in memory with a model of power loss, and with injected faults."""

from perdure.storage.faulty import FaultyStorage, RandomFaults, StorageFault, StorageFaultKind
from perdure.storage.memory import MemoryStorage
from perdure.storage.memory_disk import Operation, PowerLost
from perdure.storage.posix import PosixStorage
from perdure.storage.power_loss import CrashMode

__all__ = [
    "CrashMode",
    "FaultyStorage",
    "MemoryStorage",
    "Operation",
    "PosixStorage",
    "PowerLost",
    "RandomFaults",
    "StorageFault",
    "StorageFaultKind",
]
