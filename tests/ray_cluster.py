"""A Ray cluster of a test session: a process of its own, small, on the loopback interface.

``python ray_cluster.py CPUS`` prints the address and ends, with all it has started, at the end of
its standard input.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

OBJECT_STORE_BYTES = 80 * 2**20
QUIET = (
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
)
"""Warnings of the framework's own making."""


@dataclass(frozen=True)
class Cluster:
    """One that runs.

    Attributes:
        address: Of its head.
        process: What everything of it descends from, and ends with.
    """

    address: str
    process: subprocess.Popen[str]

    def kill_head(self) -> None:
        """Its server alone, as if it were on a machine that is gone; what runs here goes on."""
        (server,) = (pid for pid in descendants(self.process.pid) if "gcs_server" in _title(pid))
        os.kill(server, signal.SIGKILL)

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


@contextmanager
def a_cluster(*, cpus: int) -> Iterator[Cluster]:
    """A new one.

    Ray gives one up that is not up within half a minute; a busy machine gets another try.
    """
    cluster = _started(cpus)
    for _ in range(3):
        if not cluster.address:
            cluster.end()
            cluster = _started(cpus)
    assert cluster.address, "no cluster could be started"
    try:
        yield cluster
    finally:
        cluster.end()


def _started(cpus: int) -> Cluster:
    process = subprocess.Popen(
        [sys.executable, __file__, str(cpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    return Cluster(process.stdout.readline().strip(), process)


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def _title(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    return ""


def own_token() -> Mapping[str, str]:
    """What clusters of this test session and who joins them are told: a token of their own."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def main() -> None:
    import ray

    context = ray.init(
        num_cpus=int(sys.argv[1]),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        # Idle processes for cores that the machine has not got; engines that wait for everybody.
        _system_config={"prestart_worker_first_driver": False, "worker_niceness": 0},
    )
    sys.stdout.write(f"{context.address_info['gcs_address']}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
