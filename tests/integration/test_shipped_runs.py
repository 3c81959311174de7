"""Runs whose recipe names a remote tier: shipped while they train, brought back, told of."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckpt_cases import perdure
from drill_tools import RECIPE, Events, assert_same_results
from fault_proxy import Fault, FaultProxy
from object_servers import S3Server, new_prefix, s3_objects, s3_server
from tier_cases import OPTIONS, TieredRun, context, memory_objects

from perdure import keep
from perdure.audit import audit_run
from perdure.checkpoint.tier import open_objects, pull, read_head
from perdure.config import load_config
from perdure.core.clock import ManualClock
from perdure.core.errors import ConfigError, StorageError
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.storage import MemoryStorage
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("reference") / "run"
    launch.train(load_config(RunConfig, RECIPE), run)
    return run


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def config_for(remote: str, *more: str) -> RunConfig:
    return load_config(RunConfig, RECIPE, (f"checkpoint.remote={remote}", *more))


def cut_off(config: RunConfig, run: Path, **injected: Any) -> None:
    plan = FaultPlan([FaultRule(FaultPoint.STEP_DONE, 4, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        launch.train(config, run, injected=Injected(faults=plan, **injected))


def status_of(run: Path) -> dict[str, Any]:
    code, out, err = perdure("status", run, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_run_goes_on_after_its_disk_is_gone(tmp_path: Path, reference: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/tier"
    cut_off(config_for(url), run)
    shutil.rmtree(run)
    code, _, err = perdure("resume", run)
    assert (code, f"perdure ckpt pull URL {run}" in err) == (6, True)
    code, _, err = perdure("resume", run, f"checkpoint.remote={url}")
    assert code == 0, err
    assert_same_results(run, reference)
    assert audit_run(run).ok
    head = read_head(open_objects(url))
    assert (head.incarnation, head.target and head.target.step) == (2, 6)
    assert status_of(run)["remote"] == {
        "address": url,
        "checkpoint": "step-00000006-2",
        "behind_checkpoints": 0,
        "behind_log_bytes": 0,
        "exposed_s": 0.0,
        "trouble": "",
    }
    assert "costs nothing of it" in perdure("status", run)[1]


def test_a_run_without_a_tier_says_what_it_is_exposed_to(reference: Path) -> None:
    found = status_of(reference)
    assert found["remote"] is None
    assert (found["global_step"], found["live"]) == (6, False)
    assert found["checkpoint"].startswith("step-00000006")
    assert "the loss of this disk the run" in perdure("status", reference)[1]


def test_what_the_rules_keep_stays_in_the_tier_too() -> None:
    objects = memory_objects()
    rules = keep(last=1, every=3)
    run = TieredRun(MemoryStorage(), keep=rules)
    options = dataclasses.replace(OPTIONS, keep=rules)
    for _ in range(7):
        run.train_and_save()
        run.push(objects, options=options)
    assert [one.step for one in read_head(objects).checkpoints] == [3, 6, 7]
    other = MemoryStorage()
    pull(other, objects, context=context(), checkpoint="step-00000003-1")
    assert TieredRun(other).restored_step == 3


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.BLACK_HOLE])
def test_training_is_the_same_while_the_store_is_down(
    tmp_path: Path, reference: Path, server: S3Server, fault: Fault
) -> None:
    run, said = tmp_path / "run", Events()
    prefix = new_prefix()
    with FaultProxy(server.address) as proxy:

        def display(name: str, fields: dict[str, Any]) -> None:
            said(name, fields)
            if name == "run_started":
                proxy.plan = lambda method, target: fault

        objects = s3_objects(proxy.url, prefix, request_timeout_s=0.5)
        config = config_for("s3://bucket/prefix", "checkpoint.ship_at_end_s=0.5")
        launch.train(config, run, display=display, injected=Injected(objects=objects))
        assert proxy.struck[fault]
    assert_same_results(run, reference)
    assert said.of("remote_failed")
    assert not said.of("checkpoint_skipped")
    found = status_of(run)["remote"]
    assert found["behind_log_bytes"] > 0
    assert found["trouble"]
    assert "shipping fails" in perdure("status", run)[1]
    patient = ["checkpoint.ship_at_end_s=60"]
    launch.resume(run, patient, injected=Injected(objects=s3_objects(server.url, prefix)))
    found = status_of(run)["remote"]
    assert (found["behind_log_bytes"], found["behind_checkpoints"], found["trouble"]) == (0, 0, "")


def test_a_place_that_holds_a_run_takes_no_other(tmp_path: Path) -> None:
    config = config_for(f"file://{tmp_path}/tier")
    cut_off(config, tmp_path / "one")
    with pytest.raises(ConfigError, match="holds the run .* `perdure ckpt pull"):
        launch.train(config, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_a_run_is_not_resumed_into_the_place_of_another(tmp_path: Path) -> None:
    for name in ("one", "two"):
        cut_off(config_for(f"file://{tmp_path}/{name}-tier"), tmp_path / name)
    before = sorted(path.name for path in (tmp_path / "one/incarnations").iterdir())
    with pytest.raises(ConfigError, match=r"holds the run .* name another prefix"):
        launch.resume(tmp_path / "one", [f"checkpoint.remote=file://{tmp_path}/two-tier"])
    assert sorted(path.name for path in (tmp_path / "one/incarnations").iterdir()) == before


def test_a_place_that_does_not_answer_is_not_an_empty_one(tmp_path: Path) -> None:
    config = config_for(f"file://{tmp_path}/not-mounted/tier")
    with pytest.raises(StorageError, match="mount it"):
        launch.create(config, tmp_path / "run", injected=Injected(clock=ManualClock()))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("address", ["gs://b/x", "runs/x", "file://x"])
def test_an_address_that_is_none_is_refused_with_the_recipe(address: str) -> None:
    with pytest.raises(ConfigError, match="remote"):
        config_for(address)
