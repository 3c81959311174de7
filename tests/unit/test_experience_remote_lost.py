"""A store that is lost, comes back as another incarnation, or stays away."""

from __future__ import annotations

from collections.abc import Iterator

import experience_records as make
import pytest
from remote_cases import (
    FLUSH_S,
    INLINE,
    Doors,
    check_log,
    doors,
    finished,
    group_of,
    new_storage,
    session,
    start_store,
    state_of,
    wait_until,
)

from perdure.core.errors import FencedError, StorageError
from perdure.experience import RemoteOptions
from perdure.storage.memory import MemoryStorage

IMPATIENT = RemoteOptions(reconnect_timeout_s=5.0, retry_s=0.5, stall_timeout_s=FLUSH_S)


@pytest.fixture
def storage() -> MemoryStorage:
    return new_storage()


@pytest.fixture
def door() -> Iterator[Doors]:
    with doors() as value:
        yield value


def test_what_is_unanswered_goes_to_the_next_incarnation(
    storage: MemoryStorage, door: Doors
) -> None:
    """The first store never commits; its server is cut off as by a crash."""
    first = start_store(storage, groups=3, options=INLINE)
    opened = door.open(first)
    worker = door.worker()
    sent = [*group_of(0), *group_of(1)]
    early = [worker.sessions_done(group_of(group), settled=[finished(group)]) for group in range(2)]
    wait_until(lambda: state_of(first, 1) == "finished")
    second = start_store(storage.open_as_new_process(), take_over=True)
    replaced = door.open(second)
    door.cut()
    late = worker.sessions_done([session(2, 0)])
    for future in (*early, late):
        assert future.result(FLUSH_S).incarnation == second.incarnation
    assert replaced.warnings == []
    check_log(storage, [*sent, session(2, 0)])
    worker.close()
    with pytest.raises(StorageError, match="not acknowledged"):
        opened.server.close(0.01)


def test_an_idle_worker_outlives_a_long_absence(storage: MemoryStorage, door: Doors) -> None:
    door.open(start_store(storage, groups=1))
    worker = door.worker(options=IMPATIENT)
    worker.sessions_done([session(0, 0, 0.0)]).result(FLUSH_S)
    door.close()
    door.open(start_store(storage.open_as_new_process()))
    worker.sessions_done([session(0, 1, 1.0)]).result(FLUSH_S)
    check_log(storage, group_of(0))
    worker.close()


def test_after_the_deadline_every_future_fails_with_one_sentence(
    storage: MemoryStorage, door: Doors
) -> None:
    door.open(start_store(storage, groups=1))
    worker = door.worker(options=IMPATIENT)
    door.close()
    futures = [worker.sessions_done([one]) for one in group_of(0)]
    errors = [future.exception(FLUSH_S) for future in futures]
    assert all(isinstance(error, StorageError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    text = str(errors[0])
    assert str(door.path) in text
    assert "has not answered for 5 s (nobody listens here (Connection refused))" in text
    assert "way out: start or resume the run" in text
    with pytest.raises(StorageError):
        worker.sessions_done([session(0, 0)])
    with pytest.raises(StorageError):
        worker.close()


def test_a_store_that_an_other_has_fenced_is_not_listened_to(
    storage: MemoryStorage, door: Doors
) -> None:
    old = start_store(storage, groups=1)
    first = door.open(old)
    new = start_store(storage.open_as_new_process(), take_over=True)
    second = door.open(new)
    worker = door.worker(options=IMPATIENT)
    worker.sessions_done([session(0, 0)]).result(FLUSH_S)
    door.now = first
    second.close()
    error = worker.sessions_done([session(0, 1)]).exception(FLUSH_S)
    assert "incarnation 1 listens here, which 2 has fenced" in str(error)
    with pytest.raises(StorageError):
        worker.close()
    door.now = None
    first.server.close()
    with pytest.raises(FencedError):
        old.session_done(make.trajectory(0, 1), reward=1.0).result(FLUSH_S)
    with pytest.raises(FencedError):
        old.close("fenced")
