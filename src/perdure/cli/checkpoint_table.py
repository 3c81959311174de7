"""What ``perdure ckpt list`` shows of each checkpoint, without checking its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.core.records import Checkpointed
    from perdure.core.storage_api import Storage

NONE_YET = "no committed checkpoint yet"
_HEADER = ("checkpoint", "phase", "step", "saved (UTC)", "bytes", "kept", "state")


@dataclass(frozen=True, slots=True)
class Look:
    """What lies where a checkpoint belongs."""

    state: str
    """``present``, ``quarantined``, ``missing``, or what is wrong with its manifest."""
    created_wall_s: float | None = None
    bytes: int | None = None
    detail: str = ""
    """Of a quarantined one: where it lies and why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One committed checkpoint."""

    record: Checkpointed
    look: Look
    why: tuple[str, ...] = ()
    """Why it stays, by the rules of its run."""

    def to_json(self) -> dict[str, object]:
        return {
            "checkpoint": self.record.directory,
            "phase": self.record.phase,
            "step": self.record.step,
            "manifest_digest": self.record.manifest_digest,
            "present": self.look.state == "present",
            "state": self.look.state,
            "created_wall_s": self.look.created_wall_s,
            "bytes": self.look.bytes,
            "kept": self.why,
            "detail": self.look.detail,
        }

    def cells(self) -> tuple[str, ...]:
        look, record = self.look, self.record
        saved = size = "-"
        if look.created_wall_s is not None:
            saved = f"{datetime.fromtimestamp(look.created_wall_s, UTC):%Y-%m-%d %H:%M:%S}"
        if look.bytes is not None:
            size = f"{look.bytes:,}"
        state = look.state if look.state in ("present", "quarantined") else look.state.upper()
        words = f"{state} {look.detail}".strip()
        why = ", ".join(self.why) or "-"
        return (record.directory, record.phase, str(record.step), saved, size, why, words)


def look_at(storage: Storage, directory: str) -> Look:
    """Look for the checkpoint of this name; its manifest is read, its files are not."""
    from perdure.checkpoint import decode_manifest, quarantined
    from perdure.checkpoint.manifest import MANIFEST, directory_path
    from perdure.core.errors import PerdureError

    path = f"{directory_path(directory)}/{MANIFEST}"
    try:
        manifest = decode_manifest(storage.read(path), where=path)
    except FileNotFoundError:
        aside = quarantined(storage, directory)
        if aside is None:
            return Look("missing")
        return Look("quarantined", detail=f"({aside.reason}), see {aside.path}")
    except PerdureError as error:
        return Look("damaged", detail=f"({error.what})")
    return Look("present", manifest.created_wall_s, manifest.bytes)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines with a header; nothing for no rows."""
    cells = [_HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER) - 1)]
    for line in cells if rows else ():
        padded = [
            f"{text:>{width}}" if column in (2, 4) else f"{text:<{width}}"
            for column, (text, width) in enumerate(zip(line, widths, strict=False))
        ]
        yield "  ".join([*padded, line[-1]]).rstrip()
