"""How far the loop of a script has come, as its newest checkpoint has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.checkpoint import CheckpointReader, committed_manifest
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage
from perdure.standalone.registration import PROGRESS


@dataclass(frozen=True, slots=True)
class SavedLoop:
    """A saved position.

    Attributes:
        total: Steps there will be; None as long as nobody has said how many.
        saved_wall_s: When it was saved.
    """

    total: int | None
    saved_wall_s: float


def saved_loop(storage: Storage, committed: Sequence[Checkpointed]) -> SavedLoop | None:
    """Of the last of these checkpoints; None if there is none.

    Raises:
        DamagedError: It is not what was committed.
        StorageError: It cannot be read.
    """
    if not committed:
        return None
    manifest = committed_manifest(storage, committed[-1])
    progress = CheckpointReader(storage, manifest).values().get(PROGRESS, {})
    return SavedLoop(int(progress.get("total", 0)) or None, manifest.created_wall_s)
