"""A process that trains, saves and ships, or pulls, until it is killed.

python tier_worker.py train|pull RUN ENDPOINT PREFIX [FAULTS]
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from object_servers import s3_objects
from tier_cases import OPTIONS, TieredRun

from perdure.checkpoint.tier import TierContext, pull
from perdure.core.clock import SystemClock
from perdure.core.faults import FaultPlan
from perdure.storage import PosixStorage

STEPS = 200


def main() -> None:
    action, run_dir, endpoint, prefix = sys.argv[1:5]
    plan = FaultPlan.from_json(sys.argv[5] if len(sys.argv) > 5 else "[]")
    storage = PosixStorage(Path(run_dir))
    objects = s3_objects(endpoint, prefix)
    options = dataclasses.replace(OPTIONS, log_ship_s=0.02, poll_s=0.01, keep=1)
    if action == "pull":
        pull(storage, objects, context=TierContext(SystemClock(), options, faults=plan))
        return
    run = TieredRun(storage, keep=1, clock=SystemClock(), take_over=True, segment_bytes=1 << 15)
    tier = run.tier(objects, options=options, faults=plan)
    print("training", flush=True)
    for _ in range(STEPS):
        run.train_and_save()
        tier.notify()
    tier.close()


if __name__ == "__main__":
    main()
