"""SIGKILL to the process that ships, or pulls: the remote pointer always leads to a whole run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_servers import S3Server, new_prefix, s3_objects, s3_server
from tier_cases import resumed_elsewhere

from perdure.checkpoint.tier import ObjectStore, read_head
from perdure.core.errors import NothingToResumeError
from perdure.core.faults import FaultPoint

WORKER = Path(__file__).with_name("tier_worker.py")
TESTS = WORKER.parent.parent
SHIPPING = [
    FaultPoint.REMOTE_PIECE_STORED,
    FaultPoint.REMOTE_MANIFEST_STORED,
    FaultPoint.REMOTE_LOG_STORED,
    FaultPoint.REMOTE_HEAD_SWAPPED,
    FaultPoint.REMOTE_DROPPED,
]
LONGEST_S = 0.6
"""A process is killed at most so long after it began to train."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def start(
    action: str, run: Path, endpoint: str, prefix: str, plan: object = ()
) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), action, str(run), endpoint, prefix, json.dumps(plan)]
    path = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def wait_for(process: subprocess.Popen[str]) -> int:
    with process:
        return process.wait(timeout=100)


def check_remote(objects: ObjectStore, at_least: int) -> int:
    """An empty machine resumes; returns the step of the checkpoint that is pointed to."""
    try:
        target = read_head(objects).target
    except NothingToResumeError:
        target = None
    if target is None:
        assert at_least == 0
        return 0
    assert target.step >= at_least
    # A request that was under way when its process died may still be done: it may be newer.
    restored = resumed_elsewhere(objects).restored_step
    assert restored >= target.step
    return restored


def kill_at_random(server: S3Server, tmp_path: Path, *, seed: int, kills: int) -> None:
    """Kill one run again and again; in the end it ships as if nothing had been."""
    prefix = new_prefix()
    objects = s3_objects(server.url, prefix)
    moments = random.Random(seed)
    step = 0
    for _ in range(kills):
        process = start("train", tmp_path / "run", server.url, prefix)
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        time.sleep(moments.uniform(0.0, LONGEST_S))
        process.send_signal(signal.SIGKILL)
        assert wait_for(process) == -signal.SIGKILL
        step = check_remote(objects, step)
    plan = [{"point": "remote_manifest_stored", "hit": 2}]
    last = start("train", tmp_path / "run", server.url, prefix, plan)
    assert wait_for(last) == -signal.SIGKILL
    assert check_remote(objects, step) > step


@pytest.mark.parametrize("seed", range(2))
def test_killed_while_shipping_at_random_moments(
    server: S3Server, tmp_path: Path, seed: int
) -> None:
    kill_at_random(server, tmp_path, seed=seed, kills=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 115))
def test_killed_while_shipping_many_times(server: S3Server, tmp_path: Path, seed: int) -> None:
    kill_at_random(server, tmp_path, seed=seed, kills=20)


@pytest.mark.parametrize("point", SHIPPING)
def test_killed_at_a_point_of_shipping(server: S3Server, tmp_path: Path, point: FaultPoint) -> None:
    prefix = new_prefix()
    objects = s3_objects(server.url, prefix)
    step = 0
    for hit in (1, 3):
        plan = [{"point": point.value, "hit": hit}]
        assert (
            wait_for(start("train", tmp_path / "run", server.url, prefix, plan)) == -signal.SIGKILL
        )
        step = check_remote(objects, step)


def test_killed_while_pulling(server: S3Server, tmp_path: Path) -> None:
    prefix = new_prefix()
    plan = [{"point": "remote_dropped", "hit": 2}]
    assert wait_for(start("train", tmp_path / "run", server.url, prefix, plan)) == -signal.SIGKILL
    target = read_head(s3_objects(server.url, prefix)).target
    assert target is not None
    pulled = tmp_path / "pulled"
    for hit in (1, 2, 4):
        stops = [{"point": "remote_file_pulled", "hit": hit}]
        ended = wait_for(start("pull", pulled, server.url, prefix, stops))
        assert ended == -signal.SIGKILL
        assert not (pulled / "run.json").exists()
    assert wait_for(start("pull", pulled, server.url, prefix)) == 0
    assert wait_for(start("train", pulled, server.url, prefix, plan)) == -signal.SIGKILL
    after = check_remote(s3_objects(server.url, prefix), target.step)
    assert after > target.step
