"""Group commit: payload → fsync → control → fsync → am I still the highest? → acknowledge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perdure.core.clock import Clock
from perdure.core.errors import FencedError, StorageError
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import IncarnationNumber, LogPosition, PayloadRef
from perdure.core.record_types import Stream
from perdure.core.storage_api import Storage
from perdure.experience.claims import Claim, incarnation_path, is_fenced
from perdure.experience.entries import PackedEntries
from perdure.experience.format import set_reference
from perdure.experience.seals import write_seal
from perdure.experience.stream_writer import StreamIdentity, StreamWriter, WrittenBatch


@dataclass(frozen=True, slots=True)
class CommitLimits:
    """Segments are closed at ``segment_bytes``; a batch is tried ``tries`` times in all."""

    segment_bytes: int
    tries: int


class Committer:
    """Commits batches of entries, one at a time."""

    def __init__(
        self,
        storage: Storage,
        *,
        claim: Claim,
        clock: Clock,
        faults: FaultHook,
        events: EventSink,
        limits: CommitLimits,
    ) -> None:
        self._storage = storage
        self._claim = claim
        self._clock = clock
        self._faults = faults
        self._events = events
        self._limits = limits
        self._control, self._payload = (
            StreamWriter(
                storage,
                identity=StreamIdentity(claim.run.run_id, claim.incarnation, stream),
                segment_bytes=limits.segment_bytes,
                faults=faults,
            )
            for stream in Stream
        )

    def commit(self, entries: Sequence[PackedEntries]) -> None:
        """Make a batch durable and fill in its references and positions.

        Raises:
            StorageError: The storage refused again and again.
            FencedError: A newer incarnation has claimed the run; nothing of the batch counts as
                acknowledged.
        """
        started_s = self._clock.monotonic_s()
        try:
            self._commit_payloads(entries)
            self._commit_controls(entries)
        except StorageError:
            # Bytes of a failed sync look sound in the page cache but may never reach the disk: only
            # this writer can tell a later claimant not to count them. If the storage refuses that
            # too, the claimant finds the end by itself.
            with contextlib.suppress(StorageError):
                self.seal()
            raise
        require_unfenced(self._storage, self._claim.incarnation)
        written = [r for e in entries for r in (e.control, e.payload) if r is not None]
        fields: dict[str, object] = {
            "records": len(written),
            "bytes": sum(map(len, written)),
            "fsync_ms": (self._clock.monotonic_s() - started_s) * 1e3,
        }
        self._events("log_committed", fields)

    def seal(self) -> None:
        """Settle that the log of this incarnation ends here; nothing may be committed after it."""
        self.close()
        write_seal(
            self._storage,
            self._claim.incarnation,
            run_id=self._claim.run.run_id,
            sealed_by=self._claim.incarnation,
            spans=self._control.spans + self._payload.spans,
        )

    def close(self) -> None:
        """Close the open segments; nothing is written."""
        self._control.abandon()
        self._payload.abandon()

    def _commit_payloads(self, entries: Sequence[PackedEntries]) -> None:
        pairs = [(e, e.payload) for e in entries if e.payload is not None]
        if not pairs:
            return
        records = [record for _, record in pairs]
        written = self._durably(
            self._payload,
            lambda: self._payload.write(records, other_durable=self._control.durable_records),
            points=(FaultPoint.LOG_PAYLOAD_WRITTEN, FaultPoint.LOG_PAYLOAD_FSYNCED),
        )
        incarnation, segment = self._claim.incarnation, written.segment
        placed = zip(pairs, written.offsets, written.checksums, strict=True)
        for (packed, record), offset, checksum in placed:
            ref = PayloadRef(incarnation, segment, offset, len(record), checksum)
            for entry in packed.entries:
                entry.ref = ref
            if packed.control is not None:
                set_reference(packed.control, ref)

    def _commit_controls(self, entries: Sequence[PackedEntries]) -> None:
        pairs = [(e, e.control) for e in entries if e.control is not None]
        if not pairs:
            return
        records = [record for _, record in pairs]
        written = self._durably(
            self._control,
            lambda: self._control.write(records, other_durable=self._payload.durable_records),
            points=(FaultPoint.LOG_CONTROL_WRITTEN, FaultPoint.LOG_FSYNCED),
        )
        incarnation, segment = self._claim.incarnation, written.segment
        for (packed, _), end in zip(pairs, written.ends, strict=True):
            position = LogPosition(incarnation, segment, end)
            for entry in packed.entries:
                entry.position = position

    def _durably(
        self,
        stream: StreamWriter,
        write: Callable[[], WrittenBatch],
        *,
        points: tuple[FaultPoint, FaultPoint],
    ) -> WrittenBatch:
        """Write and sync; after a failure again in a new segment, a bounded number of times."""
        for attempt in range(1, self._limits.tries + 1):
            try:
                written = write()
                self._faults.reach(points[0])
                stream.sync()
                self._faults.reach(points[1])
                return written
            except StorageError as error:
                stream.abandon()
                if attempt == self._limits.tries:
                    raise StorageError(
                        f"the experience log cannot be written: {error.what}",
                        where=error.where,
                        rule=f"{attempt} tries failed",
                        way_out=error.way_out or "repair the storage and resume the run",
                    ) from error
        raise AssertionError("unreachable: tries is at least 1")


def require_unfenced(storage: Storage, incarnation: IncarnationNumber) -> None:
    """Raise ``FencedError`` if an incarnation above this one exists, or may exist elsewhere."""
    if not storage.exists(incarnation_path(incarnation)):
        raise FencedError(
            "the run is no longer where it was",
            where=incarnation_path(incarnation),
            rule="a writer that cannot see newer claims acknowledges nothing",
            way_out="put the directory back under its name and resume; nothing is lost",
        )
    if is_fenced(storage, incarnation):
        raise FencedError(
            "this writer has been fenced by a newer one",
            where=f"incarnation {incarnation}",
            rule="only the highest incarnation may write",
            way_out="let the newer process go on; this one can be stopped",
        )
