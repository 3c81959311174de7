"""The remote tier: CPU-seconds per GB shipped and pulled, beside boto3, on a loopback S3 server.

    python benchmarks/tier.py [--mib N] [--rounds R]

The server (moto) is a process of its own; what counts is the CPU time of this process, all threads:
reading the files, checksums, requests. Per round: one checkpoint of random numbers is shipped
without and with reading it back, pulled into an empty directory, and its largest file is put by
boto3 as that comes out of the box. The best of the rounds counts; the wall clock is the server's.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

import boto3
import numpy as np

from perdure.checkpoint import (
    ArraysComponent,
    Checkpointer,
    MemoryLedger,
    Registry,
    StagedInfo,
)
from perdure.checkpoint.tier import (
    ObstoreObjects,
    TierContext,
    TierOptions,
    open_objects,
    pull,
    push,
)
from perdure.core.clock import SystemClock
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.experience import RunInfo, claim_experience, create_run
from perdure.storage import PosixStorage

BUCKET = "benchmark"
ACCESS = {"region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}
ONE = IncarnationNumber(1)
TARGET_CPU_S_PER_GB = 0.3


@contextlib.contextmanager
def s3_server() -> Generator[str]:
    """URL of a server process that has the bucket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("PUT", f"/{BUCKET}")
                connection.getresponse()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def make_run(directory: Path, nbytes: int) -> tuple[PosixStorage, MemoryLedger]:
    """A run with one committed checkpoint of ``nbytes`` random bytes."""
    storage = PosixStorage(directory)
    create_run(storage, RunInfo("b" * 32, 0.0))
    claimed = claim_experience(storage, clock=SystemClock(), faults=NoFaults())
    claimed.release()
    ledger = MemoryLedger()
    weights = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8).view(np.float32)
    registry = Registry()
    registry.register("policy", ArraysComponent({"w": weights}), kind="model")
    engine = Checkpointer(
        storage,
        registry=registry,
        ledger=ledger,
        clock=SystemClock(),
        faults=NoFaults(),
        events=ignore_events,
    )
    info = StagedInfo(LogPosition(ONE, 0, 0), {"global_step": 1}, {}, "none", "", "")
    engine.stage(CheckpointName("train", 1, ONE), info=info, must=True)
    engine.close()
    return storage, ledger


def measured(call: Callable[[], object], nbytes: int) -> dict[str, float]:
    """CPU-seconds of this process and seconds, per GB."""
    before, started_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    wall_s = time.perf_counter() - started_s
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s_per_gb": cpu_s / nbytes * 1e9, "wall_s_per_gb": wall_s / nbytes * 1e9}


def one_round(server: str, work: Path, *, number: int, nbytes: int) -> dict[str, dict[str, float]]:
    storage, ledger = make_run(work / f"run-{number}", nbytes)
    clock = SystemClock()

    def objects(name: str) -> ObstoreObjects:
        return open_objects(f"s3://{BUCKET}/{name}-{number}", config={"endpoint": server, **ACCESS})

    def ship(name: str, *, read_back: bool) -> None:
        context = TierContext(clock, TierOptions(read_back=read_back))
        push(storage, objects(name), ledger=ledger, incarnation=ONE, context=context)

    model = next((work / f"run-{number}").glob("checkpoints/*/model/*.safetensors"))
    client = boto3.client(
        "s3",
        endpoint_url=server,
        region_name=ACCESS["region"],
        aws_access_key_id=ACCESS["access_key_id"],
        aws_secret_access_key=ACCESS["secret_access_key"],
    )
    pulled = PosixStorage(work / f"pulled-{number}")
    calls: dict[str, Callable[[], object]] = {
        "ship": lambda: ship("plain", read_back=False),
        "ship and read back": lambda: ship("checked", read_back=True),
        "pull": lambda: pull(pulled, objects("checked"), context=TierContext(clock)),
        "boto3 upload_file": lambda: client.upload_file(str(model), BUCKET, f"boto-{number}"),
    }
    return {name: measured(call, nbytes) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    nbytes = arguments.mib << 20
    with s3_server() as server, tempfile.TemporaryDirectory(dir=".") as work:
        rounds = [
            one_round(server, Path(work), number=number, nbytes=nbytes)
            for number in range(arguments.rounds)
        ]
    best = {
        name: {unit: min(one[name][unit] for one in rounds) for unit in rounds[0][name]}
        for name in rounds[0]
    }
    if arguments.json:
        print(json.dumps({"mib": arguments.mib, "rounds": arguments.rounds, "best": best}))
        return
    for name, figure in best.items():
        print(
            f"{name:<20} {figure['cpu_s_per_gb']:6.2f} CPU-s/GB {figure['wall_s_per_gb']:7.1f} s/GB"
        )
    ratio = best["boto3 upload_file"]["cpu_s_per_gb"] / best["ship"]["cpu_s_per_gb"]
    print(f"target: ship at most {TARGET_CPU_S_PER_GB} CPU-s/GB; boto3 takes {ratio:.1f} times it")


if __name__ == "__main__":
    main()
