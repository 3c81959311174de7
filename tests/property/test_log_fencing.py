"""Writers and claimants stopped and continued at any storage call: no acknowledgement is lost."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from interleaving import Actor, run_actors
from log_cases import (
    FLUSH_S,
    History,
    check_contents,
    kept_keys,
    make_claim,
    make_run,
    open_writer,
    read_head,
    session_done,
    started,
    submitted,
)

from perdure.core.errors import FencedError
from perdure.core.keyed_random import generator
from perdure.experience.claims import Claim
from perdure.experience.reader import read_lineage
from perdure.storage import CrashMode, MemoryStorage

Choose = Callable[[list[Actor]], Actor]


@dataclass
class World:
    """What all processes did, in the order in which it took effect."""

    storage: MemoryStorage = field(default_factory=MemoryStorage)
    history: History = field(default_factory=History)
    checks: list[int] = field(default_factory=list)
    """Incarnations that found themselves the highest, in order: the points of acknowledgement."""
    inherited: dict[int, list[str]] = field(default_factory=dict)
    """What each incarnation found when it had claimed."""


def _write(world: World, storage: Any, claimed: Claim, *, group: int, batches: int) -> None:
    """Write until fenced, then try once more, as a zombie would."""

    def note(name: str, fields: dict[str, object]) -> None:
        world.checks.append(claimed.incarnation)

    writer = open_writer(storage, claimed, events=note, segment_bytes=400)
    with contextlib.suppress(FencedError):
        for number in range(group, group + batches):
            entries = [session_done(number), submitted(number)]
            first = [started(claimed)] if number == group else []
            world.history.append(writer, [*first, *entries])
            writer.flush(FLUSH_S)
        return
    with pytest.raises(FencedError):
        world.history.append(writer, [submitted(group + 99)])
    with pytest.raises(FencedError):
        writer.close("zombie")


def _take_over(world: World, storage: Any, *, group: int, batches: int) -> None:
    acknowledged = list(world.history.acknowledged)
    claimed = make_claim(storage, take_over=True)
    found = kept_keys(read_lineage(storage, claimed.parent, verified=claimed.sealed))
    assert set(acknowledged) <= set(found)
    world.inherited[claimed.incarnation] = found
    _write(world, storage, claimed, group=group, batches=batches)


def _check(world: World, *, claims: int) -> None:
    """Nothing acknowledged is lost, acknowledgements never alternate, the run can go on."""
    assert len(world.inherited) == claims
    assert world.checks == sorted(world.checks)
    for storage in (world.storage, world.storage.crash()):
        log = read_head(storage)
        kept = kept_keys(log)
        assert set(world.history.acknowledged) <= set(kept) <= set(world.history.asked)
        for incarnation in set(log.lineage) & set(world.inherited):
            # What it went on from is what everybody later finds before its own records.
            found = world.inherited[incarnation]
            assert kept[: len(found) + 1] == [*found, f"incarnation/{incarnation}"]
        check_contents(storage, log)
    after = make_claim(world.storage.open_as_new_process(), take_over=True)
    found = kept_keys(read_lineage(world.storage, after.parent))
    assert found == kept_keys(read_head(world.storage))


def _world(*, batches_before: int = 1) -> tuple[World, Claim]:
    world = World()
    make_run(world.storage)
    claimed = make_claim(world.storage)
    if batches_before:
        writer = open_writer(world.storage, claimed)
        world.history.append(writer, [started(claimed), session_done(0)])
        writer.flush(FLUSH_S)
        claimed.release()
        claimed = make_claim(world.storage)
    return world, claimed


def _old_writer(world: World, claimed: Claim) -> Actor:
    return Actor(
        world.storage.open_as_new_process(),
        lambda storage: _write(world, storage, claimed, group=100, batches=3),
    )


def _claimant(world: World, number: int, batches: int = 2) -> Actor:
    return Actor(
        world.storage.open_as_new_process(),
        lambda storage: _take_over(world, storage, group=1000 * number, batches=batches),
    )


def _scripted(actors: Sequence[Actor], script: Sequence[tuple[int, int]]) -> Choose:
    """Actors by index, each for a number of steps; in the end, first come first done."""
    order = [actors[index] for index, steps in script for _ in range(steps)]
    order.reverse()

    def choose(running: list[Actor]) -> Actor:
        while order:
            actor = order.pop()
            if not actor.over:
                return actor
        return running[0]

    return choose


def _count_steps(make: Callable[[World, Claim], Actor]) -> int:
    world, claimed = _world()
    actor = make(world, claimed)
    run_actors([actor], lambda running: running[0])
    return actor.steps


_TO_THE_END = 1_000
_WRITER, _CLAIMANT, _SECOND = 0, 1, 2


def _run_script(*script: tuple[int, int], batches: Sequence[int] = (2, 2)) -> None:
    """Run the old writer and as many claimants as the script names, writing so many batches."""
    world, claimed = _world()
    claims = max(index for index, _ in script)
    numbered = list(enumerate(batches[:claims], 1))
    actors = [_old_writer(world, claimed), *(_claimant(world, n, count) for n, count in numbered)]
    run_actors(actors, _scripted(actors, script))
    _check(world, claims=claims)


def _writer_steps() -> int:
    return _count_steps(_old_writer)


def _claimant_steps() -> int:
    return _count_steps(lambda world, claimed: _claimant(world, 1))


def test_log_writer_is_fenced_wherever_it_was_stopped() -> None:
    """The writer stops at every call; a claimant runs as a whole; the writer goes on."""
    for steps in range(_writer_steps() + 1):
        _run_script((_WRITER, steps), (_CLAIMANT, _TO_THE_END))


def test_log_claimant_is_safe_wherever_it_was_stopped() -> None:
    """The claimant stops at every call; the writer goes on to its end; the claimant goes on."""
    for steps in range(_claimant_steps() + 1):
        _run_script((_CLAIMANT, steps), (_WRITER, _TO_THE_END))


def _exhaust_late_claimant(stride: int) -> None:
    """A claimant that was overtaken by a second one settles nothing any more.

    The writer stops inside a commit, the first claimant anywhere; the second one claims and
    writes; the writer ends its commit; the first claimant goes on.
    """
    before_it_writes = _count_steps(lambda world, claimed: _claimant(world, 1, 0))
    # Few of the first claimant's steps matter, so the slice leaves out none of them.
    grid = itertools.product(range(0, _writer_steps(), stride), range(before_it_writes))
    for writer_steps, claimant_steps in grid:
        _run_script(
            (_WRITER, writer_steps),
            (_CLAIMANT, claimant_steps),
            (_SECOND, _TO_THE_END),
            (_WRITER, _TO_THE_END),
            (_CLAIMANT, _TO_THE_END),
            batches=(0, 1),
        )


def test_log_late_claimant_settles_nothing() -> None:
    _exhaust_late_claimant(stride=4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_log_late_claimant_settles_nothing_anywhere() -> None:
    _exhaust_late_claimant(stride=1)


def _exhaust_two_preemptions(stride: int) -> None:
    """Every (writer stops at i, claimant stops at j, writer runs k more) on a grid."""
    grid = itertools.product(range(_writer_steps()), range(_claimant_steps()), (1, 2, 3, 5))
    for first, claimant_steps, more in itertools.islice(grid, 0, None, stride):
        _run_script(
            (_WRITER, first),
            (_CLAIMANT, claimant_steps),
            (_WRITER, more),
            (_CLAIMANT, _TO_THE_END),
        )


def test_log_writer_and_claimant_preempting_each_other() -> None:
    _exhaust_two_preemptions(stride=59)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_log_writer_and_claimant_preempting_each_other_everywhere() -> None:
    _exhaust_two_preemptions(stride=1)


def _run_random(seed: int) -> None:
    rng = generator(seed, "interleaving")
    world, claimed = _world(batches_before=seed % 2)
    claimants = 1 + seed % 3
    actors = [_old_writer(world, claimed), *(_claimant(world, n + 1) for n in range(claimants))]
    stay = [0.0, 0.5, 0.9, 0.97][seed % 4]
    current: list[Actor] = []

    def choose(running: list[Actor]) -> Actor:
        if not current or current[0] not in running or rng.random() >= stay:
            current[:] = [running[int(rng.integers(len(running)))]]
        return current[0]

    run_actors(actors, choose)
    _check(world, claims=claimants)


def test_log_writers_and_claimants_at_random() -> None:
    for seed in range(40):
        _run_random(seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(20))
def test_log_writers_and_claimants_at_random_for_long(block: int) -> None:
    for seed in range(1000 + 500 * block, 1500 + 500 * block):
        _run_random(seed)


def test_log_claimant_that_dies_anywhere_is_survived() -> None:
    """A claimant is killed at every call; the next one finds everything and goes on."""
    for killed_at in range(_claimant_steps()):
        world, claimed = _world()
        writer = open_writer(world.storage, claimed)
        world.history.append(writer, [started(claimed), session_done(50)])
        writer.flush(FLUSH_S)
        victim = _claimant(world, 1)
        for _ in range(killed_at):
            victim.step()
        victim.kill()
        _take_over(world, world.storage.open_as_new_process(), group=2000, batches=2)
        kept = set(kept_keys(read_head(world.storage)))
        assert set(world.history.acknowledged) <= kept
        assert "submitted/2001" in kept


def _exhaust_power_loss_behind_a_claim(stride: int) -> None:
    """What a claimant has seen is durable, although the writer never synced it.

    The writer stops, the claimant stops, the writer makes one more call and is killed; the
    claimant goes on; the power goes.
    """
    before_it_writes = _count_steps(lambda world, claimed: _claimant(world, 1, 0))
    # Few of the writer's steps matter, so the slice leaves out none of them.
    grid = itertools.product(range(_writer_steps()), range(0, before_it_writes, stride))
    for writer_steps, claimant_steps in grid:
        world, claimed = _world()
        writer, claimant = _old_writer(world, claimed), _claimant(world, 1)
        for actor, steps in ((writer, writer_steps), (claimant, claimant_steps), (writer, 1)):
            for _ in range(steps):
                if not actor.over:
                    actor.step()
        writer.kill()
        run_actors([claimant], lambda running: running[0])
        found = world.storage.crash(CrashMode.NOTHING_KEPT)
        assert kept_keys(read_head(found)) == kept_keys(read_head(world.storage))


def test_log_what_a_claimant_has_seen_survives_the_loss_of_power() -> None:
    _exhaust_power_loss_behind_a_claim(stride=3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_log_what_a_claimant_has_seen_survives_the_loss_of_power_everywhere() -> None:
    _exhaust_power_loss_behind_a_claim(stride=1)


def test_log_concurrent_claimants_get_numbers_without_gaps() -> None:
    world, _ = _world(batches_before=0)
    actors = [_claimant(world, number, batches=0) for number in range(1, 5)]
    turns = itertools.count()
    run_actors(actors, lambda running: running[next(turns) % len(running)])
    assert world.storage.list("incarnations") == [f"{n}.json" for n in range(1, 6)]
    _check_empty(world)


def _check_empty(world: World) -> None:
    assert world.history.acknowledged == []
    assert list(world.inherited.values()) == [[]] * 4
