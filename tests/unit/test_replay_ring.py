"""The ring: what users of other libraries reported, with the right values; refusals; draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from replay_cases import COLUMNS, ReplayRun, rows, small_ring, values_of

from perdure.checkpoint import Priorities, ReplayRing, RingOptions, Trim
from perdure.core.errors import ConfigError
from perdure.storage import MemoryStorage


def restored(run: ReplayRun, replay: ReplayRing, **more: Any) -> ReplayRing:
    """What another process finds after this run has saved."""
    run.save_well(run.counters["global_step"] + 1)
    again = ReplayRun(run.storage, replay, incarnation=run.incarnation + 1)
    again.restore(**more)
    return replay


def test_a_wrapped_ring_is_full_after_loading_and_goes_on_at_its_slot() -> None:
    """ElegantRL 299: capacity 8, 0 to 10 added; the next one goes to slot 3, 4 is oldest then."""
    run = ReplayRun(MemoryStorage(), small_ring(8))
    run.replay.append(rows(0, 11))
    ring = restored(run, small_ring(8))
    assert (ring.full, ring.total % 8, values_of(ring)) == (True, 3, list(range(3, 11)))
    ring.append(rows(11, 1))
    assert values_of(ring) == list(range(4, 12))


def test_capacity_counts_rows_not_batches() -> None:
    """Ray 24393: capacity 10, batches of 3, 3, 4, 6."""
    ring = small_ring(10)
    for count in (3, 3, 4, 6):
        ring.append(rows(ring.total, count))
    assert values_of(ring) == list(range(6, 16))


def test_an_episode_that_is_cut_goes_as_a_whole() -> None:
    """Stable-Baselines3 234: capacity 6, episodes of 4 rows."""
    columns: dict[str, Any] = {"episode": ("i4", ()), "value": ("i8", ())}
    ring = ReplayRing(6, columns, options=RingOptions(segment_bytes=24, episode="episode"))
    lengths: list[int] = []
    for number in range(12):
        ring.append({"episode": np.array([number // 4]), "value": np.array([number])})
        kept = [row for block in ring.blocks() for row in block["value"].tolist()]
        assert kept == list(range(ring.head, number + 1))
        assert ring.head % 4 == 0 or ring.head == number + 1
        lengths.append(len(ring))
    assert lengths == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4]


def test_episodes_are_known_after_loading() -> None:
    columns: dict[str, Any] = {"episode": ("i4", ())}

    def ring() -> ReplayRing:
        return ReplayRing(6, columns, options=RingOptions(episode="episode"))

    run = ReplayRun(MemoryStorage(), ring())
    run.replay.append({"episode": np.arange(6) // 4})
    loaded = restored(run, ring())
    assert len(loaded) == 6
    loaded.append({"episode": np.array([1])})
    assert (loaded.head, loaded.total) == (4, 7)
    loaded.append({"episode": np.full(6, 1)})
    assert len(loaded) == 0


def test_an_episode_longer_than_the_ring_is_never_there_in_part() -> None:
    ring = ReplayRing(4, {"episode": ("i4", ())}, options=RingOptions(episode="episode"))
    ring.append({"episode": np.array([7, 7, 7, 7, 7])})
    assert len(ring) == 0
    ring.append({"episode": np.array([7, 8, 8])})
    assert (ring.head, len(ring)) == (6, 2)


def test_segments_are_small_and_equal_after_loading() -> None:
    """Stable-Baselines3 238: 10 kB at 1 kB a segment."""
    columns: dict[str, Any] = {"bytes": ("u1", (100,))}

    def ring() -> ReplayRing:
        return ReplayRing(1000, columns, options=RingOptions(segment_bytes=1000))

    content = np.random.default_rng(0).integers(0, 256, (100, 100), np.uint8)
    run = ReplayRun(MemoryStorage(), ring())
    run.replay.append({"bytes": content})
    loaded = restored(run, ring())
    assert len(run.files()) == 10
    np.testing.assert_array_equal(np.concatenate([b["bytes"] for b in loaded.blocks()]), content)


def test_a_file_is_as_large_as_the_content_not_the_capacity() -> None:
    """Tianshou 260: 200 of 20,000 rows are there."""
    columns: dict[str, Any] = {"obs": ("u1", (1000,))}
    run = ReplayRun(MemoryStorage(), ReplayRing(20_000, columns))
    run.replay.append({"obs": np.zeros((200, 1000), np.uint8)})
    run.save_well(1)
    sizes = [run.storage.size(f"segments/replay/{name}") for name in run.files()]
    assert 200_000 <= sum(sizes) <= 1.05 * 200_000


def test_450_rows_are_450_rows_and_a_cold_start_waits() -> None:
    """Ray 8151 and the gates of K19: what counts is what is there, not what was ever seen."""
    run = ReplayRun(MemoryStorage(), small_ring(1000, 100))
    run.replay.append(rows(0, 450))
    loaded = restored(run, small_ring(1000, 100))
    assert len(loaded) == 450
    assert loaded.is_warm(60)
    cold = restored(run, small_ring(1000, 100), cold=["replay"])
    assert (len(cold), cold.total) == (0, 450)
    assert not cold.is_warm(60)
    cold.append(rows(450, 60))
    assert cold.is_warm(60)
    assert values_of(cold) == list(range(450, 510))


def test_only_valid_rows_warm_up() -> None:
    ring = small_ring(100)
    ring.append(rows(0, 30))
    assert ring.count("done") == 10
    assert ring.is_warm(10, valid="done")
    assert not ring.is_warm(11, valid="done")


def test_priorities_add_up_after_loading() -> None:
    """TorchRL 3055: priorities 1, 2, 4; sum 7, highest 4."""

    def run_of(storage: MemoryStorage, incarnation: int) -> tuple[ReplayRun, Priorities]:
        run = ReplayRun(storage, small_ring(6), incarnation=incarnation)
        priorities = Priorities(run.replay)
        run.registry.register("priorities", priorities, kind="tensors")
        return run, priorities

    run, priorities = run_of(MemoryStorage(), 1)
    run.replay.append(rows(0, 3))
    priorities.update(np.arange(3), np.array([1.0, 2.0, 4.0]))
    run.save_well(1)
    again, loaded = run_of(run.storage, 2)
    again.restore()
    assert (loaded.total, loaded.highest) == (7, 4)
    again.replay.append(rows(3, 4))
    assert loaded.total == 2 + 4 + 4 * 4
    assert loaded.of(np.arange(1, 7)).tolist() == [2, 4, 4, 4, 4, 4]
    again.replay.append(rows(7, 12))
    assert loaded.total == 6 * 4


def test_draws_follow_the_priorities() -> None:
    ring = small_ring(5)
    ring.append(rows(0, 9))
    priorities = Priorities(ring)
    priorities.update(np.arange(9), np.array([9, 9, 9, 9, 0, 1, 0, 3, 4], float))
    drawn = priorities.draw(np.random.default_rng(1), 8000)
    share = np.bincount(drawn, minlength=9) / 8000
    np.testing.assert_allclose(share, np.array([0, 0, 0, 0, 0, 1, 0, 3, 4]) / 8, atol=0.02)
    assert not len(priorities.draw(np.random.default_rng(1), 0))
    with pytest.raises(ConfigError, match="negative"):
        priorities.update(np.array([8]), np.array([-1.0]))
    priorities.update(np.arange(9), np.zeros(9))
    with pytest.raises(ConfigError, match="above 0"):
        priorities.draw(np.random.default_rng(1), 1)


def test_empty_stays_empty() -> None:
    """TorchRL 2264."""
    run = ReplayRun(MemoryStorage(), small_ring())
    loaded = restored(run, small_ring())
    assert (len(loaded), loaded.total, run.files()) == (0, 0, [])
    with pytest.raises(ConfigError, match="no rows"):
        loaded.sample(np.random.default_rng(0), 1)


def test_loading_never_doubles() -> None:
    """DreamerV3 103: 100 rows, saved and restored three times."""
    run = ReplayRun(MemoryStorage(), small_ring(1000, 10))
    run.replay.append(rows(0, 100))
    for incarnation in (2, 3, 4):
        loaded = restored(run, small_ring(1000, 10))
        run = ReplayRun(run.storage, loaded, incarnation=incarnation)
        run.restore()
        run.restore()
        assert values_of(run.replay) == list(range(100))
    assert len(run.files()) == 10


def test_the_rows_replace_those_that_were_there() -> None:
    run = ReplayRun(MemoryStorage(), small_ring())
    run.replay.append(rows(0, 5))
    run.save_well(1)
    run.replay.append(rows(5, 30))
    run.restore()
    assert values_of(run.replay) == [0, 1, 2, 3, 4]
    run.replay.append(rows(5, 2))
    assert values_of(run.replay) == list(range(7))


def test_the_same_draws_whatever_the_segments() -> None:
    """Rows are numbered, so a draw does not depend on where checkpoints have cut."""
    whole, cut = small_ring(50, 100), ReplayRun(MemoryStorage(), small_ring(50, 7))
    for step in range(9):
        whole.append(rows(step * 8, 8))
        cut.replay.append(rows(step * 8, 8))
        cut.save_well(step + 1)
    again = ReplayRun(cut.storage, small_ring(50, 7), incarnation=2)
    again.restore()
    one, two, three = (
        ring.sample(np.random.default_rng(5), 64) for ring in (whole, cut.replay, again.replay)
    )
    for name in COLUMNS:
        np.testing.assert_array_equal(one[name], two[name])
        np.testing.assert_array_equal(one[name], three[name])
    assert one["value"].min() >= 22


@pytest.mark.parametrize("number", [-1, 0, 3, 9, 12])
def test_rows_that_are_not_there_are_refused(number: int) -> None:
    replay = small_ring(8)
    replay.append(rows(0, 12))
    if 4 <= number < 12:
        assert replay.rows(np.array([number]))["value"][0] == number
    else:
        with pytest.raises(ConfigError, match="rows 4 to 11 are there"):
            replay.rows(np.array([number, 5]))


def test_samples_are_copies() -> None:
    ring = small_ring()
    ring.append(rows(0, 5))
    sample = ring.rows(np.array([4, 0]))
    assert sample["value"].tolist() == [4, 0]
    sample["value"][:] = 99
    assert values_of(ring) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        next(ring.blocks())["value"][:] = 1


def test_trimming_by_count_and_by_age() -> None:
    ring = small_ring(100)
    ring.append(rows(0, 50))
    ring.trim(Trim(rows=30))
    assert values_of(ring) == list(range(20, 50))
    ring.trim(Trim(column="value", span=9))
    assert values_of(ring) == list(range(40, 50))
    ring.trim(Trim(rows=0))
    assert len(ring) == 0
    ring.trim(Trim(column="value", span=9))
    ring.append(rows(50, 3))
    assert values_of(ring) == [50, 51, 52]


def test_trimming_at_save_and_at_restore() -> None:
    run = ReplayRun(MemoryStorage(), small_ring(100, save=Trim(rows=10)))
    run.replay.append(rows(0, 50))
    loaded = restored(run, small_ring(100))
    assert len(run.replay) == 50
    assert values_of(loaded) == list(range(40, 50))
    assert len(run.files()) == 3
    again = restored(run, small_ring(100, restore=Trim(column="value", span=3)))
    assert values_of(again) == [46, 47, 48, 49]
    assert values_of(restored(run, small_ring(5))) == [45, 46, 47, 48, 49]


def test_frequent_saves_leave_few_files() -> None:
    run = ReplayRun(MemoryStorage(), small_ring(1000, 200), keep=1)
    for step in range(140):
        run.replay.append(rows(step, 1))
        if step >= 8:
            run.save_well(step + 1)
    joined, loose = divmod(140 - 8, 64)
    assert len(run.files()) == joined + loose
    run.replay.append(rows(140, 61))
    run.save_well(141)
    assert len(run.files()) == joined + loose + 2
    again = ReplayRun(run.storage, small_ring(1000, 200), incarnation=2)
    again.restore()
    assert values_of(again.replay) == list(range(201))


BAD_BATCHES: dict[str, dict[str, Any]] = {
    "no column": {"extra": np.zeros(2)},
    "is missing": {"obs": None},
    "shape": {"obs": np.zeros((2, 4), np.uint8)},
    "type": {"value": np.zeros(2)},
    "numbers of rows": {"done": np.zeros(3, bool)},
}


@pytest.mark.parametrize("reason", sorted(BAD_BATCHES))
def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing(reason: str) -> None:
    ring = small_ring()
    ring.append(rows(0, 2))
    batch = {**rows(2, 2), **BAD_BATCHES[reason]}
    with pytest.raises(ConfigError, match=reason):
        ring.append({name: data for name, data in batch.items() if data is not None})
    assert values_of(ring) == [0, 1]


def test_what_cannot_be_a_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ReplayRing(0, COLUMNS)
    with pytest.raises(ConfigError, match="at least one"):
        ReplayRing(1, {})
    with pytest.raises(ConfigError, match="cannot be stored"):
        ReplayRing(1, {"a": ("O", ())})
    with pytest.raises(ConfigError, match="did you mean 'value'"):
        small_ring(episode="valu")
    with pytest.raises(ConfigError, match="one number a row"):
        small_ring(save=Trim(column="obs", span=1))
    with pytest.raises(ConfigError, match="both or neither"):
        Trim(column="value")
    with pytest.raises(ConfigError, match="at least 0"):
        Trim(rows=-1)


def test_other_columns_are_refused_when_restoring() -> None:
    run = ReplayRun(MemoryStorage(), small_ring())
    run.replay.append(rows(0, 2))
    with pytest.raises(ConfigError, match="columns are"):
        restored(run, ReplayRing(12, {"value": ("i8", ())}))
