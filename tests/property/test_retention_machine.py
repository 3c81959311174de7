"""Retention over saves, restarts and damage, against what the whole history says must be there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from standalone_loops import Script, StillClock, read_log

from perdure import every, keep
from perdure.checkpoint.retention import present
from perdure.core.faults import NoFaults
from perdure.runtime.maintenance import Collecting, Place, collect_run, would_collect
from perdure.storage import MemoryStorage

TOTAL = 10_000
NEVER = every(steps=TOTAL)


@dataclass
class Saved:
    """What the test knows of a checkpoint that was committed."""

    step: int
    reward: float | None
    damaged: bool = False


class RetentionMachine(RuleBasedStateMachine):
    """One run: saves with and without a metric, restarts, flipped bits, collections."""

    @initialize(
        last=st.integers(1, 3),
        window=st.sampled_from([None, 3, 10]),
        best=st.sampled_from([None, ("reward", "max", 1), ("reward", "min", 2)]),
    )
    def begin(self, last: int, window: int | None, best: Any) -> None:
        self.rules = keep(last=last, every=window, best=best)
        self.storage = MemoryStorage()
        self.history: dict[str, Saved] = {}
        self.start()

    def start(self) -> None:
        self.script = Script(self.storage, save=NEVER, keep=self.rules)
        self.script.engine.start(TOTAL)

    @rule(steps=st.integers(1, 6), reward=st.none() | st.integers(0, 4))
    def save(self, steps: int, reward: int | None) -> None:
        engine = self.script.engine
        for _ in range(steps - 1):
            engine.complete_step()
        if reward is not None:
            engine.report(reward=reward)
        engine.save()
        engine.complete_step()
        self.script.wait()
        assert engine.last_error is None
        newest = read_log(self.storage)[0].checkpoints[-1]
        assert newest.step == engine.step
        self.history[newest.directory] = Saved(engine.step, reward)

    @rule()
    def restart(self) -> None:
        """Another process goes on; the damaged ones it meets are set aside."""
        self.script.engine.close()
        whole = [one.step for one in self.whole().values()]
        self.start()
        assert self.script.engine.step == (whole[-1] if whole else 0)

    @precondition(lambda self: len(self.whole()) > 1)
    @rule()
    def damage(self) -> None:
        """The newest one loses a byte; another one is whole."""
        directory = [*self.there()][-1]
        self.storage.damage(f"checkpoints/{directory}/state.msgpack", b"")
        self.history[directory].damaged = True

    @rule()
    def collect(self) -> None:
        """``ckpt gc`` between two processes deletes nothing that the rules keep."""
        if not self.whole():
            return
        self.script.engine.close()
        before = set(self.there())
        assert would_collect(self.storage, Collecting()).plan.surplus == ()
        collect_run(Place(self.storage, StillClock(), NoFaults()), Collecting())
        assert set(self.there()) == before
        self.start()

    @invariant()
    def what_must_stay_is_there_and_nothing_else(self) -> None:
        if not hasattr(self, "history"):
            return
        there = self.there()
        names = [*self.history]
        due = self.archival()
        for name in due:
            assert name in there or self.history[name].damaged, f"{name} was deleted"
        if not any(one.damaged for one in self.history.values()):
            assert set(there) == {*names[-self.rules.last :], *due}
        if self.history:
            assert self.whole(), "the last whole one is gone"

    def archival(self) -> set[str]:
        """By the whole history: what came first in each window, and the best."""
        due: set[str] = set()
        if self.rules.every is not None:
            seen: set[int] = set()
            for name, one in self.history.items():
                window = one.step // self.rules.every
                if window > 0 and window not in seen:
                    due.add(name)
                seen.add(window)
        best = self.rules.best
        if best is not None:
            sign = -1 if best.mode == "max" else 1
            ranked = sorted(
                (sign * one.reward, place, name)
                for place, (name, one) in enumerate(self.history.items())
                if one.reward is not None
            )
            due |= {name for _, _, name in ranked[: best.count]}
        return due

    def there(self) -> dict[str, Saved]:
        state, _ = read_log(self.storage)
        found = present(self.storage, state.checkpoints)
        return {record.directory: self.history[record.directory] for record in found}

    def whole(self) -> dict[str, Saved]:
        return {name: one for name, one in self.there().items() if not one.damaged}

    def teardown(self) -> None:
        if hasattr(self, "script"):
            self.script.engine.close()


class TestRetention(RetentionMachine.TestCase):
    settings = settings(
        max_examples=10,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@pytest.mark.soak
class TestRetentionAtLength(RetentionMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=40, deadline=None)
