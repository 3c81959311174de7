"""The checkpoint engine's commit ledger inside a run: the experience log itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from perdure.core.ids import GlobalStep, LogPosition
from perdure.core.records import Checkpointed, Collect
from perdure.experience import ExperienceState, ExperienceStore, metrics_of_step


class LogLedger:
    """A checkpoint counts when its record lies in the kept lineage of the log.

    Until :meth:`start` it only reads: a checkpoint is chosen before the incarnation is announced.

    Args:
        state: What the log says.
    """

    def __init__(self, state: ExperienceState) -> None:
        self._state = state
        self._store: ExperienceStore | None = None

    def start(self, store: ExperienceStore) -> None:
        """The incarnation has begun to write."""
        self._store = store

    def commit(self, record: Checkpointed) -> Future[LogPosition]:
        store = self._started()
        future = store.commit(record)
        store.commit_all()
        return future

    def collect(self, record: Collect) -> Future[LogPosition]:
        store = self._started()
        future = store.collect(record)
        store.commit_all()
        return future

    def committed(self) -> Sequence[Checkpointed]:
        """Committed and not collected, oldest first."""
        return self._state.checkpoints if self._store is None else self._store.committed()

    def metrics(self, record: Checkpointed) -> Mapping[str, float]:
        """Of the step (``train/…``) and of its validation (``held_out/…``), if there was one."""
        if record.phase != "train":
            return {}
        step = GlobalStep(record.step)
        if self._store is None:
            return metrics_of_step(self._state, step)
        return self._store.metrics_of(step)

    def _started(self) -> ExperienceStore:
        assert self._store is not None, "commits come after the incarnation is announced"
        return self._store
