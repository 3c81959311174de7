"""What the ray runtime says when there is no cluster, too little of one, or none any more."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from drill_tools import RECIPE, Events
from ray_cluster import QUIET, a_cluster
from typer.testing import CliRunner

from perdure.audit import audit_run
from perdure.cli.main import app
from perdure.config import load_config
from perdure.core.clock import SystemClock
from perdure.core.errors import ConfigError, InfrastructureError
from perdure.core.events import EventSink, ignore_events
from perdure.core.ids import IncarnationNumber
from perdure.experience import read_experience
from perdure.runtime.ray.cluster import PoolPlan, joined
from perdure.runtime.ray.head import answers
from perdure.runtime.ray.places import give_back, reserve
from perdure.storage import PosixStorage
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("ray"), *QUIET]
FIRST = IncarnationNumber(1)
FAST = ("rollout.process.heartbeat_s=0.2", "rollout.process.silence_timeout_s=2")


def refusal(run: Path, *overrides: str, display: EventSink = ignore_events) -> str:
    """The sentence; nothing was made."""
    config = load_config(RunConfig, RECIPE, ["runtime=ray", *overrides])
    with pytest.raises(ConfigError) as refused:
        launch.train(config, run, display=display)
    assert not run.exists()
    return str(refused.value)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Of somebody who accepts connections and says nothing, like a head that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_without_ray_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'perdure[ray]'" in refusal(tmp_path / "run")


def test_a_head_that_is_not_there_is_noticed_in_seconds(tmp_path: Path, silent_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed_port = server.getsockname()[1]
    for port in (closed_port, silent_port):
        began_s, events = time.monotonic(), Events()
        said = refusal(tmp_path / "run", f"ray.address=127.0.0.1:{port}", display=events)
        assert events.of("waiting") == [{"what": f"the cluster at 127.0.0.1:{port}", "seconds": 0}]
        assert f"no cluster can be joined at 127.0.0.1:{port}" in said
        assert "ray start --head" in said
        assert time.monotonic() - began_s < 20


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:10001", "127.0.0.1"])
def test_an_environment_that_names_no_head_is_said_to_do_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    said = refusal(tmp_path / "run")
    assert f"no cluster can be joined at {address}" in said
    assert "RAY_ADDRESS" in said
    assert "host:port" in said


def test_a_cluster_that_cannot_be_started_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "file"
    place.touch()
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    assert "no cluster can be started on this machine" in refusal(tmp_path / "run")


def test_doctor_says_whether_the_head_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_address: str, silent_port: int
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    assert f"the head at {ray_address} answers" in doctor(tmp_path, code=0)
    for address, wrong in (
        (f"127.0.0.1:{silent_port}", "nobody answers at"),
        ("auto", "no cluster can be joined at"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        said = doctor(tmp_path, code=7)
        assert f"{wrong} {address}" in said
        for way_out in ("`ray start --head`", "unset RAY_ADDRESS", "ray.address"):
            assert way_out in said
    monkeypatch.delenv("RAY_ADDRESS")
    assert "RAY_ADDRESS is not set" in doctor(tmp_path, code=0)


def doctor(directory: Path, *, code: int) -> str:
    result = CliRunner().invoke(app, ["doctor", str(directory)])
    assert result.exit_code == code, result.output
    return result.output


def test_a_cluster_that_is_too_small_is_refused(tmp_path: Path, ray_address: str) -> None:
    said = refusal(tmp_path / "run", f"ray.address={ray_address}", "rollout.engines=20")
    assert "21 CPUs are needed, the cluster has 8" in said


@pytest.mark.parametrize("own", [True, False])
def test_a_cluster_is_shown_the_token_that_ray_finds(
    tmp_path: Path, ray_address: str, own: bool
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    if not own:
        environment["RAY_AUTH_TOKEN"] = "0" * 64
    overrides = ["runtime=ray", f"ray.address={ray_address}", "rollout.engines=20"]
    command = ["train", str(RECIPE), *overrides, "--run", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", "from perdure.cli.entry import main; main()", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    wanted = "21 CPUs are needed" if own else "way out: set RAY_AUTH_MODE=token, with the cluster's"
    assert wanted in done.stderr
    assert done.stderr.count("Unauthenticated") <= 5


class Hurried(SystemClock):
    """Half a minute passes in a tenth of a second for those who wait."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s / 300)


def test_places_that_others_hold_are_waited_for_and_then_named(
    tmp_path: Path, ray_address: str
) -> None:
    others = PoolPlan(engines=7)
    overrides = ["runtime=ray", f"ray.address={ray_address}", "ray.place_timeout_s=2"]
    with joined(others, address=ray_address):
        group = asyncio.run(reserve("others", others, incarnation=FIRST, timeout_s=60))
        events, injected = Events(), Injected(clock=Hurried())
        config = load_config(RunConfig, RECIPE, overrides)
        with pytest.raises(ConfigError, match="no room for 2 CPUs") as refused:
            launch.train(config, tmp_path / "run", display=events, injected=injected)
        assert "ray status" in str(refused.value)
        told = [one["seconds"] for one in events.of("waiting") if "2 CPUs" in str(one["what"])]
        assert len(told) > 2
        assert told == sorted(told)
        asyncio.run(give_back(group, incarnation=FIRST))
        launch.resume(tmp_path / "run", ["ray.place_timeout_s=60"])
    assert audit_run(tmp_path / "run").ok


def test_what_cannot_work_is_refused_all_at_once() -> None:
    wrong = ("runtime=ray", "rollout.engines=0", "ray.address=auto", "rollout.spillover=true")
    with pytest.raises(ConfigError) as refused:
        load_config(RunConfig, RECIPE, wrong)
    for words in ("runtime: ray generates on", "host:port of the head", "rollout.spillover"):
        assert words in str(refused.value)


def test_a_head_that_dies_ends_the_run_and_a_resume_goes_on_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run"
    died_s: list[float] = []
    with a_cluster(cpus=4) as cluster:
        address = cluster.address

        def display(name: str, fields: dict[str, object]) -> None:
            if name == "step" and fields["global_step"] == 2:
                cluster.kill_head()
                while answers(address, timeout_s=1):
                    time.sleep(0.01)
                died_s.append(time.monotonic())

        overrides = ("runtime=ray", f"ray.address={address}", "trainer.total_steps=8", *FAST)
        config = load_config(RunConfig, RECIPE, overrides)
        with pytest.raises(InfrastructureError, match="has not answered for") as gone:
            launch.train(config, run, display=display)
        assert address in str(gone.value)
        assert time.monotonic() - died_s[0] < 45
    done, _ = read_experience(PosixStorage(run))
    assert done.last_step is not None
    config_text = (run / "config.yaml").read_text()
    launch.resume(run, ["runtime=local"])
    assert audit_run(run).ok
    assert (run / "config.yaml").read_text() == config_text
