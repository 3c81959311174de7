"""The checkpoint engine's commit ledger inside a run: the experience log itself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from perdure.core.ids import LogPosition
from perdure.core.records import Checkpointed, Collect
from perdure.experience import ExperienceStore


class LogLedger:
    """A checkpoint counts when its record lies in the kept lineage of the log.

    Until :meth:`start` it only reads: a checkpoint is chosen before the incarnation is announced.
    """

    def __init__(self, committed: Sequence[Checkpointed]) -> None:
        self._committed = tuple(committed)
        self._store: ExperienceStore | None = None

    def start(self, store: ExperienceStore) -> None:
        """The incarnation has begun to write."""
        self._store = store

    def commit(self, record: Checkpointed) -> Future[LogPosition]:
        return self._started().commit(record)

    def collect(self, record: Collect) -> Future[LogPosition]:
        return self._started().collect(record)

    def committed(self) -> Sequence[Checkpointed]:
        """Committed and not collected, oldest first."""
        return self._committed if self._store is None else self._store.committed()

    def _started(self) -> ExperienceStore:
        assert self._store is not None, "commits come after the incarnation is announced"
        return self._store
