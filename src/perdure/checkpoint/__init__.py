"""Checkpoints: staged in memory, written and verified behind training, committed in the log.

Torch-specific components lie in :mod:`perdure.checkpoint.torch_components`; importing this package
does not import torch.
"""

from perdure.checkpoint.checkpointer import Checkpointer, CheckpointOptions
from perdure.checkpoint.comparison import Comparison, Difference, compare
from perdure.checkpoint.components import ArraysComponent, ValuesComponent
from perdure.checkpoint.files import FileProblem
from perdure.checkpoint.guard import ChangeCounter
from perdure.checkpoint.ledger import CommitLedger, MemoryLedger
from perdure.checkpoint.legacy import LegacyComponent
from perdure.checkpoint.manifest import Manifest, StagedInfo, decode_manifest
from perdure.checkpoint.migrations import Migration, Migrations
from perdure.checkpoint.reading import CheckpointReader
from perdure.checkpoint.registry import Kind, Registry
from perdure.checkpoint.restoration import restore
from perdure.checkpoint.segments.arrays import ReplayArrays
from perdure.checkpoint.segments.priorities import Priorities
from perdure.checkpoint.segments.ring import ReplayRing, RingOptions
from perdure.checkpoint.segments.trim import Trim
from perdure.checkpoint.verification import (
    Choice,
    Quarantined,
    VerifyReport,
    choose,
    committed_manifest,
    quarantined,
    verify,
)

__all__ = [
    "ArraysComponent",
    "ChangeCounter",
    "CheckpointOptions",
    "CheckpointReader",
    "Checkpointer",
    "Choice",
    "CommitLedger",
    "Comparison",
    "Difference",
    "FileProblem",
    "Kind",
    "LegacyComponent",
    "Manifest",
    "MemoryLedger",
    "Migration",
    "Migrations",
    "Priorities",
    "Quarantined",
    "Registry",
    "ReplayArrays",
    "ReplayRing",
    "RingOptions",
    "StagedInfo",
    "Trim",
    "ValuesComponent",
    "VerifyReport",
    "choose",
    "committed_manifest",
    "compare",
    "decode_manifest",
    "quarantined",
    "restore",
    "verify",
]
