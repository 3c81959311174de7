"""The process that writes a run and lets workers append; it may be killed.

    python remote_process.py RUN_DIR SOCKET PLAN

``PLAN`` is a JSON list of fault rules; hits count from when the prompts are there. Prints
``listening`` when workers may come, and closes in an orderly way when its input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import experience_records as make

from perdure.core.clock import SystemClock
from perdure.core.faults import FaultPlan, FaultPoint
from perdure.experience import LogOptions, RunInfo, StoreServer, claim_experience, create_run
from perdure.storage import PosixStorage

RUN_ID = "5" * 32
GROUPS = 24
FLUSH_S = 60.0


class Armed:
    """A plan that strikes only once it is armed."""

    def __init__(self) -> None:
        self.plan = FaultPlan()

    def reach(self, point: FaultPoint) -> None:
        self.plan.reach(point)


def main() -> None:
    run, path, plan = sys.argv[1:]
    storage = PosixStorage(Path(run))
    create_run(storage, RunInfo(RUN_ID, 0.0))
    faults = Armed()
    options = LogOptions(linger_s=0.001, segment_bytes=4096)
    claimed = claim_experience(storage, clock=SystemClock(), faults=faults, options=options)
    store = claimed.start()
    if not store.state.groups:
        store.append(make.published(0))
        store.submit([make.submitted(group) for group in range(GROUPS)])
        store.flush(FLUSH_S)
    faults.plan = FaultPlan.from_json(plan)
    server = StoreServer(store, Path(path))
    print("listening", flush=True)
    sys.stdin.read()
    server.close()
    store.check()
    store.close("done")


if __name__ == "__main__":
    main()
