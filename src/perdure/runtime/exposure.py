"""What the loss of a run's disk would cost now, as far as its own files say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.checkpoint.tier.log_files import log_cut
from perdure.checkpoint.tier.pins import read_notes
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage
from perdure.experience.claims import highest_incarnation


@dataclass(frozen=True, slots=True)
class Exposure:
    """How far the remote tier is behind.

    Attributes:
        address: Where it is; empty if it was not said.
        checkpoint: The newest that can be pulled; empty if there is none.
        behind_checkpoints: Committed checkpoints that are newer.
        behind_log_bytes: Bytes of the log that are not there.
        exposed_s: Age of the moment up to which the log is there, 0 if all of it is; None if none
            is.
        trouble: Why shipping fails; empty if it does not.
    """

    address: str
    checkpoint: str
    behind_checkpoints: int
    behind_log_bytes: int
    exposed_s: float | None
    trouble: str


def exposure(
    storage: Storage, committed: Sequence[Checkpointed], *, now_wall_s: float
) -> Exposure | None:
    """None if nothing was ever shipped from here: then a lost disk is a lost run.

    Raises:
        DamagedError: ``remote.json`` or the run cannot be used.
        StorageError: The log cannot be measured.
    """
    notes = read_notes(storage)
    if notes is None:
        return None
    cut = log_cut(storage, upto=highest_incarnation(storage))
    behind = max(0, sum(cut.values()) - int(notes.get("log_bytes", 0)))
    shipped_wall_s = float(notes.get("shipped_wall_s", 0.0))
    exposed_s = max(0.0, now_wall_s - shipped_wall_s) if behind else 0.0
    checkpoint = str(notes.get("checkpoint", ""))
    names = [record.directory for record in committed]
    newer = names[names.index(checkpoint) + 1 :] if checkpoint in names else names
    return Exposure(
        address=str(notes.get("address", "")),
        checkpoint=checkpoint,
        behind_checkpoints=len(newer),
        behind_log_bytes=behind,
        exposed_s=exposed_s if shipped_wall_s else None,
        trouble=str(notes.get("trouble", "")),
    )
