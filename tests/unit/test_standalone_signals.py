"""SIGTERM and SIGUSR1: a save at the next safe point, handlers chained and put back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from standalone_loops import WAIT_S, Gate, Script, StillClock, committed, full_at, uninterrupted

from perdure.core.components import ComponentState
from perdure.core.faults import FaultPoint
from perdure.storage import MemoryStorage


class Counted:
    """A part that says how often it has changed, and changes when it is looked at."""

    schema_version = 1

    def __init__(self) -> None:
        self.state_version = 0
        self.changes = 0

    def state(self) -> ComponentState:
        if self.changes:
            self.changes -= 1
            self.state_version += 2
        return ComponentState(values={"n": 1})

    def load(self, state: ComponentState, schema_version: int) -> None:
        pass


def terminate(step: int) -> Any:
    return lambda now: os.kill(os.getpid(), signal.SIGTERM) if now == step else None


class TestSigterm:
    def test_it_saves_at_the_next_safe_point_and_leaves_with_143(self) -> None:
        storage = MemoryStorage()
        before = signal.getsignal(signal.SIGTERM)
        script = Script(storage)
        with pytest.raises(SystemExit) as left:
            script.run(each=terminate(17))
        assert left.value.code == 143
        assert committed(storage) == [10, 17]
        assert "step 17 is saved" in script.events.warnings()[-1]
        assert signal.getsignal(signal.SIGTERM) == before
        again = Script(storage)
        again.run()
        assert again.state() == uninterrupted()

    def test_the_body_can_see_it(self) -> None:
        script = Script(MemoryStorage())
        seen: list[bool] = []

        def each(step: int) -> None:
            terminate(3)(step)
            seen.append(script.engine.stopping)

        with pytest.raises(SystemExit):
            script.run(each=each)
        assert seen == [False, False, True]

    def test_the_handler_before_is_called_after_the_save(self) -> None:
        storage = MemoryStorage()
        heard: list[list[int]] = []

        def mine(number: int, frame: object) -> None:
            heard.append(committed(storage))

        before = signal.signal(signal.SIGTERM, mine)
        try:
            with pytest.raises(SystemExit):
                Script(storage).run(each=terminate(17))
            assert heard == [[10, 17]]
            assert signal.getsignal(signal.SIGTERM) is mine
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_a_second_one_goes_to_the_handler_before_at_once(self) -> None:
        class Now(Exception):
            pass

        heard: list[int] = []

        def mine(number: int, frame: object) -> None:
            heard.append(number)
            raise Now

        def each(step: int) -> None:
            if step == 17:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, mine)
        storage = MemoryStorage()
        try:
            with pytest.raises(Now):
                Script(storage).run(each=each)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert committed(storage) == [10]
        assert heard == [signal.SIGTERM]

    def test_a_save_that_does_not_end_within_the_grace_period_is_not_waited_for(self) -> None:
        gate = Gate(FaultPoint.CHECKPOINT_FILES_DURABLE)
        clock = StillClock()
        script = Script(MemoryStorage(), faults=gate, clock=clock, grace_s=5.0)

        def each(step: int) -> None:
            terminate(3)(step)
            clock.advance(6.0 if step == 3 else 0.0)

        with pytest.raises(SystemExit):
            script.run(each=each)
        # Nobody has opened the gate yet: leaving has not waited either.
        gate.open()
        assert "step 3 is NOT saved" in script.events.warnings()[0]
        assert "did not end before the grace period did" in script.events.warnings()[1]

    def test_breaking_out_waits_for_a_pending_save_no_longer(self) -> None:
        gate = Gate(FaultPoint.CHECKPOINT_FILES_DURABLE)
        clock, heard = StillClock(), list[int]()
        script = Script(MemoryStorage(), faults=gate, clock=clock, grace_s=5.0)

        def each(step: int) -> bool:
            terminate(12)(step)
            clock.advance(6.0 if step == 12 else 0.0)
            return step == 12

        before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        try:
            script.run(each=each, hurry=True)
            gate.open()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert heard == [signal.SIGTERM]
        assert "did not end before the grace period did" in script.events.warnings()[0]

    def test_breaking_out_does_not_lose_the_handler_before(self) -> None:
        storage, heard = MemoryStorage(), list[list[int]]()

        def mine(number: int, frame: object) -> None:
            heard.append(committed(storage))

        def each(step: int) -> bool:
            terminate(17)(step)
            return step == 17

        before = signal.signal(signal.SIGTERM, mine)
        try:
            script = Script(storage)
            script.run(each=each)
            assert heard == [[10]]
            assert signal.getsignal(signal.SIGTERM) is mine
            script.run(each=lambda step: step == 19)
            assert heard == [[10]], "once"
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_what_the_handler_before_raises_is_not_lost_with_the_iterator(self) -> None:
        class Now(Exception):
            pass

        def mine(number: int, frame: object) -> None:
            raise Now

        def each(step: int) -> bool:
            terminate(17)(step)
            return step == 17

        def leave_and_go_on() -> None:
            Script(MemoryStorage()).run(each=each)
            threading.Event().wait(WAIT_S)

        before = signal.signal(signal.SIGTERM, mine)
        try:
            with pytest.raises(Now):
                leave_and_go_on()
            assert signal.getsignal(signal.SIGTERM) is mine
        finally:
            signal.signal(signal.SIGTERM, before)

    @pytest.mark.parametrize(
        ("after", "status"),
        [("time.sleep(60)", -signal.SIGTERM), ("sys.exit(3)", 3), ("raise ValueError", 1)],
    )
    def test_breaking_out_ends_a_process_that_does_not_end_itself(
        self, tmp_path: Path, after: str, status: int
    ) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import os, signal, sys, time\n"
            "from perdure import CheckpointEngine\n"
            f"engine = CheckpointEngine({str(tmp_path / 'run')!r})\n"
            "engine.register(counters={'n': 0})\n"
            "for step in engine.steps(9):\n"
            "    os.kill(os.getpid(), signal.SIGTERM)\n"
            "    break\n"
            f"{after}\n"
        )
        ended = subprocess.run(
            [sys.executable, script], check=False, timeout=50, capture_output=True, text=True
        )
        assert ended.returncode == status
        assert ("ValueError" in ended.stderr) == ("ValueError" in after)

    def test_a_failing_save_still_leaves(self) -> None:
        script = Script(full_at("step-00000003"))
        with pytest.raises(SystemExit):
            script.run(each=terminate(3))
        assert "step 3 is NOT saved" in script.events.warnings()[-1]

    def test_a_state_that_keeps_changing_is_not_called_saved(self) -> None:
        storage, state = MemoryStorage(), Counted()
        script = Script(storage)
        script.engine.register(state=state)

        def each(step: int) -> None:
            if step == 7:
                state.state_version = 1
                terminate(7)(step)

        with pytest.raises(SystemExit):
            script.run(each=each)
        assert committed(storage) == []
        assert "step 7 is NOT saved" in script.events.warnings()[-1]

    def test_a_torn_copy_is_made_again(self) -> None:
        storage, state = MemoryStorage(), Counted()
        script = Script(storage)
        script.engine.register(state=state)

        def each(step: int) -> None:
            if step == 7:
                state.changes = 1
                terminate(7)(step)

        with pytest.raises(SystemExit):
            script.run(each=each)
        assert committed(storage) == [7]
        assert "checkpoint_skipped" in script.events.names()
        assert "step 7 is saved" in script.events.warnings()[-1]

    def test_a_state_that_cannot_be_stored_is_not_called_saved(self) -> None:
        script = Script(MemoryStorage())

        def each(step: int) -> None:
            if step == 7:
                script.counters["x"] = object()  # type: ignore[assignment]
                terminate(7)(step)

        with pytest.raises(SystemExit):
            script.run(each=each)
        assert "counters" in script.events.warnings()[-2]
        assert "step 7 is NOT saved" in script.events.warnings()[-1]

    def test_during_the_last_save_it_is_not_forgotten(self) -> None:
        storage = MemoryStorage()

        class DuringTheLast:
            def reach(self, point: FaultPoint) -> None:
                if point is FaultPoint.CHECKPOINT_STAGED and script.engine.step == 40:
                    os.kill(os.getpid(), signal.SIGTERM)

        script = Script(storage, faults=DuringTheLast())
        with pytest.raises(SystemExit) as left:
            script.run()
        assert left.value.code == 143
        assert committed(storage)[-1] == 40
        assert "step 40 is saved" in script.events.warnings()[-1]

    def test_workers_forked_inside_the_loop_die_of_it(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import os, signal, time\n"
            "from perdure import CheckpointEngine, every\n"
            f"engine = CheckpointEngine({str(tmp_path / 'run')!r}, save=every(steps=5))\n"
            "engine.register(counters={'n': 0})\n"
            "for step in engine.steps(1):\n"
            "    ready, tell = os.pipe()\n"
            "    child = os.fork()\n"
            "    if child == 0:\n"
            "        os.write(tell, b'.')\n"
            "        time.sleep(60)\n"
            "        os._exit(0)\n"
            "    os.read(ready, 1)\n"
            "    os.kill(child, signal.SIGTERM)\n"
            "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM\n"
        )
        subprocess.run([sys.executable, script], check=True, timeout=60)

    def test_a_loop_in_another_thread_runs_without_signals(self) -> None:
        script = Script(MemoryStorage())
        thread = threading.Thread(target=script.run)
        thread.start()
        thread.join(WAIT_S)
        assert script.engine.step == 40
        assert "signals reach the main thread only" in script.events.warnings()[0]


def test_sigusr1_asks_for_a_save_and_calls_the_handler_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        script = Script(MemoryStorage(), keep=9)
        script.run(each=lambda step: os.kill(os.getpid(), signal.SIGUSR1) if step == 7 else 0)
        assert heard == [signal.SIGUSR1]
        assert committed(script.storage) == [7, 10, 20, 30, 40]
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)
