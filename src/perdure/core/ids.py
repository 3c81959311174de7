"""Typed ids, clocks and versions. A key is built and parsed here and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

_SESSION_KEY = re.compile(r"g(0|[1-9][0-9]*)\.s(0|[1-9][0-9]*)")

GlobalStep = NewType("GlobalStep", int)
"""One turn of the controller's loop, counted from 1; 0 is the state before the first."""
LocalUpdate = NewType("LocalUpdate", int)
"""Index of one sample-to-actor-update pass inside a global step, from 0 to K - 1."""
OptimizerStep = NewType("OptimizerStep", int)
"""Number of ``optimizer.step()`` calls of the actor so far."""
PolicyVersion = NewType("PolicyVersion", int)
"""Weights that engines hold and have acknowledged by digest."""
IncarnationNumber = NewType("IncarnationNumber", int)
"""Fencing number, raised at every start or recovery, counted from 1."""
GroupId = NewType("GroupId", int)
"""Submission order of a prompt group inside one run, counted from 0; never reused."""


@dataclass(frozen=True, slots=True, order=True)
class SessionId:
    """One agent-loop run of a prompt group: ``index`` counts from 0 to n - 1."""

    group: GroupId
    index: int

    def key(self) -> str:
        """Text form, ``g12.s3``; :meth:`parse` reads it back."""
        return f"g{self.group}.s{self.index}"

    @classmethod
    def parse(cls, key: str) -> SessionId:
        """Read :meth:`key` back. Raises ``ValueError`` on anything else."""
        match = _SESSION_KEY.fullmatch(key)
        if match is None:
            raise ValueError(f"not a session key: {key!r}")
        return cls(GroupId(int(match[1])), int(match[2]))


@dataclass(frozen=True, slots=True, order=True)
class UpdateId:
    """Names one local update of the whole run."""

    global_step: GlobalStep
    local_update: LocalUpdate

    def key(self) -> str:
        return f"u{self.global_step}.{self.local_update}"


@dataclass(frozen=True, slots=True, order=True)
class LogPosition:
    """A place in the control log: the end of a record.

    Ordered by incarnation, then segment, then byte offset; a fold up to a position includes every
    record that ends at or before it.
    """

    incarnation: IncarnationNumber
    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """Where a payload record lies: its segment file, first byte, length and checksum."""

    incarnation: IncarnationNumber
    segment: int
    offset: int
    length: int
    checksum: int
    """xxh3-64 of the record, as stored in its header."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """Phase, step and incarnation of a checkpoint; their source is the manifest, never the path.

    ``train`` and ``warm`` are phases of trainers; ``loop`` is that of a script with its own loop.
    """

    phase: str
    step: int
    incarnation: IncarnationNumber

    @property
    def directory(self) -> str:
        """Name below ``checkpoints/``: ``step-00000010-2`` (``warm-…`` for the warm start)."""
        prefix = "warm" if self.phase == "warm" else "step"
        return f"{prefix}-{self.step:08d}-{self.incarnation}"

    @staticmethod
    def could_name(directory: str) -> bool:
        """Whether a checkpoint's directory can be called so; all others are somebody else's."""
        return _CHECKPOINT.fullmatch(directory) is not None


_CHECKPOINT = re.compile(r"(step|warm)-\d{8,}-\d+")
