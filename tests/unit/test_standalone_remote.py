"""A script whose run is shipped to an object store goes on after its disk is gone."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from standalone_loops import Script, StillClock, crash_at, crashed, uninterrupted
from tier_cases import BreakingObjects, memory_objects

from perdure.checkpoint.tier import RemoteUnavailableError, read_head
from perdure.core.errors import ConfigError
from perdure.core.events import ignore_events
from perdure.core.faults import (
    FaultAction,
    FaultPlan,
    FaultPoint,
    FaultRule,
    InjectedFault,
    NoFaults,
)
from perdure.runtime.remote import Remote, RemotePlan
from perdure.storage import MemoryStorage


def test_a_script_goes_on_where_its_lost_disk_ended() -> None:
    objects = memory_objects()
    first = crashed(MemoryStorage(), 12, remote=objects)
    status = first.engine.remote_status()
    assert status is not None
    assert (status.behind_checkpoints, status.behind_log_bytes, status.last_error) == (0, 0, "")
    second = Script(MemoryStorage(), remote=objects)
    second.run()
    assert second.engine.restored_from is not None
    assert second.engine.restored_from.step == 10
    assert second.state() == uninterrupted()


def test_a_run_that_is_here_is_not_fetched() -> None:
    objects = memory_objects()
    storage = MemoryStorage()
    crashed(storage, 12, remote=objects)
    again = Script(storage.open_as_new_process(), remote=objects)
    again.run()
    assert "pulled" not in again.events.names()
    assert again.state() == uninterrupted()


def test_a_store_that_does_not_answer_is_not_an_empty_one() -> None:
    class Silent:
        def __getattr__(self, name: str) -> object:
            raise RemoteUnavailableError("no answer", where="remote")

    script = Script(MemoryStorage(), remote=Silent())
    with pytest.raises(RemoteUnavailableError):
        script.run()
    assert script.engine.step == 0
    assert not script.storage.exists("run.json")


def test_a_second_loop_of_one_process_goes_on_shipping() -> None:
    objects = memory_objects()
    script = crashed(MemoryStorage(), 12, remote=objects)
    script.run()
    status = script.engine.remote_status()
    assert status is not None
    assert status.behind_checkpoints == 0
    assert resumed(objects).engine.restored_from is not None


def test_a_pull_that_was_killed_goes_on_with_the_same_script() -> None:
    for hit in itertools.count(1):
        objects, storage = memory_objects(), MemoryStorage()
        crashed(MemoryStorage(), 12, remote=objects)
        plan = FaultPlan([FaultRule(FaultPoint.REMOTE_FILE_PULLED, hit, FaultAction.RAISE)])
        with contextlib.suppress(InjectedFault):
            Script(storage, remote=objects, faults=plan).run(each=crash_at(1))
        if not plan.fired:
            break
        assert resumed(objects, storage.open_as_new_process()).engine.step == 10
    assert hit > 5


def resumed(objects: Any, storage: MemoryStorage | None = None) -> Script:
    """Restored, and stopped before it does anything."""
    script = Script(storage or MemoryStorage(), remote=objects)
    script.engine.start()
    script.engine.close()
    return script


def test_an_address_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="remote"):
        Script(MemoryStorage(), remote="bucket/x")


def test_the_prefix_of_another_run_is_refused_at_the_start() -> None:
    objects, storage = memory_objects(), MemoryStorage()
    crashed(MemoryStorage(), 12, remote=objects)
    crashed(storage, 12)
    before = read_head(objects)
    script = Script(storage.open_as_new_process(), remote=objects)
    with pytest.raises(ConfigError, match=r"holds the run .*a prefix of its own"):
        script.run()
    assert script.engine.step == 0
    assert read_head(objects) == before
    assert Script(storage.open_as_new_process()).run() == 40, "nothing was claimed"


def test_a_store_in_trouble_keeps_no_run_that_is_here_from_training() -> None:
    objects, storage = memory_objects(), MemoryStorage()
    crashed(storage, 12, remote=objects)
    down = BreakingObjects(objects, {0: (RemoteUnavailableError("down"), False)})
    assert Script(storage.open_as_new_process(), remote=down).run() == 40
    assert down.requests[0] == ("read", "head.json")
    assert down.broke == 1
    objects.overwrite("head.json", b"{}")
    plan = RemotePlan(objects)
    Remote(plan, clock=StillClock(), faults=NoFaults(), events=ignore_events).require_own("x")
