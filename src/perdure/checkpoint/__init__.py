"""Checkpoints: staged in memory, written and verified behind training, committed in the log.

Torch-specific components lie in :mod:`perdure.checkpoint.torch_components`; importing this package
does not import torch.
"""

from perdure.checkpoint.components import ArraysComponent, ValuesComponent
from perdure.checkpoint.engine import CheckpointEngine, CheckpointOptions
from perdure.checkpoint.guard import ChangeCounter
from perdure.checkpoint.ledger import CommitLedger, MemoryLedger
from perdure.checkpoint.manifest import Manifest, StagedInfo, decode_manifest
from perdure.checkpoint.registry import Kind, Registry
from perdure.checkpoint.restoration import CheckpointReader, restore
from perdure.checkpoint.verification import (
    Choice,
    FileProblem,
    Quarantined,
    VerifyReport,
    choose,
    quarantined,
    verify,
)

__all__ = [
    "ArraysComponent",
    "ChangeCounter",
    "CheckpointEngine",
    "CheckpointOptions",
    "CheckpointReader",
    "Choice",
    "CommitLedger",
    "FileProblem",
    "Kind",
    "Manifest",
    "MemoryLedger",
    "Quarantined",
    "Registry",
    "StagedInfo",
    "ValuesComponent",
    "VerifyReport",
    "choose",
    "decode_manifest",
    "quarantined",
    "restore",
    "verify",
]
