"""The experience log in the remote tier: a cut through its files, shipped as immutable parts.

This package knows of the log what ``docs/formats/log.md`` says of its files: their names, that they
only grow, and that a control record refers only to payload written before it, and the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from perdure.checkpoint.tier.objects import ObjectStore, RemoteUnavailableError
from perdure.core.errors import DamagedError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import IncarnationNumber
from perdure.core.storage_api import Storage

LOG_DIR = "log"
_SEGMENT = re.compile(r"(control|payload)-(\d{6,})-(\d{6,})\.plog")
_PART = re.compile(r"([0-9a-f]{12,})-([0-9a-f]{12,})-([0-9a-f]{32})")
_CUTS = 1000


def log_cut(storage: Storage, *, upto: IncarnationNumber) -> dict[str, int]:
    """Bytes per log file such that nothing refers to what is left out.

    The writer appends payload, then control, and each names how much of the other was durable
    before. So payload that is measured between two equal measurements of control fits it.

    Args:
        upto: Segments of later incarnations are left out.

    Raises:
        RemoteUnavailableError: The log grew faster than it could be measured.
    """
    control = _lengths(storage, "control", upto)
    for _ in range(_CUTS):
        payload = _lengths(storage, "payload", upto)
        again = _lengths(storage, "control", upto)
        if again == control:
            return control | payload
        control = again
    raise RemoteUnavailableError(
        "the log never stood still to be measured",
        where=LOG_DIR,
        rule="nothing that is shipped refers to what is left out",
        way_out="it is tried again",
    )


def _lengths(storage: Storage, stream: str, upto: IncarnationNumber) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in storage.list(LOG_DIR):
        match = _SEGMENT.fullmatch(name)
        if match is not None and match[1] == stream and int(match[2]) <= upto:
            found[name] = storage.size(f"{LOG_DIR}/{name}")
    return found


@dataclass(frozen=True, slots=True)
class LogPart:
    """Bytes ``start`` to ``end`` of a log file, stored as one object."""

    file: str
    start: int
    end: int
    checksum: str

    @property
    def key(self) -> str:
        return f"{LOG_DIR}/{self.file}/{self.start:012x}-{self.end:012x}-{self.checksum}"

    @classmethod
    def parse(cls, key: str) -> LogPart | None:
        """Read :attr:`key` back; None if it is not of that form."""
        folder, _, rest = key.partition("/")
        file, _, name = rest.partition("/")
        match = _PART.fullmatch(name)
        if folder != LOG_DIR or match is None:
            return None
        return cls(file, int(match[1], 16), int(match[2], 16), match[3])


def unshipped(cut: Mapping[str, int], shipped: Mapping[str, int]) -> int:
    """Bytes of a cut that are not in the remote tier."""
    return sum(max(0, length - shipped.get(name, 0)) for name, length in cut.items())


def ship_log(
    storage: Storage,
    objects: ObjectStore,
    cut: Mapping[str, int],
    shipped: Mapping[str, int],
    *,
    part_bytes: int,
    faults: FaultHook,
) -> dict[str, int]:
    """Store what the cut has beyond ``shipped``; returns the lengths that count from now on.

    A file that is shorter than what was shipped of it (its end was lost with the power, and its
    seal says so) stays as it was shipped.
    """
    for name, length in cut.items():
        start = shipped.get(name, 0)
        while start < length:
            end = min(length, start + part_bytes)
            data = storage.read(f"{LOG_DIR}/{name}", start, end - start)
            if len(data) != end - start:
                raise DamagedError(
                    f"{len(data)} of {end - start} bytes from {start} could be read",
                    where=f"{LOG_DIR}/{name}",
                    rule="a log file only grows",
                    way_out="perdure audit lists everything that is damaged",
                )
            part = LogPart(name, start, end, xxhash.xxh3_128_hexdigest(data))
            # The name says what is in it: one that is there is the same one.
            objects.create(part.key, data)
            faults.reach(FaultPoint.REMOTE_LOG_STORED)
            start = end
    return {name: max(cut.get(name, 0), shipped.get(name, 0)) for name in {*cut, *shipped}}


def chain(file: str, parts: list[LogPart], length: int) -> list[LogPart]:
    """Parts that cover the first ``length`` bytes of a file, in order, as few as there are.

    Raises:
        DamagedError: Some bytes are in no part.
    """
    chosen: list[LogPart] = []
    position = 0
    while position < length:
        usable = [part for part in parts if part.start <= position < part.end]
        if not usable:
            raise DamagedError(
                f"bytes from {position} are missing in the remote tier",
                where=f"{LOG_DIR}/{file}",
                rule=f"the pointer says that {length} bytes of it are there",
                way_out="perdure ckpt push stores them again, if the run's own disk is there",
            )
        part = max(usable, key=lambda part: (part.end, part.checksum))
        chosen.append(part)
        position = part.end
    return chosen
