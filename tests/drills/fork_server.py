"""A process that has torch and perdure imported and forks one child per command.

Started by :mod:`drill_tools`; reads one JSON command per line on stdin, answers one JSON line on
stdout. A kill then costs milliseconds instead of an import.

Command: ``{"action": "train"|"resume", "run": dir, "recipe": path, "overrides": [...],
"plan": [fault rules], "kill_after_s": seconds or null, "take_over": bool}``.
Answer: ``{"status": exit code or -signal, "hits": {...}, "log": text}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from perdure.config import load_config
from perdure.core.errors import PerdureError
from perdure.core.faults import FaultPlan
from perdure.trainers import launch
from perdure.trainers.config import RunConfig

DEADLINE_S = 120.0


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


def serve(command: dict[str, Any]) -> dict[str, Any]:
    """Fork, run the command in the child, kill it when asked to, and report how it ended."""
    log_path = Path(command["run"] + ".child.log")
    hits_path = Path(command["run"] + ".hits.json")
    hits_path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        run_child(command, log_path, hits_path)
    status = wait(child, command.get("kill_after_s"))
    hits = json.loads(hits_path.read_text()) if hits_path.exists() else {}
    return {"status": status, "hits": hits, "log": log_path.read_text()[-4000:]}


def wait(child: int, kill_after_s: float | None) -> int:
    started_s = time.monotonic()
    killed = False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        elapsed_s = time.monotonic() - started_s
        if not killed and kill_after_s is not None and elapsed_s >= kill_after_s:
            os.kill(child, signal.SIGKILL)
            killed = True
        if elapsed_s > DEADLINE_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"child ran longer than {DEADLINE_S} s")
        time.sleep(0.001)


def run_child(command: dict[str, Any], log_path: Path, hits_path: Path) -> None:
    """Never returns: the child leaves through ``os._exit``."""
    code = 1
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    plan = FaultPlan.from_json(json.dumps(command.get("plan", [])))
    try:
        run_command(command, plan)
        code = 0
    except PerdureError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        hits_path.write_text(json.dumps({point.value: n for point, n in plan.hits.items()}))
        sys.stdout.flush()
        os._exit(code)


def run_command(command: dict[str, Any], plan: FaultPlan) -> None:
    run = Path(command["run"])
    if command["action"] == "train":
        config = load_config(RunConfig, Path(command["recipe"]), command.get("overrides", []))
        launch.train(config, run, faults=plan)
    else:
        launch.resume(run, take_over=command.get("take_over", False), faults=plan)


if __name__ == "__main__":
    main()
