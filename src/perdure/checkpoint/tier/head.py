"""The remote pointer: one sealed object that says all that counts, replaced only if unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perdure.checkpoint.tier.objects import ObjectStore, RemoteUnavailableError
from perdure.core import sealed_json
from perdure.core.clock import Clock
from perdure.core.errors import DamagedError, FencedError, FutureFormatError, NothingToResumeError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import IncarnationNumber

HEAD = "head.json"
FORMAT = 1
SEGMENT_PIECES = "segment_piece_bytes"
"""Required by whoever pulls segments that are cut otherwise than the checkpoint that names them."""
FEATURES = frozenset({SEGMENT_PIECES})
"""Required features this version understands."""
_WRITE_AGAIN = "delete the object; perdure ckpt push writes it again if the run's disk is there"
_SWAPS = 8
"""Times a lost swap is tried again on top of what won, before the round is given up."""


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A whole checkpoint of the remote tier; its files are cut into pieces of ``piece_bytes``.

    ``segment_piece_bytes`` names the segments that were stored before with pieces of another size.
    """

    directory: str
    step: int
    manifest_digest: str
    bytes: int
    piece_bytes: int
    segment_piece_bytes: Mapping[str, int] = field(default_factory=dict[str, int])

    def piece_bytes_of(self, path: str) -> int:
        """How long the pieces of a file or segment are."""
        return self.segment_piece_bytes.get(path, self.piece_bytes)

    def to_json(self) -> dict[str, Any]:
        """As the pointer has it."""
        value: dict[str, Any] = {
            "directory": self.directory,
            "step": self.step,
            "manifest_digest": self.manifest_digest,
            "bytes": self.bytes,
            "piece_bytes": self.piece_bytes,
        }
        if self.segment_piece_bytes:
            value[SEGMENT_PIECES] = dict(self.segment_piece_bytes)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RemoteCheckpoint:
        """Raises ``KeyError``, ``TypeError``, ``ValueError``, ``AttributeError``: it is none."""
        sizes = value.get(SEGMENT_PIECES, {}).items()
        return cls(
            directory=str(value["directory"]),
            step=int(value["step"]),
            manifest_digest=str(value["manifest_digest"]),
            bytes=int(value["bytes"]),
            piece_bytes=int(value["piece_bytes"]),
            segment_piece_bytes={str(path): int(size) for path, size in sizes},
        )


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A small file of the run: its object, size and xxh3-128."""

    object: str
    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Head:
    """What the remote tier holds.

    Attributes:
        sequence: Rises by one with every replacement.
        claim: xxh3-128 of the writing incarnation's file: two that took the same number differ.
        written_wall_s: When this state was written.
        shipped_wall_s: The log is complete up to this moment.
        checkpoints: Those that can be restored, oldest first; the last is the one pointed to.
        uploading: Directory whose pieces are being stored now; empty if none is.
        uploading_segments: Paths of the segments that are stored with it for the first time.
        dropped: Directories, and paths of segments, whose objects are being deleted.
        files: Path in the run → object of every small file.
        log: File name of a log segment → its bytes that count here.
    """

    run_id: str
    incarnation: IncarnationNumber
    claim: str
    sequence: int = 0
    written_wall_s: float = 0.0
    shipped_wall_s: float = 0.0
    checkpoints: tuple[RemoteCheckpoint, ...] = ()
    uploading: str = ""
    uploading_segments: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    files: Mapping[str, RemoteFile] = field(default_factory=dict[str, RemoteFile])
    log: Mapping[str, int] = field(default_factory=dict[str, int])

    def notes(self, *, address: str, trouble: str = "") -> dict[str, object]:
        """What is kept of it in the run's directory, for people and tools."""
        return {
            "address": address,
            "trouble": trouble,
            "checkpoint": self.target.directory if self.target else "",
            "shipped_wall_s": self.shipped_wall_s,
            "log_bytes": sum(self.log.values()),
        }

    @property
    def target(self) -> RemoteCheckpoint | None:
        """The checkpoint that is pointed to."""
        return self.checkpoints[-1] if self.checkpoints else None

    def encode(self) -> bytes:
        """Sealed JSON, as stored."""
        return sealed_json.encode(
            {
                "format": FORMAT,
                "features": self._features(),
                "run_id": self.run_id,
                "incarnation": self.incarnation,
                "claim": self.claim,
                "sequence": self.sequence,
                "written_wall_s": self.written_wall_s,
                "shipped_wall_s": self.shipped_wall_s,
                "checkpoints": [one.to_json() for one in self.checkpoints],
                "uploading": self.uploading,
                "uploading_segments": list(self.uploading_segments),
                "dropped": list(self.dropped),
                "files": {
                    path: {"object": file.object, "bytes": file.bytes, "xxh3_128": file.checksum}
                    for path, file in self.files.items()
                },
                "log": dict(self.log),
            }
        )

    def _features(self) -> list[str]:
        return [SEGMENT_PIECES] if any(one.segment_piece_bytes for one in self.checkpoints) else []


def decode_head(data: bytes) -> Head:
    """Read :meth:`Head.encode` back.

    Raises:
        DamagedError: Not a pointer, or a damaged one.
        FutureFormatError: A newer format.
    """
    value = sealed_json.decode(
        data, where=HEAD, newest_format=FORMAT, fields=("run_id", "incarnation", "claim")
    )
    unknown = sorted(set(value.get("features", ())) - FEATURES)
    if unknown:
        raise FutureFormatError(
            f"needs features this version does not know: {', '.join(unknown)}",
            where=HEAD,
            rule="a pointer is followed as a whole or not at all",
            way_out="use the perdure version that wrote it, or a newer one",
        )
    try:
        return _parse(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"the pointer lacks a readable field ({error})",
            where=HEAD,
            rule="docs/formats/remote.md lists its fields",
            way_out=_WRITE_AGAIN,
        ) from error


def _parse(value: dict[str, Any]) -> Head:
    return Head(
        run_id=str(value["run_id"]),
        incarnation=IncarnationNumber(int(value["incarnation"])),
        claim=str(value["claim"]),
        sequence=int(value["sequence"]),
        written_wall_s=float(value["written_wall_s"]),
        shipped_wall_s=float(value["shipped_wall_s"]),
        checkpoints=tuple(RemoteCheckpoint.from_json(one) for one in value["checkpoints"]),
        uploading=str(value["uploading"]),
        uploading_segments=tuple(str(path) for path in value["uploading_segments"]),
        dropped=tuple(str(name) for name in value["dropped"]),
        files={
            str(path): RemoteFile(str(file["object"]), int(file["bytes"]), str(file["xxh3_128"]))
            for path, file in value["files"].items()
        },
        log={str(name): int(length) for name, length in value["log"].items()},
    )


def read_head(objects: ObjectStore) -> Head:
    """The pointer as it is now.

    Raises:
        NothingToResumeError: Nothing was ever stored below this prefix.
        DamagedError, FutureFormatError: It cannot be used.
    """
    try:
        return decode_head(objects.read(HEAD))
    except FileNotFoundError as error:
        raise NothingToResumeError(
            "there is no run in the remote tier",
            where=HEAD,
            rule="a run's prefix holds its pointer",
            way_out="check the address; a run stores its pointer when it begins to ship",
        ) from error


@dataclass(slots=True)
class Pointer:
    """The pointer in the hands of one incarnation, which loses it for good to a newer one."""

    objects: ObjectStore
    run_id: str = field(kw_only=True)
    incarnation: IncarnationNumber = field(kw_only=True)
    claim: str = field(kw_only=True)
    clock: Clock = field(kw_only=True)
    faults: FaultHook = field(kw_only=True)
    head: Head = field(init=False)
    _tag: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.head = Head(self.run_id, self.incarnation, self.claim)

    def load(self) -> None:
        """Read the pointer, before the first :meth:`swap`.

        Raises:
            FencedError: It belongs to another run or a newer incarnation.
        """
        found = self._read()
        if found is None:
            self._tag = None
            self.head = Head(self.run_id, self.incarnation, self.claim)
        else:
            self._adopt(*found)

    def swap(self, change: Callable[[Head], Head]) -> None:
        """Replace the pointer by what ``change`` makes of it.

        ``change`` may be called several times, each time with what is there.

        Raises:
            FencedError: A newer incarnation has it; nothing was changed.
            RemoteUnavailableError: It could not be replaced.
        """
        for _ in range(_SWAPS):
            head = replace(
                change(self.head),
                run_id=self.run_id,
                incarnation=self.incarnation,
                claim=self.claim,
                sequence=self.head.sequence + 1,
                written_wall_s=self.clock.wall_s(),
            )
            data = head.encode()
            tag = self.objects.swap(HEAD, data, expected=self._tag)
            if tag is None:
                found = self._read()
                if found is None or found[0] != data:
                    self._adopt(*found) if found else self.load()
                    continue
                # It was this very call, whose answer was lost.
                tag = found[1]
            self.head, self._tag = head, tag
            self.faults.reach(FaultPoint.REMOTE_HEAD_SWAPPED)
            return
        raise RemoteUnavailableError(
            f"the pointer was replaced by others {_SWAPS} times in a row",
            where=HEAD,
            rule="one process ships a run, and a push may help it",
            way_out="it is tried again; stop the others if it repeats",
        )

    def _read(self) -> tuple[bytes, str] | None:
        try:
            return self.objects.read_tagged(HEAD)
        except FileNotFoundError:
            return None

    def _adopt(self, data: bytes, tag: str) -> None:
        head = decode_head(data)
        newer = head.incarnation > self.incarnation
        twin = head.incarnation == self.incarnation and head.claim != self.claim
        if head.run_id != self.run_id:
            raise FencedError(
                f"the remote tier holds run {head.run_id}",
                where=HEAD,
                rule=f"run {self.run_id} ships into a prefix of its own",
                way_out="choose another prefix",
            )
        if newer or twin:
            raise separate_ways(f"incarnation {head.incarnation} holds the remote tier", where=HEAD)
        self.head, self._tag = head, tag


def separate_ways(what: str, *, where: str) -> FencedError:
    """The error of a run whose copy was resumed elsewhere."""
    return FencedError(
        what,
        where=where,
        rule="a run that was resumed from its remote tier goes on there, and only there",
        way_out="pull it into a new directory, or ship this one into another prefix",
    )
