"""The records of the experience log, as values. Their byte layout is in ``docs/formats/log.md``.

Control records are small and ordered; payload records carry arrays. Each record has an idempotency
key: inside the kept lineage the first record of a key counts and later ones are ignored, so any
append may be repeated after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from perdure.core.ids import (
    GlobalStep,
    GroupId,
    IncarnationNumber,
    LogPosition,
    OptimizerStep,
    PayloadRef,
    PolicyVersion,
    SessionId,
    UpdateId,
)
from perdure.core.record_types import (
    DECISION_TYPES,
    EvictionReason,
    GroupOutcome,
    RecordType,
    StopReason,
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
class Submitted:
    """A prompt group enters the run. The prompt is stored, so the data set is not needed again."""

    type: ClassVar[RecordType] = RecordType.SUBMITTED
    group: GroupId
    submitted_step: GlobalStep
    sessions: int
    prompt_ids: tuple[int, ...]
    task: str
    """Name of the task whose verifier judges the answers."""
    answer: str
    """What the verifier needs, as text (JSON for structured tasks)."""
    dataset_digest: str
    data_index: int
    """Position in the data order; the frontier of these is the data position of the run."""

    def key(self) -> str:
        return f"submitted/{self.group}"


@dataclass(frozen=True, slots=True)
class SessionsDone:
    """Sessions of any groups ended and their rewards are settled; their tokens lie in ``payload``.

    All fields but ``payload`` have one element per *row*. Each row has an idempotency key of its
    own: a row whose session counted before is ignored, the others count.
    """

    type: ClassVar[RecordType] = RecordType.SESSIONS_DONE
    sessions: tuple[SessionId, ...]
    """Each once; at least one."""
    rewards: tuple[float, ...]
    stop_reasons: tuple[StopReason, ...]
    tokens: tuple[int, ...]
    """Numbers of generated tokens."""
    first_versions: tuple[PolicyVersion, ...]
    last_versions: tuple[PolicyVersion, ...]
    parts: tuple[dict[str, float], ...]
    """Named components of the rewards, e.g. ``{"correct": 1.0}``."""
    payload: PayloadRef
    """A record with the same sessions in the same order."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if there is no row or a column has more or fewer."""
        columns = (
            self.rewards,
            self.stop_reasons,
            self.tokens,
            self.first_versions,
            self.last_versions,
            self.parts,
        )
        rows = len(self.sessions)
        if not rows:
            raise ValueError("a record of settled sessions has no row")
        if any(len(column) != rows for column in columns):
            raise ValueError(f"columns of unequal length beside {rows} sessions")

    def key(self) -> str:
        return f"sessions_done/{self.sessions[0].key()}"

    def part(self, rows: slice) -> SessionsDone:
        """Some of the rows."""
        return SessionsDone(
            self.sessions[rows],
            self.rewards[rows],
            self.stop_reasons[rows],
            self.tokens[rows],
            self.first_versions[rows],
            self.last_versions[rows],
            self.parts[rows],
            self.payload,
        )


@dataclass(frozen=True, slots=True)
class GroupSettled:
    """A group is terminal."""

    type: ClassVar[RecordType] = RecordType.GROUP_SETTLED
    group: GroupId
    outcome: GroupOutcome
    reason: str = ""

    def key(self) -> str:
        return f"group_settled/{self.group}"


@dataclass(frozen=True, slots=True)
class Partials:
    """Some more tokens of unfinished sessions of any groups; they lie in ``payload``.

    Each row follows, without a gap, what its attempt has so far, and has an idempotency key of its
    own: a row that counted before is ignored, the others count.
    """

    type: ClassVar[RecordType] = RecordType.PARTIALS
    sessions: tuple[SessionId, ...]
    """Each once; at least one."""
    attempts: tuple[int, ...]
    """From 0; a restart of the session begins the next."""
    starts: tuple[int, ...]
    """Response token with which each row begins."""
    ends: tuple[int, ...]
    """Token behind the last one of each row; no row is empty."""
    first_versions: tuple[PolicyVersion, ...]
    last_versions: tuple[PolicyVersion, ...]
    payload: PayloadRef
    """A record with the same rows in the same order."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if rows are missing, unequal in number, empty or twice there."""
        columns = (self.attempts, self.starts, self.ends, self.first_versions, self.last_versions)
        rows = len(self.sessions)
        if not rows or any(len(column) != rows for column in columns):
            raise ValueError(f"columns of unequal length beside {rows} sessions")
        if len(set(self.sessions)) < rows:
            raise ValueError("a session has two rows")
        if not all(0 <= start < end for start, end in zip(self.starts, self.ends, strict=True)):
            raise ValueError("a row without tokens")

    def row_keys(self) -> list[str]:
        """The idempotency key of each row."""
        rows = zip(self.sessions, self.attempts, self.starts, strict=True)
        return [f"partial/{session.key()}/{attempt}/{start}" for session, attempt, start in rows]

    def key(self) -> str:
        return f"partials/{self.sessions[0].key()}/{self.attempts[0]}/{self.starts[0]}"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The journaled result of a tool call, written before it is used."""

    type: ClassVar[RecordType] = RecordType.TOOL_RESULT
    session: SessionId
    attempt: int
    turn: int
    call: int
    tool: str
    result: str
    arguments: str = ""
    """What the tool was called with, as text: another call is never taken for this one."""

    def key(self) -> str:
        return f"tool_result/{self.session.key()}/{self.attempt}/{self.turn}/{self.call}"


@dataclass(frozen=True, slots=True)
class SessionRestarted:
    """An unfinished session starts again from its prompt.

    The tokens and tool results of its earlier attempts stay in the log and are not gone on from.
    """

    type: ClassVar[RecordType] = RecordType.SESSION_RESTARTED
    session: SessionId
    attempt: int
    """The one that begins: the last one plus 1."""
    reason: str

    def key(self) -> str:
        return f"session_restarted/{self.session.key()}/{self.attempt}"


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
