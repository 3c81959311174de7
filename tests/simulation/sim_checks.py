"""What has to hold of a simulated run, from the bytes of its storage alone."""

from __future__ import annotations

from pathlib import Path

from fakes import FakeLearner, token_of, weights_after
from logged_batches import logged_group, logged_records, settled_rows

from perdure.audit import audit_run
from perdure.core.experience_records import GroupSettled, SessionRestarted, ToolResult
from perdure.core.ids import SessionId
from perdure.core.record_types import GroupOutcome, StopReason
from perdure.core.storage_api import Storage
from perdure.core.trajectories import RewardedGroup
from perdure.experience import ExperienceState
from perdure.experience.payloads import PayloadReader
from perdure.storage import MemoryStorage
from perdure.tasks.tokenizer import Tokenizer, encode_known
from perdure.trainers.config import RunConfig

_REASONS = (
    "(attempt 3)",
    "tool outside raised RuntimeError: a bug of the tool",
    "verifier raised ValueError: the verifier has no answer",
    "verifier gave no verdict within 60 s",
    "the weights of its sessions no longer exist",
)


def check_counts(state: ExperienceState, config: RunConfig) -> None:
    """Assert that every eviction was paid for once, and nothing else was submitted beyond need.

    A rewind makes evictions void and leaves the prompts that paid for them.
    """
    trainer, table = config.trainer, state.table
    needed = trainer.total_steps * trainer.train_batch_size
    spare = table.next_group - needed - table.evictions.total() + len(table.owed)
    rewound = any(record.base_position is not None for record in state.incarnations)
    assert spare >= 0 if rewound else spare == 0


def check_audit(storage: MemoryStorage, folder: Path) -> None:
    """Assert that the independent audit finds nothing in the files."""
    for path, data in storage.files().items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    report = audit_run(folder)
    assert report.ok, "\n".join(report.summary_lines())


def check_weights(storage: Storage, state: ExperienceState) -> None:
    """Assert that the final weights come from the taken batches alone, each token from its version.

    Every group is trained once at most, and the digest chain over the logged batches, in order, is
    the digest that the log ends with.
    """
    rows = settled_rows(storage)
    reader = PayloadReader(storage)
    weights = [0.0, 0.0]
    trained: list[int] = []
    for update, record in state.taken.items():
        groups = [logged_group(reader, rows[group], group) for group in record.groups]
        for group in groups:
            _check_tokens(group)
        trained += record.groups
        weights = weights_after(weights, update, groups)
    assert len(trained) == len(set(trained))
    last = state.step_done[state.last_step]
    learner = FakeLearner()
    learner.set(weights)
    assert learner.policy_digest() == last.policy_digest


def _check_tokens(group: RewardedGroup) -> None:
    for one in group.trajectories:
        one.check()
        key = (7, one.session.group, one.session.index)
        for segment in one.segments:
            for t in range(segment.start, segment.end):
                if one.loss_mask_T[t]:
                    assert one.response_ids_T[t] == token_of(key, t, segment.version)


def check_reasons(storage: Storage) -> None:
    """Assert that every group that failed says which failure it was, of those that there are."""
    for record in logged_records(storage):
        if isinstance(record, GroupSettled) and record.outcome is GroupOutcome.FAILED:
            for reason in record.reason.split("; "):
                assert reason.endswith(_REASONS), record


def check_tools(storage: Storage, tokenizer: Tokenizer, *, continues: bool) -> None:
    """Assert that sessions were told what the journal has of their last attempt, and nothing else.

    No call has two results in the journal. Without ``continues`` a session may say something else
    when it starts again, and leave a call out.
    """
    attempts: dict[SessionId, int] = {}
    journal: dict[SessionId, dict[tuple[int, int, int], ToolResult]] = {}
    for record in logged_records(storage):
        if isinstance(record, SessionRestarted):
            attempts[record.session] = record.attempt
        elif isinstance(record, ToolResult):
            place = (record.attempt, record.turn, record.call)
            assert journal.setdefault(record.session, {}).setdefault(place, record) == record
    reader = PayloadReader(storage)
    for number, rows in settled_rows(storage).items():
        for one in logged_group(reader, rows, number).trajectories:
            results = journal.get(one.session, {})
            told = [
                token
                for (attempt, _, _), record in sorted(results.items())
                if attempt == attempts.get(one.session, 0)
                for token in encode_known(tokenizer, record.result)
            ]
            observed = one.response_ids_T[one.loss_mask_T == 0].tolist()
            assert observed == told[: len(observed)], one.session.key()
            whole = len(observed) == len(told)
            cut = one.stop_reason is StopReason.LENGTH or not continues
            assert whole or cut, one.session.key()
