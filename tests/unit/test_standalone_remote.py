"""A script whose run is shipped to an object store goes on after its disk is gone."""

from __future__ import annotations

import pytest
from standalone_loops import Script, crashed, uninterrupted
from tier_cases import memory_objects

from perdure.checkpoint.tier import RemoteUnavailableError
from perdure.core.errors import ConfigError
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


def test_an_address_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="remote"):
        Script(MemoryStorage(), remote="bucket/x")
