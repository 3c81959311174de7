"""Loss of power at every step of every write sequence: nothing acknowledged is lost."""

from __future__ import annotations

import itertools

import pytest
from log_cases import (
    FLUSH_S,
    History,
    check_contents,
    kept_keys,
    make_claim,
    make_run,
    open_writer,
    partials,
    read_head,
    session_done,
    started,
    submitted,
)

from perdure.core.errors import NothingToResumeError
from perdure.experience.claims import read_run
from perdure.experience.writer import LogWriter
from perdure.storage import MemoryStorage, PowerLost

# Small enough that every second batch opens a segment.
SEGMENT_BYTES = 512


def _first_life(storage: MemoryStorage, history: History) -> None:
    make_run(storage)
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed, segment_bytes=SEGMENT_BYTES)
    history.append(writer, [started(claimed), submitted(0)])
    writer.flush(FLUSH_S)
    history.append(writer, [session_done(0, tokens=150)])
    history.append(writer, [partials([1, 2], 0, 60)])
    history.append(writer, [submitted(1), submitted(2)])
    writer.flush(FLUSH_S)
    history.append(writer, [session_done(1), partials([3, 2], 0, 1), session_done(2, tokens=40)])
    writer.flush(FLUSH_S)
    history.append(writer, [submitted(3)])
    writer.flush(FLUSH_S)
    writer.close("done")
    claimed.release()


def _next_life(storage: MemoryStorage, history: History, *, group: int) -> LogWriter:
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed, segment_bytes=SEGMENT_BYTES)
    history.append(writer, [started(claimed), submitted(group)])
    writer.flush(FLUSH_S)
    history.append(writer, [session_done(group)])
    writer.flush(FLUSH_S)
    return writer


def _crash_at(step: int, history: History) -> MemoryStorage:
    storage = MemoryStorage(seed=step)
    storage.fail_after = step
    with pytest.raises(PowerLost):
        _first_life(storage, history)
    return storage


def _steps_of_first_life() -> int:
    storage = MemoryStorage()
    _first_life(storage, History())
    return storage.operations


def _check_prefix(storage: MemoryStorage, history: History) -> None:
    """What is kept is what was asked for, in order, up to at least the last acknowledged one."""
    log = read_head(storage)
    kept = kept_keys(log)
    assert kept == history.asked[: len(kept)]
    assert len(kept) >= len(history.acknowledged)
    check_contents(storage, log)


def _check_step(step: int, *, stride: int) -> None:
    """Lose power at a step; look at every ``stride``-th of the extreme outcomes."""
    history = History()
    storage = _crash_at(step, history)
    extremes = itertools.islice(storage.crash_states(), step % stride, None, stride)
    for found in [storage.process_kill(), storage.crash(), *extremes]:
        try:
            read_run(found)
        except NothingToResumeError:
            assert not history.acknowledged
            continue
        _check_prefix(found, history)
        later = History(asked=kept_keys(read_head(found)))
        _next_life(found, later, group=7)
        # Whatever the first loss of power left, the second life is as durable as the first.
        again = found.crash()
        log = read_head(again)
        assert kept_keys(log) == later.asked
        check_contents(again, log)


def test_log_survives_power_loss_at_every_step() -> None:
    for step in range(_steps_of_first_life()):
        _check_step(step, stride=4)


@pytest.mark.soak
@pytest.mark.parametrize("step", range(_steps_of_first_life()))
def test_log_survives_every_extreme_outcome(step: int) -> None:
    _check_step(step, stride=1)


def test_log_survives_power_loss_while_it_is_claimed() -> None:
    _crash_every_claim_step(every=4)


@pytest.mark.soak
def test_log_survives_every_extreme_outcome_while_it_is_claimed() -> None:
    _crash_every_claim_step(every=1)


def _crash_every_claim_step(*, every: int) -> None:
    history = History()
    written = _crash_at(_steps_of_first_life() - 25, history)
    crashes = 0
    while True:
        found = written.crash(seed=crashes)
        before = kept_keys(read_head(found))
        assert before[: len(history.acknowledged)] == history.acknowledged
        later = History(asked=list(before))
        found.fail_after = crashes
        try:
            _next_life(found, later, group=7)
        except PowerLost:
            for last in itertools.islice(found.crash_states(), crashes % every, None, every):
                kept = kept_keys(read_head(last))
                assert kept[: len(before)] == before
                assert set(kept) >= set(later.acknowledged)
                assert set(kept) <= set(later.asked)
            crashes += 1
        else:
            break
    assert crashes > 20
