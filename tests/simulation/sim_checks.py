"""What has to hold of a simulated run, from the bytes of its storage alone."""

from __future__ import annotations

from pathlib import Path

from fakes import FakeLearner, token_of, weights_after
from logged_batches import logged_group, settled_rows

from perdure.audit import audit_run
from perdure.core.storage_api import Storage
from perdure.core.trajectories import RewardedGroup
from perdure.experience import ExperienceState
from perdure.experience.payloads import PayloadReader
from perdure.storage import MemoryStorage
from perdure.trainers.config import RunConfig


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
            expected = [
                token_of(key, t, segment.version) for t in range(segment.start, segment.end)
            ]
            assert one.response_ids_T[segment.start : segment.end].tolist() == expected
