"""A process that has torch and perdure imported and forks children on command.

Started by :class:`drill_tools.ForkServer`. Reads one JSON list of commands per line on stdin, runs
them side by side in children, and answers one JSON list per line on stdout. A kill then costs
milliseconds instead of an import.

Command: ``{"action": "train"|"resume"|"loop"|"arrays"|"spread_model", "run": dir, "log": path,
"recipe": path, "overrides": [...], "plan": [fault rules], "kill_after_s": seconds or null,
"take_over": bool, "when_stopped": another command or null, "ranks": arguments of a rank or null,
"torn_down_after_s": seconds or null, "count_calls": file or null, "kill_engines": [points and
hits], "engines_under": process id or null}``. When a child stops itself (a
fault rule with action ``stop``), the other command is run to its end, and then the child is
continued. As a launcher of several ranks would, ``torn_down_after_s`` after the first child has
ended badly this one is killed. With ``count_calls`` sessions call tools (see ``calling_loop``).
``kill_engines`` says when one of the run's engine processes is killed (see ``engine_kills``). They
descend from the child, or from ``engines_under``.
Answer: ``{"status": exit code or -signal, "log": text, "when_stopped": answer or null}``. A child
that takes longer than ``DEADLINE_S`` is aborted, not killed: nobody takes it for a strike.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import calling_loop
import engine_kills
import loop_script
import rank_scripts

from perdure.config import load_config
from perdure.core.errors import PerdureError
from perdure.core.faults import FaultPlan, NoFaults
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected

DEADLINE_S = 180.0


def main() -> None:
    warm_up()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line))) + "\n")
        sys.stdout.flush()


def warm_up() -> None:
    """Train once here: children inherit everything that is imported or made on first use."""
    recipe = Path(__file__).with_name("drill_recipe.yaml")
    with tempfile.TemporaryDirectory() as directory:
        launch.train(load_config(RunConfig, recipe), Path(directory) / "run")
        loop_script.run(Path(directory) / "loop", NoFaults())
    assert threading.active_count() == 1, "a fork copies no other thread"


def serve(commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fork one child per command, kill those that are to be killed, report how each ended."""
    children: dict[int, dict[str, Any]] = {}
    for command in commands:
        Path(command["log"]).touch()
        child = os.fork()
        if child == 0:
            run_child(command)
        children[child] = command
    answers = wait(children)
    return [
        {**answers[child], "log": Path(command["log"]).read_text()[-4000:]}
        for child, command in children.items()
    ]


def wait(children: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    started_s = time.monotonic()
    answers: dict[int, dict[str, Any]] = {child: {"when_stopped": None} for child in children}
    running = set(children)
    killed: set[int] = set()
    ended_badly_s: float | None = None
    while running:
        elapsed_s = time.monotonic() - started_s
        for child in sorted(running):
            pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if pid == child and os.WIFSTOPPED(status):
                # Without a command it was somebody else who stopped it, and who lets it go on.
                if children[child]["when_stopped"] is not None:
                    (answers[child]["when_stopped"],) = serve([children[child]["when_stopped"]])
                    os.kill(child, signal.SIGCONT)
            elif pid == child:
                answers[child]["status"] = os.waitstatus_to_exitcode(status)
                running.discard(child)
                if answers[child]["status"] and ended_badly_s is None:
                    ended_badly_s = elapsed_s
            elif child not in killed and is_due(children[child], elapsed_s, ended_badly_s):
                os.kill(child, signal.SIGKILL)
                killed.add(child)
            elif elapsed_s > DEADLINE_S:
                os.kill(child, signal.SIGABRT)
                os.kill(child, signal.SIGCONT)
        time.sleep(0.001)
    return answers


def is_due(command: dict[str, Any], elapsed_s: float, ended_badly_s: float | None) -> bool:
    """Whether the child is to be killed now."""
    kill_after_s = command["kill_after_s"]
    torn_down_after_s = command["torn_down_after_s"]
    if ended_badly_s is not None and torn_down_after_s is not None:
        kill_after_s = ended_badly_s + torn_down_after_s
    return kill_after_s is not None and elapsed_s >= kill_after_s


def run_child(command: dict[str, Any]) -> None:
    """Never returns: the child leaves through ``os._exit``."""
    code = 1
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    plan = FaultPlan.from_json(json.dumps(command["plan"]))
    engine_kills.install(
        plan,
        command["kill_engines"],
        run=Path(command["run"]),
        under=command["engines_under"],
        said=Path(command["log"]),
    )
    try:
        run_command(command, plan)
        code = 0
    except PerdureError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        code = error.exit_code
    except BaseException:  # noqa: BLE001 - the child has no caller; its traceback is its report
        traceback.print_exc()
    finally:
        hits = {point.value: count for point, count in plan.hits.items()}
        sys.stdout.write(f"HITS {json.dumps(hits)}\n")
        sys.stdout.flush()
        os._exit(code)


def run_command(command: dict[str, Any], plan: FaultPlan) -> None:
    run = Path(command["run"])
    if command["count_calls"] is not None:
        calling_loop.install(command["count_calls"])
    if command["action"] == "train":
        config = load_config(RunConfig, Path(command["recipe"]), command["overrides"])
        launch.train(config, run, injected=Injected(faults=plan))
    elif command["action"] == "arrays":
        rank_scripts.arrays(run, plan, **command["ranks"])
    elif command["action"] == "spread_model":
        rank_scripts.spread_model(run, plan, **command["ranks"])
    elif command["action"] == "loop":
        loop_script.run(run, plan, take_over=command["take_over"])
    else:
        launch.resume(run, take_over=command["take_over"], injected=Injected(faults=plan))


if __name__ == "__main__":
    main()
