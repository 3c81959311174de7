"""A ring against a plain deque, through any order of appends, saves, restarts, crashes, trims."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from replay_cases import ReplayRun, rows, small_ring, values_of

from perdure.checkpoint import Trim
from perdure.storage import MemoryStorage

CAPACITY = 20


class ReplayMachine(RuleBasedStateMachine):
    """The model is a deque of row numbers and what each checkpoint held."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = MemoryStorage()
        self.incarnation = 0
        self.step = 0
        self.saved: list[tuple[int, list[int]]] = []
        self.rows: deque[int] = deque(maxlen=CAPACITY)
        self.total = 0
        self._start()

    def _start(self) -> None:
        self.incarnation += 1
        self.run = ReplayRun(
            self.storage, small_ring(CAPACITY, 6), keep=2, incarnation=self.incarnation
        )

    @rule(count=st.integers(0, 2 * CAPACITY))
    def append(self, count: int) -> None:
        self.run.replay.append(rows(self.total, count))
        self.rows.extend(range(self.total, self.total + count))
        self.total += count

    @rule()
    def save(self) -> None:
        self.step += 1
        self.run.save_well(self.step)
        self.saved = [*self.saved, (self.total, list(self.rows))][-2:]

    @rule(keep=st.integers(0, CAPACITY))
    def trim(self, keep: int) -> None:
        self.run.replay.trim(Trim(rows=keep))
        self.rows = deque(list(self.rows)[len(self.rows) - min(keep, len(self.rows)) :], CAPACITY)

    @rule(span=st.integers(0, CAPACITY))
    def trim_by_age(self, span: int) -> None:
        self.run.replay.trim(Trim(column="value", span=span))
        self.rows = deque([n for n in self.rows if n >= self.rows[-1] - span], CAPACITY)

    @precondition(lambda self: self.saved)
    @rule(crash=st.booleans())
    def restart(self, crash: bool) -> None:
        self.storage = self.storage.crash() if crash else self.storage.process_kill()
        self._start()
        self.run.restore()
        self.run.engine.sweep(self.run.ledger.collected())
        self.total, held = self.saved[-1]
        self.rows = deque(held, CAPACITY)

    @precondition(lambda self: self.saved)
    @rule()
    def go_back_in_the_same_process(self) -> None:
        self.run.restore()
        self.total, held = self.saved[-1]
        self.rows = deque(held, CAPACITY)

    @precondition(lambda self: self.rows)
    @rule(seed=st.integers(0, 100))
    def sample(self, seed: int) -> None:
        sample = self.run.replay.sample(np.random.default_rng(seed), 16)
        drawn = sample["value"]
        assert set(drawn.tolist()) <= set(self.rows)
        np.testing.assert_array_equal(sample["obs"][:, 1], drawn % 13)
        np.testing.assert_array_equal(sample["done"], drawn % 3 == 0)

    @invariant()
    def the_ring_is_the_deque(self) -> None:
        ring = self.run.replay
        assert values_of(ring) == list(self.rows)
        assert (ring.total, len(ring), ring.full) == (
            self.total,
            len(self.rows),
            len(self.rows) == CAPACITY,
        )

    @invariant()
    def every_checkpoint_is_whole_and_files_are_few(self) -> None:
        committed = self.run.ledger.committed()
        assert all(self.run.engine.verify(record.directory).ok for record in committed)
        assert len(self.run.files()) <= 2 * CAPACITY + 1


ReplayMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestReplayMachine = ReplayMachine.TestCase
