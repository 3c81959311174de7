"""A store behind a door, and workers before it, for tests of the remote store."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import experience_records as make
import numpy as np

from perdure.core.clock import ManualClock
from perdure.core.experience_records import GroupSettled
from perdure.core.faults import FaultHook, NoFaults
from perdure.core.ids import GroupId, SessionId
from perdure.core.record_types import GroupOutcome
from perdure.core.storage_api import Storage
from perdure.experience import (
    ExperienceStore,
    FinishedSession,
    LogOptions,
    RemoteOptions,
    RemoteStore,
    RunInfo,
    StoreServer,
    claim_experience,
    create_run,
    read_experience,
)
from perdure.experience.payloads import PayloadReader
from perdure.storage.memory import MemoryStorage

RUN_ID = "5" * 32
FLUSH_S = 60.0
INLINE = LogOptions(threaded=False, tries=1)
THREADED = LogOptions(linger_s=0.0, tries=1)


def session(group: int, index: int, reward: float = 0.5, *, length: int = 4) -> FinishedSession:
    trajectory = make.trajectory(group, index, length=length)
    return FinishedSession(trajectory, reward, {"right": reward})


def group_of(group: int, sessions: int = 2) -> list[FinishedSession]:
    return [session(group, index, float(index)) for index in range(sessions)]


def new_storage() -> MemoryStorage:
    storage = MemoryStorage()
    create_run(storage, RunInfo(RUN_ID, 0.0))
    return storage


def start_store(
    storage: Storage,
    *,
    groups: int = 0,
    options: LogOptions = THREADED,
    faults: FaultHook | None = None,
    take_over: bool = False,
) -> ExperienceStore:
    """The next incarnation; ``groups`` prompts of two sessions are submitted."""
    claimed = claim_experience(
        storage,
        clock=ManualClock(),
        faults=faults or NoFaults(),
        options=options,
        take_over=take_over,
    )
    store = claimed.start()
    if groups:
        store.submit([make.submitted(group) for group in range(groups)])
        store.flush(FLUSH_S)
    return store


class Door:
    """A server, connections to it over socket pairs, and what it warned of."""

    def __init__(self, store: ExperienceStore, path: Path) -> None:
        self.store = store
        self.path = path
        self.warnings: list[str] = []
        self.server = StoreServer(store, path, events=self._note)

    def _note(self, name: str, fields: dict[str, object]) -> None:
        assert name == "warning"
        self.warnings.append(str(fields["message"]))

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.server.serve(theirs)
        return ours

    def close(self, reason: str = "closed") -> None:
        self.server.close(FLUSH_S)
        self.store.close(reason)
        self.store.check()


class Doors:
    """The door that workers find now; none while ``now`` is None."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp())
        self.path = self._directory / "store"
        self.now: Door | None = None
        self.connections = 0
        self._opened: list[socket.socket] = []

    def open(self, store: ExperienceStore) -> Door:
        self.now = Door(store, self.path)
        return self.now

    def close(self) -> None:
        """Nobody answers any more."""
        door, self.now = self.now, None
        assert door is not None
        door.close()

    def connect(self) -> socket.socket:
        self.connections += 1
        if self.now is None:
            raise ConnectionRefusedError(111, "Connection refused")
        self._opened.append(self.now.connect())
        return self._opened[-1]

    def cut(self) -> None:
        """End every connection, as a crash does."""
        for one in self._opened:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def worker(
        self,
        *,
        options: RemoteOptions | None = None,
        connect: Callable[[], socket.socket] | None = None,
        run_id: str = RUN_ID,
    ) -> RemoteStore:
        return RemoteStore(
            self.path,
            run_id=run_id,
            clock=ManualClock(),
            options=options,
            connect=connect or self.connect,
        )

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._directory.rmdir()


@contextlib.contextmanager
def doors() -> Iterator[Doors]:
    value = Doors()
    try:
        yield value
    finally:
        if value.now is not None:
            value.close()
        value.remove()
        mine = [t.name for t in threading.enumerate() if t.name.startswith("perdure-remote")]
        assert mine == [], "every thread was joined by its owner"


def check_log(storage: Storage, expected: Sequence[FinishedSession]) -> None:
    """The log has exactly these sessions, each once, with the same bytes."""
    state, _ = read_experience(storage)
    found = {
        SessionId(group, index): settled
        for group, live in state.groups.items()
        for index, settled in live.done.items()
    }
    assert sorted(found) == sorted(one.trajectory.session for one in expected)
    reader = PayloadReader(storage)
    for one in expected:
        wanted = one.trajectory
        batch, row = found[wanted.session]
        assert batch.payload is not None
        read = reader.trajectory(batch.payload, row=batch.first_row + row, session=wanted.session)
        for name in ("prompt_ids_P", "response_ids_T", "logprobs_T", "loss_mask_T"):
            np.testing.assert_array_equal(getattr(read, name), getattr(wanted, name), strict=True)
        assert (read.segments, read.stop_reason) == (wanted.segments, wanted.stop_reason)
        record = batch.record
        assert record.rewards[row] == one.reward
        assert record.parts[row] == one.parts
        assert record.tokens[row] == int(wanted.loss_mask_T.sum())
        assert (record.first_versions[row], record.last_versions[row]) == wanted.version_range()


def state_of(store: ExperienceStore, group: int) -> str:
    return store.state.table.state_of(GroupId(group)).value


def finished(group: int) -> GroupSettled:
    return GroupSettled(GroupId(group), GroupOutcome.FINISHED)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for another thread; fails after a minute."""
    pause = threading.Event()
    for _ in range(int(FLUSH_S / 0.002)):
        if holds():
            return
        pause.wait(0.002)
    raise AssertionError("it never came true")
