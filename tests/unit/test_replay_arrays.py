"""Replay in another library's flat arrays: only what changed is written, whatever it did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_cases import ReplayRun

from perdure.checkpoint import ReplayArrays
from perdure.core.errors import ConfigError
from perdure.storage import MemoryStorage


class Buffer:
    """As Stable-Baselines3 keeps it: arrays, the next slot, whether it is full."""

    def __init__(self, capacity: int) -> None:
        self.observations = np.zeros((capacity, 1, 2), np.float32)
        self.rewards = np.zeros((capacity, 1), np.float64)
        self.pos = 0
        self.full = False
        self.added = 0

    def add(self, value: float) -> None:
        self.observations[self.pos] = value
        self.rewards[self.pos] = -value
        self.pos += 1
        self.added += 1
        if self.pos == len(self.rewards):
            self.pos, self.full = 0, True

    def reset(self) -> None:
        self.pos, self.full = 0, False

    def contents(self) -> tuple[Any, ...]:
        there = len(self.rewards) if self.full else self.pos
        return (
            self.pos,
            self.full,
            self.observations[:there].tolist(),
            self.rewards[:there].tolist(),
        )


def run_of(
    storage: MemoryStorage, capacity: int = 8, *, counted: bool = True, incarnation: int = 1
) -> tuple[ReplayRun, Buffer]:
    buffer = Buffer(capacity)
    replay = ReplayArrays(
        {"observations": buffer.observations, "rewards": buffer.rewards},
        buffer,
        total=(lambda: buffer.added) if counted else None,
        segment_bytes=16 * 3,
    )
    return ReplayRun(storage, replay, incarnation=incarnation, keep=1), buffer


def rows_written(storage: MemoryStorage, since: int) -> int:
    """Rows in the segments written since that operation."""
    return sum(
        int(operation.path.split("-")[1])
        for operation in storage.journal[since:]
        if operation.kind == "rename" and operation.path.startswith("segments/")
    )


def check_restored(storage: MemoryStorage, expected: Buffer, *, counted: bool) -> None:
    again, buffer = run_of(storage, counted=counted, incarnation=2)
    again.restore()
    assert buffer.contents() == expected.contents()


def test_only_new_rows_are_written() -> None:
    storage = MemoryStorage()
    run, buffer = run_of(storage)
    counts: list[int] = []
    for step, adds in enumerate([5, 2, 0, 4, 7, 8, 9, 1]):
        for _ in range(adds):
            buffer.add(float(buffer.added))
        before = storage.operations
        run.save_well(step + 1)
        counts.append(rows_written(storage, before))
        check_restored(storage, buffer, counted=True)
    assert counts == [5, 2, 0, 4, 7, 8, 8, 1]


@pytest.mark.parametrize("counted", [True, False])
def test_copies_leave_the_memory_when_they_are_durable(counted: bool) -> None:
    run, buffer = run_of(MemoryStorage(), counted=counted)
    for step in (1, 2):
        for _ in range(5):
            buffer.add(float(buffer.added))
        run.save_well(step)
        held = run.replay.segments()
        assert held
        assert all(one.memory is None for one in held)


def test_without_a_count_all_rows_are_written() -> None:
    storage = MemoryStorage()
    run, buffer = run_of(storage, counted=False)
    counts: list[int] = []
    for step, adds in enumerate([3, 8, 0, 1]):
        for _ in range(adds):
            buffer.add(float(buffer.added))
        before = storage.operations
        run.save_well(step + 1)
        counts.append(rows_written(storage, before))
        check_restored(storage, buffer, counted=False)
    assert counts == [3, 8, 8, 8]


def test_after_a_restart_it_goes_on_with_what_is_new() -> None:
    storage = MemoryStorage()
    run, buffer = run_of(storage)
    for value in range(6):
        buffer.add(float(value))
    run.save_well(1)
    again, other = run_of(storage, incarnation=2)
    again.restore()
    other.added = buffer.added
    other.add(9.0)
    before = storage.operations
    again.save_well(2)
    assert rows_written(storage, before) == 1
    check_restored(storage, other, counted=True)


def test_a_cold_start_leaves_the_arrays_empty() -> None:
    storage = MemoryStorage()
    run, buffer = run_of(storage)
    for value in range(11):
        buffer.add(float(value))
    run.save_well(1)
    again, other = run_of(storage, incarnation=2)
    again.restore(cold=["replay"])
    assert (other.pos, other.full) == (0, False)
    other.add(1.0)
    again.save_well(2)
    check_restored(storage, other, counted=True)


def test_what_is_overwritten_while_it_is_written_stays_as_it_was() -> None:
    storage = MemoryStorage()
    run, buffer = run_of(storage)
    for value in range(8):
        buffer.add(float(value))
    expected = buffer.contents()
    segments = (run.replay.state(), run.replay.segments())[1]
    for value in range(8):
        buffer.add(100.0 + value)
    held = np.concatenate([one.view("observations", 0, one.rows) for one in segments])
    assert held.tolist() == expected[2]


def test_a_file_that_vanished_fails_one_save_and_is_written_anew() -> None:
    storage = MemoryStorage()
    run, buffer = run_of(storage)
    for value in range(5):
        buffer.add(float(value))
    run.save_well(1)
    run.save_well(2)
    storage.remove(f"segments/replay/{run.files()[0]}")
    run.save(3)
    assert "gone from the disk" in str(run.engine.last_error)
    run.save_well(4)
    check_restored(storage, buffer, counted=True)


@given(
    st.lists(
        st.one_of(st.integers(0, 20), st.just("reset"), st.just("restart")), min_size=1, max_size=8
    ),
    st.booleans(),
)
def test_it_comes_back_whatever_happened(actions: list[Any], counted: bool) -> None:
    storage = MemoryStorage()
    run, buffer = run_of(storage, counted=counted)
    added = 0
    for step, action in enumerate(actions):
        if action == "reset":
            buffer.reset()
        elif action == "restart" and step:
            run, buffer = run_of(storage, counted=counted, incarnation=step + 1)
            run.restore()
            buffer.added = added
        elif isinstance(action, int):
            for _ in range(action):
                buffer.add(float(buffer.added))
        added = buffer.added
        run.save_well(step + 1)
        check_restored(storage, buffer, counted=counted)


def test_what_cannot_be_taken_is_refused() -> None:
    arrays = {"a": np.zeros(3), "b": np.zeros(4)}
    with pytest.raises(ConfigError, match="lengths"):
        ReplayArrays(arrays, Buffer(3))
    with pytest.raises(ConfigError, match="cannot be stored"):
        ReplayArrays({"a": np.zeros(3, object)}, Buffer(3))


def test_another_capacity_or_other_arrays_are_refused() -> None:
    storage = MemoryStorage()
    run, buffer = run_of(storage)
    buffer.add(1.0)
    run.save_well(1)
    other, _ = run_of(storage, capacity=9, incarnation=2)
    with pytest.raises(ConfigError, match="capacity is 8"):
        other.restore()
    fewer = ReplayRun(storage, ReplayArrays({"rewards": buffer.rewards}, buffer), incarnation=2)
    with pytest.raises(ConfigError, match="columns are"):
        fewer.restore()


def test_whole_segments_are_copied_between_saves() -> None:
    storage = MemoryStorage()
    run, buffer = run_of(storage)
    buffer.add(0.0)
    assert not run.engine.store_segments(run.incarnation)
    for value in range(1, 4):
        buffer.add(float(value))
    assert run.engine.store_segments(run.incarnation)
    assert run.engine.wait(5)
    buffer.add(4.0)
    before = storage.operations
    run.save_well(1)
    assert rows_written(storage, before) == 1
    check_restored(storage, buffer, counted=True)
