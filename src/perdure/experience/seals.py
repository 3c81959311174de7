"""Seals: where an incarnation ended, settled once by whoever seals it first.

Layout in ``docs/formats/log.md``; the argument that no acknowledged record is ever outside a seal
in ``docs/design/fencing.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from perdure.core import sealed_json
from perdure.core.errors import DamagedError
from perdure.core.ids import IncarnationNumber
from perdure.core.record_types import Stream
from perdure.core.storage_api import Storage
from perdure.experience.scan import Extent, Span, Tail, map_segment, scan_incarnation
from perdure.experience.segments import LOG_DIR, SegmentName, segments_of, wrong_checksum

SEAL_DIR = "seals"
FORMAT = 1
_COPY = "restore it from a copy"


def seal_path(incarnation: IncarnationNumber) -> str:
    """File of an incarnation's seal."""
    return f"{SEAL_DIR}/{incarnation}.json"


def seal_incarnation(
    storage: Storage, incarnation: IncarnationNumber, *, run_id: str, sealed_by: IncarnationNumber
) -> Extent | None:
    """Find where an earlier incarnation ended and settle it, unless somebody has.

    The caller has claimed a higher incarnation. The scan comes before the sync: what was seen is
    on the disk before the seal names it.

    Returns:
        What counts, every byte verified; None: somebody else's seal tells.

    Raises:
        DamagedError: The incarnation's log is damaged; nothing is sealed.
    """
    extent = scan_incarnation(storage, incarnation, run_id=run_id)
    spans = extent.control + extent.payload
    for span in spans:
        storage.sync_file(span.name.path)
    wrote = write_seal(storage, incarnation, run_id=run_id, sealed_by=sealed_by, spans=spans)
    return _sealed(storage, incarnation, Seal(extent.control, extent.payload)) if wrote else None


def write_seal(
    storage: Storage,
    incarnation: IncarnationNumber,
    *,
    run_id: str,
    sealed_by: IncarnationNumber,
    spans: Sequence[Span],
) -> bool:
    """Settle that exactly these spans of an incarnation count; False: it is sealed already."""
    value = {
        "format": FORMAT,
        "run_id": run_id,
        "incarnation": incarnation,
        "sealed_by": sealed_by,
        "segments": {
            span.name.file: {
                "valid_end": span.valid_end,
                "records": span.records,
                "checksum": f"{span.checksum:016x}",
            }
            for span in spans
        },
    }
    return storage.create_exclusive(seal_path(incarnation), sealed_json.encode(value))


@dataclass(frozen=True, slots=True)
class Seal:
    """What a seal says: the spans that count, in order."""

    control: tuple[Span, ...]
    payload: tuple[Span, ...]


def read_seal(storage: Storage, incarnation: IncarnationNumber, *, run_id: str) -> Seal | None:
    """The seal of an incarnation, None if it is not sealed. The segments are not looked at.

    Raises:
        DamagedError: The seal is damaged, or is missing although a later incarnation has segments.
    """
    path = seal_path(incarnation)
    if not storage.exists(path):
        # A claimant may be sealing now: look for the seal once more after the listing.
        names = (SegmentName.parse(file) for file in storage.list(LOG_DIR))
        later = any(name is not None and name.incarnation > incarnation for name in names)
        if not storage.exists(path):
            if later:
                raise DamagedError(
                    "the file is missing",
                    where=path,
                    rule="an incarnation below one that has segments is sealed",
                    way_out=_COPY,
                )
            return None
    value = sealed_json.decode(
        storage.read(path),
        where=path,
        newest_format=FORMAT,
        fields=("run_id", "incarnation", "segments"),
    )
    if value.get("run_id") != run_id or value.get("incarnation") != incarnation:
        raise DamagedError(
            f"seals incarnation {value.get('incarnation')} of run {value.get('run_id')}",
            where=path,
            rule=f"it must seal incarnation {incarnation} of run {run_id}",
            way_out=_COPY,
        )
    spans: dict[Stream, list[Span]] = {stream: [] for stream in Stream}
    for file, entry in value["segments"].items():
        name = SegmentName.parse(file)
        if name is None or name.incarnation != incarnation:
            raise DamagedError(
                f"lists {file}",
                where=path,
                rule=f"it lists segments of incarnation {incarnation}",
                way_out=_COPY,
            )
        span = Span(name, entry["valid_end"], entry["records"], int(entry["checksum"], 16))
        spans[name.stream].append(span)
    control, payload = (
        tuple(sorted(spans[stream], key=lambda span: span.name.segment)) for stream in Stream
    )
    return Seal(control, payload)


def read_extent(storage: Storage, incarnation: IncarnationNumber, *, run_id: str) -> Extent:
    """What counts of an incarnation, verified against its seal, or by scanning if it has none.

    Raises:
        DamagedError: Bytes that count are missing or wrong, or a seal that must exist is missing.
    """
    seal = read_seal(storage, incarnation, run_id=run_id)
    if seal is None:
        return scan_incarnation(storage, incarnation, run_id=run_id)
    for span in seal.control + seal.payload:
        view = map_segment(storage, span.name, span.valid_end)
        if xxhash.xxh3_64_intdigest(view) != span.checksum:
            raise wrong_checksum(span.name, view, rule=f"sealed in {seal_path(incarnation)}")
    return _sealed(storage, incarnation, seal)


def _sealed(storage: Storage, incarnation: IncarnationNumber, seal: Seal) -> Extent:
    """What counts of an incarnation, verified already, and all that lies behind it now."""
    ends = {span.name: span.valid_end for span in seal.control + seal.payload}
    tails: list[Tail] = []
    for name in segments_of(storage, incarnation):
        end = ends.get(name, 0)
        size = storage.size(name.path)
        if size > end:
            tails.append(Tail(name, end, size - end))
    return Extent(incarnation, seal.control, seal.payload, tuple(tails), sealed=True)
