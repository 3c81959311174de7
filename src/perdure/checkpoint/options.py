"""Bounds of the checkpoint engine."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, get_args

from perdure.checkpoint.image_files import WriterKind
from perdure.checkpoint.keep import Keep
from perdure.core.errors import ConfigError

MUST_TIMEOUT_S = 600.0
STALL_TIMEOUT_S = 120.0
_USUAL_S = {"must_timeout_s": MUST_TIMEOUT_S, "stall_timeout_s": STALL_TIMEOUT_S}


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Bounds of the engine.

    Attributes:
        keep: Newest checkpoints that stay (2 leaves one to fall back to), or all rules of it.
        commit_timeout_s: Longest wait for the ledger's acknowledgement.
        must_timeout_s: Longest wait for a save that must succeed, and for closing.
        arenas: 2: one is filled while the other is written. 1 takes half the memory; a save that
            is due while the one before is still being written is skipped.
        writer: ``process`` writes from a process of its own, ``thread`` from one of this process;
            ``auto`` starts a process for large checkpoints only. What is not on a local disk of
            Linux is always written by a thread.
        stall_timeout_s: A writer process without a sign of life for so long is replaced.
    """

    keep: int | Keep = 2
    commit_timeout_s: float = 60.0
    must_timeout_s: float = MUST_TIMEOUT_S
    arenas: Literal[1, 2] = 2
    writer: WriterKind = "auto"
    stall_timeout_s: float = STALL_TIMEOUT_S

    def __post_init__(self) -> None:
        # Refuses what is out of range.
        _ = self.rules
        if self.arenas not in (1, 2):
            raise ConfigError(
                f"is {self.arenas}",
                where="checkpoint.arenas",
                rule="1 or 2 copies of the state fit into memory while one is written",
                way_out="set it to 2, or to 1 to save memory",
            )
        if self.writer not in get_args(WriterKind):
            raise ConfigError(
                f"is {self.writer!r}",
                where="checkpoint.writer",
                rule="a process of its own writes, or a thread, or what suits the size",
                way_out="use one of " + ", ".join(get_args(WriterKind)),
            )
        for name, usual_s in _USUAL_S.items():
            value: object = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < threading.TIMEOUT_MAX:
                raise ConfigError(
                    f"is {value!r}",
                    where=f"checkpoint.{name}",
                    rule="seconds, above 0",
                    way_out=f"leave it out: {usual_s:g} s",
                )

    @property
    def rules(self) -> Keep:
        """What stays."""
        return self.keep if isinstance(self.keep, Keep) else Keep(self.keep)
