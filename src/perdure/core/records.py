"""The records of the experience log, as values. Their byte layout is in ``docs/formats/log.md``.

Control records are small and ordered; payload records carry arrays. Each record has an idempotency
key: inside the kept lineage the first record of a key counts and later ones are ignored, so any
append may be repeated after a crash. Here are the log's own records and the decisions of a run,
which a rewind makes void; experience itself is in :mod:`perdure.core.experience_records`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from perdure.core.experience_records import (
    GroupSettled,
    Partials,
    SessionRestarted,
    SessionsDone,
    Submitted,
    ToolResult,
)
from perdure.core.ids import (
    GlobalStep,
    GroupId,
    IncarnationNumber,
    LogPosition,
    OptimizerStep,
    PolicyVersion,
    UpdateId,
)
from perdure.core.record_types import (
    DECISION_TYPES,
    EvictionReason,
    RecordType,
    Stream,
)


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """First record of every segment file; chains it to the segment before it in its stream.

    ``previous_segment`` is the segment that the stream continued from, -1 if there is none;
    ``previous_length`` and ``previous_checksum`` (xxh3-64) cover the bytes of it that count.
    Segments between the two were abandoned before their first commit.
    """

    type: ClassVar[RecordType] = RecordType.SEGMENT_OPENED
    run_id: str
    incarnation: IncarnationNumber
    stream: Stream
    segment: int
    previous_segment: int = -1
    previous_length: int = 0
    previous_checksum: int = 0

    def key(self) -> str:
        return f"segment/{self.incarnation}/{self.stream.value}/{self.segment}"


@dataclass(frozen=True, slots=True)
class IncarnationStarted:
    """First control record of an incarnation after ``SegmentOpened``: the lineage it continues.

    ``base_position`` is None when the whole log of ``parent`` is kept (the usual resume). When it
    is set, decisions (taken, step_done, redone, published, evicted, refilled, checkpointed,
    evaluated, phase_step, update_failed) of the parent lineage that end beyond it are void, and
    the experience they used becomes available again; a fresh start has ``parent`` 0.
    """

    type: ClassVar[RecordType] = RecordType.INCARNATION_STARTED
    incarnation: IncarnationNumber
    parent: IncarnationNumber
    base_checkpoint: str = ""
    base_position: LogPosition | None = None
    redo_until: UpdateId | None = None
    config_digest: str = ""

    def key(self) -> str:
        return f"incarnation/{self.incarnation}"


@dataclass(frozen=True, slots=True)
class Taken:
    """The ordered groups of one local update, durable before the update starts."""

    type: ClassVar[RecordType] = RecordType.TAKEN
    update: UpdateId
    groups: tuple[int, ...]
    config_digest: str
    reference_digest: str = ""
    tokenizer_digest: str = ""

    def key(self) -> str:
        return f"taken/{self.update.key()}"


@dataclass(frozen=True, slots=True)
class StepDone:
    """A global step's updates are complete."""

    type: ClassVar[RecordType] = RecordType.STEP_DONE
    global_step: GlobalStep
    digest: str
    """Digest of the learner's whole state: weights, optimizer, scheduler, counters."""
    policy_digest: str
    optimizer_step: OptimizerStep
    metrics: dict[str, float]
    """Deterministic metrics of the step (no wall-clock values)."""
    timings_s: dict[str, float]
    """Wall-clock durations in seconds; left out of every comparison."""
    skipped: tuple[str, ...] = ()
    """Mini-batches skipped or stopped early, as ``local_update/epoch/mini_batch reason``."""

    def key(self) -> str:
        return f"step_done/{self.global_step}"


@dataclass(frozen=True, slots=True)
class Redone:
    """A logged step was trained again after a restore."""

    type: ClassVar[RecordType] = RecordType.REDONE
    global_step: GlobalStep
    digest: str
    equal: bool
    incarnation: IncarnationNumber
    metrics: dict[str, float] = field(default_factory=dict)
    """Deterministic metrics of the step as it came out this time."""
    timings_s: dict[str, float] = field(default_factory=dict)

    def key(self) -> str:
        return f"redone/{self.global_step}/{self.incarnation}"


@dataclass(frozen=True, slots=True)
class Published:
    """Engines acknowledged these weights by digest."""

    type: ClassVar[RecordType] = RecordType.PUBLISHED
    version: PolicyVersion
    digest: str
    global_step: GlobalStep

    def key(self) -> str:
        return f"published/{self.version}"


@dataclass(frozen=True, slots=True)
class Evicted:
    """A group leaves without being trained."""

    type: ClassVar[RecordType] = RecordType.EVICTED
    group: GroupId
    reason: EvictionReason
    global_step: GlobalStep

    def key(self) -> str:
        return f"evicted/{self.group}"


@dataclass(frozen=True, slots=True)
class Refilled:
    """``group`` replaces the evicted ``replaces``; owed prompts = evictions minus refills."""

    type: ClassVar[RecordType] = RecordType.REFILLED
    group: GroupId
    replaces: GroupId

    def key(self) -> str:
        return f"refilled/{self.replaces}"


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint's files and manifest are durable; this record commits it."""

    type: ClassVar[RecordType] = RecordType.CHECKPOINTED
    directory: str
    """Directory name below ``checkpoints/``."""
    phase: str
    step: int
    manifest_digest: str
    """xxh3-128 hex of the manifest file's bytes."""
    position: LogPosition
    """End of the record that the staged state stands behind: redo starts here."""

    def key(self) -> str:
        return f"checkpointed/{self.directory}"


@dataclass(frozen=True, slots=True)
class Collect:
    """These checkpoint directories are going to be deleted."""

    type: ClassVar[RecordType] = RecordType.COLLECT
    directories: tuple[str, ...]

    def key(self) -> str:
        return "collect/" + ",".join(self.directories)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Result of a validation of the weights with ``digest``."""

    type: ClassVar[RecordType] = RecordType.EVALUATED
    global_step: GlobalStep
    digest: str
    metrics: dict[str, float]
    timings_s: dict[str, float]

    def key(self) -> str:
        return f"evaluated/{self.global_step}/{self.digest}"


@dataclass(frozen=True, slots=True)
class PhaseStep:
    """Progress of a phase before training proper (the supervised warm start)."""

    type: ClassVar[RecordType] = RecordType.PHASE_STEP
    phase: str
    step: int
    digest: str
    metrics: dict[str, float]
    timings_s: dict[str, float]
    final: bool = False

    def key(self) -> str:
        return f"phase_step/{self.phase}/{self.step}"


@dataclass(frozen=True, slots=True)
class UpdateFailed:
    """Training this batch raised; the second such record sets its groups aside as poison."""

    type: ClassVar[RecordType] = RecordType.UPDATE_FAILED
    update: UpdateId
    incarnation: IncarnationNumber
    error: str

    def key(self) -> str:
        return f"update_failed/{self.update.key()}/{self.incarnation}"


@dataclass(frozen=True, slots=True)
class Closed:
    """The incarnation ended in an orderly way; raises the durable watermark over all before it."""

    type: ClassVar[RecordType] = RecordType.CLOSED
    incarnation: IncarnationNumber
    reason: str

    def key(self) -> str:
        return f"closed/{self.incarnation}"


ControlRecord = (
    SegmentOpened
    | IncarnationStarted
    | Submitted
    | SessionsDone
    | GroupSettled
    | Partials
    | ToolResult
    | SessionRestarted
    | Taken
    | StepDone
    | Redone
    | Published
    | Evicted
    | Refilled
    | Checkpointed
    | Collect
    | Evaluated
    | PhaseStep
    | UpdateFailed
    | Closed
)


def is_void(record: ControlRecord, position: LogPosition, base: LogPosition) -> bool:
    """Whether a rewind to ``base`` makes a record that ends at ``position`` void.

    A checkpoint stands where its state was staged, not where its record came to lie: the one that a
    rewind goes back to stays committed.
    """
    stands = record.position if isinstance(record, Checkpointed) else position
    return record.type in DECISION_TYPES and stands > base
