"""Where checkpoints are committed: the protocol, and a ledger that lives in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from perdure.core.records import Checkpointed, Collect


class CommitLedger(Protocol):
    """The commit point of checkpoints. Called from the engine's thread and from its owner's."""

    def commit(self, record: Checkpointed) -> Future[Any]:
        """Append; the future resolves when the record is acknowledged."""
        ...

    def collect(self, record: Collect) -> Future[Any]:
        """Append; the future resolves when the record is acknowledged."""
        ...

    def committed(self) -> Sequence[Checkpointed]:
        """Committed in the kept lineage and not collected, oldest first."""
        ...

    def metrics(self, record: Checkpointed) -> Mapping[str, float]:
        """What is known of the state of a checkpoint beyond its manifest, by name."""
        ...


class CheckpointTier(Protocol):
    """A tier behind the local disk that ships what is committed. Thread-safe; never waits."""

    def notify(self) -> None:
        """A checkpoint was committed."""
        ...

    def let_go(self, directories: Sequence[str]) -> tuple[str, ...]:
        """Those of the directories that the tier does not need to stay committed and here."""
        ...


class MemoryLedger:
    """Commits that live as long as the object, for simulation and for trying the engine out."""

    def __init__(self, records: Sequence[Checkpointed] = ()) -> None:
        self._records = list(records)
        self._lock = threading.Lock()

    def commit(self, record: Checkpointed) -> Future[Any]:
        with self._lock:
            self._records.append(record)
        return _done()

    def collect(self, record: Collect) -> Future[Any]:
        gone = set(record.directories)
        with self._lock:
            self._records = [kept for kept in self._records if kept.directory not in gone]
        return _done()

    def committed(self) -> Sequence[Checkpointed]:
        with self._lock:
            return tuple(self._records)

    def metrics(self, record: Checkpointed) -> Mapping[str, float]:
        del record
        return {}


def _done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future
