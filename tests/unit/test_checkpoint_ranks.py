"""Ranks that save together: one commit, any number of ranks loads, nobody waits forever."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_cases import (
    SHAPES,
    TIMEOUT_S,
    Messages,
    RankScript,
    SpreadArrays,
    newest,
    newest_manifest,
    on_all_ranks,
    run_ranks,
    wholes,
)
from standalone_loops import Crash, Events

from perdure import CheckpointEngine, every
from perdure.checkpoint import ReplayRing, compare, verify
from perdure.checkpoint.sharded import ShardedTensor
from perdure.checkpoint.shares import RankPlace
from perdure.core.errors import ConfigError, DamagedError, StoppedError, TrainingError
from perdure.experience import read_experience
from perdure.storage import MemoryStorage, PosixStorage


def committed(storage: MemoryStorage) -> list[int]:
    return [record.step for record in read_experience(storage)[0].checkpoints]


def messages_of(script: RankScript) -> Messages:
    channel = script.engine._world.team.channel
    assert isinstance(channel, Messages)
    return channel


def all_right(ended: list[Any], steps: int) -> None:
    for script in ended:
        assert isinstance(script, RankScript), repr(script)
        assert script.model.holds(wholes(steps))
        assert script.counters == {"steps": steps}


def test_any_number_of_ranks_goes_on_from_what_any_other_has_saved() -> None:
    storage = MemoryStorage()
    steps = 0
    for size in (1, 2, 4, 3, 1):
        steps += 4
        ended = run_ranks(storage, size, total=steps)
        all_right(ended, steps)
        manifest = newest_manifest(storage)
        assert manifest.ranks == size
        files = [path for path in manifest.files if path.startswith("tensors/model")]
        # Three arrays of 7, 5 and 1 rows: the last rank of four holds nothing of two of them.
        assert len(files) == size
        tensors = newest(storage).tensors("model")
        assert {name: array.tolist() for name, array in tensors.items()} == {
            name: array.tolist() for name, array in wholes(steps).items()
        }


def test_a_checkpoint_says_the_same_whatever_ranks_have_stored_it() -> None:
    alone, four = MemoryStorage(), MemoryStorage()
    run_ranks(alone, 1, random=False)
    run_ranks(four, 4, random=False)
    one, other = newest(alone), newest(four)
    assert one.digest("model") == other.digest("model")
    found = compare(one, other)
    assert found.equal
    assert len(found.parts) > len(SHAPES)
    whole = b"".join(one.tensor_file("model"))
    assert whole == b"".join(other.tensor_file("model"))
    assert run_ranks(four, 2, total=8, random=False)[0].engine.step == 8
    assert not compare(one, newest(four)).equal


def test_generators_are_each_ranks_own_and_a_change_of_their_number_is_said() -> None:
    storage, reference = MemoryStorage(), MemoryStorage()
    expected = [script.drawn for script in run_ranks(reference, 2, total=8)]
    first = run_ranks(storage, 2, total=4)
    second = run_ranks(storage, 2, total=8)
    assert [a.drawn + b.drawn for a, b in zip(first, second, strict=True)] == expected
    assert not [text for text in second[0].events.warnings() if "generator" in text]
    more = run_ranks(storage, 3, total=10)
    (said,) = [text for text in more[0].events.warnings() if "generator" in text]
    assert "saved by 2 ranks and loaded by 3 ranks" in said
    assert "rank 2 kept what the script gave" in said
    assert more[2].drawn == np.random.default_rng(102).random(2).tolist()
    fewer = run_ranks(storage, 1, total=12)
    (said,) = [text for text in fewer[0].events.warnings() if "generator" in text]
    assert "what ranks 1 to 2 stored has no place" in said


def test_a_missing_shard_sends_all_ranks_back_to_the_checkpoint_before() -> None:
    storage = MemoryStorage()
    run_ranks(storage, 4, total=6)
    assert committed(storage)[-2:] == [4, 6]
    directory = newest_manifest(storage).name.directory
    storage.remove(f"checkpoints/{directory}/tensors/model.2-of-4.safetensors")
    ended = run_ranks(storage, 2, total=6)
    all_right(ended, 6)
    for script in ended:
        assert script.engine.restored_from.step == 4
        assert script.engine.restored_from.skipped == (
            (directory, "tensors/model.2-of-4.safetensors: missing"),
        )
    assert storage.exists(f"quarantine/{directory}.reason.json")


def test_a_manifest_whose_parts_are_not_the_whole_is_damaged() -> None:
    storage = MemoryStorage()
    run_ranks(storage, 4, total=6)
    manifest = newest_manifest(storage)
    model = manifest.components["model"]
    for parts, reason in (
        (model.shards["w"].parts[1:], "6 of 21 elements are missing"),
        (model.shards["w"].parts * 2, "overlap"),
    ):
        shards = {**model.shards, "w": ShardedTensor(model.shards["w"].spec, parts)}
        components = {**manifest.components, "model": replace(model, shards=shards)}
        path = f"checkpoints/{manifest.name.directory}/manifest.json"
        storage.write_atomic(path, replace(manifest, components=components).encode())
        report = verify(storage, manifest.name.directory)
        assert "tensor w of model" in report.reason
        assert reason in report.reason


def test_a_rank_that_goes_silent_costs_one_checkpoint_and_nobody_hangs() -> None:
    storage = MemoryStorage()
    errors: dict[int, list[Exception | None]] = {}

    def lose_a_share(script: RankScript, step: int) -> None:
        errors.setdefault(script.place.rank, []).append(script.engine.last_error)
        if script.place.rank == 0:
            # The message of rank 2 on the first save, which is due after step 2, is lost.
            messages_of(script).lose = lambda key: key == "save/1/share/2"

    started_s = time.monotonic()
    ended = run_ranks(storage, 3, total=6, each=lose_a_share, timeout_s=0.5)
    assert time.monotonic() - started_s < 15
    all_right(ended, 6)
    assert committed(storage) == [4, 6]
    for rank in range(3):
        # In step 4 the save after step 2 has failed, in step 6 the next one has not.
        assert isinstance(errors[rank][3], TrainingError)
        assert "rank 2 was waited for 0.5 s in vain" in str(errors[rank][3])
        assert errors[rank][5] is None
    assert storage.list("checkpoints") == ["latest.json", "step-00000004-1", "step-00000006-1"]


def test_ranks_that_wait_for_one_that_has_died_end_with_a_sentence() -> None:
    storage = MemoryStorage()

    def die(script: RankScript, step: int) -> None:
        if step == 4 and script.place.rank == 0:
            messages_of(script).lose = lambda key: True
            raise Crash

    ended = run_ranks(storage, 2, total=6, each=die, timeout_s=0.5)
    assert isinstance(ended[0], Crash)
    assert isinstance(ended[1], TrainingError)
    assert "rank 0 was waited for" in str(ended[1])
    assert committed(storage) == [2]
    all_right(run_ranks(storage, 4, total=6), 6)


def test_ranks_learn_at_once_that_the_first_one_has_left_the_loop() -> None:
    def leave(script: RankScript, step: int) -> None:
        if step == 3 and script.place.rank == 0:
            raise Crash

    started_s = time.monotonic()
    ended = run_ranks(MemoryStorage(), 3, each=leave, timeout_s=60.0)
    assert time.monotonic() - started_s < 30
    assert isinstance(ended[0], Crash)
    assert all(isinstance(error, StoppedError) for error in ended[1:])


def test_what_should_be_the_same_and_is_not_is_refused_on_all_ranks_before_the_first_step() -> None:
    storage = MemoryStorage()

    def start(team: Any) -> None:
        script = RankScript(storage, team)
        script.counters["seen"] = team.place.rank
        script.run(4)

    ended = on_all_ranks(3, start)
    for error in ended:
        assert isinstance(error, ConfigError), repr(error)
        assert "component counters: is not the same on ranks 0 and 1" in str(error)
        assert "per_rank=True" in str(error)
    assert storage.list("checkpoints") == []
    all_right(run_ranks(storage, 2, total=4), 4)


def test_what_comes_to_differ_later_is_not_saved() -> None:
    storage = MemoryStorage()

    def differ(script: RankScript, step: int) -> None:
        script.counters["steps"] += script.place.rank if step == 2 else 0

    ended = run_ranks(storage, 2, total=4, each=differ)
    all_right(ended, 4)
    assert committed(storage) == [4]
    for script in ended:
        (failed,) = [f for name, f in script.events.seen if name == "checkpoint_failed"]
        assert "counters" in failed["error"]


def own(storage: MemoryStorage, team: Any, **options: Any) -> dict[str, int]:
    """Four more steps with a counter that every rank has for itself."""
    events = Events()
    engine = CheckpointEngine(
        "run", storage=storage, process_group=team, save=every(steps=2), events=events, **options
    )
    counter = {"here": 10 * team.place.rank}
    engine.add("cursor", counter, per_rank=True)
    engine.start(8, change_total=True)
    for _ in range(2):
        counter["here"] += 1
        engine.complete_step()
    engine.save()
    engine.close()
    return counter


def test_what_every_rank_has_for_itself_is_loaded_by_it_and_not_dropped() -> None:
    storage = MemoryStorage()
    assert on_all_ranks(3, lambda team: own(storage, team)) == [
        {"here": 10 * rank + 2} for rank in range(3)
    ]
    assert on_all_ranks(3, lambda team: own(storage, team)) == [
        {"here": 10 * rank + 4} for rank in range(3)
    ]
    assert newest(storage).values()["cursor/rank-2"] == {"data": {"here": 24}}
    for size in (2, 4):
        for error in on_all_ranks(size, lambda team: own(storage, team)):
            assert isinstance(error, ConfigError)
            assert f"stored by 3 ranks, each its own, and {size} load" in str(error)
    accepted = on_all_ranks(4, lambda team: own(storage, team, accept_changes=["cursor"]))
    assert [counter["here"] for counter in accepted] == [6, 16, 26, 32]


def test_a_save_and_a_stop_may_be_asked_of_any_rank() -> None:
    storage = MemoryStorage()
    abreast = threading.Barrier(3)

    def ask(script: RankScript, step: int) -> None:
        abreast.wait(TIMEOUT_S)
        if step == 3 and script.place.rank == 1:
            script.engine.save()

    run_ranks(storage, 3, total=9, each=ask, save=every(steps=100))
    asked, last = committed(storage)
    # The first rank may have decided about step 3 before it was asked.
    assert asked in (3, 4)
    assert last == 9

    def stop(script: RankScript, step: int) -> None:
        abreast.wait(TIMEOUT_S)
        if step == 11 and script.place.rank == 2:
            script.engine._requests.signals.stop_requested_s = time.monotonic()

    ended = run_ranks(storage, 3, total=14, each=stop, save=every(steps=100))
    assert all(isinstance(end, SystemExit) and end.code == 143 for end in ended), ended
    assert committed(storage)[-1] in (11, 12)


def test_ranks_that_mean_different_tensors_by_one_name_save_nothing() -> None:
    storage = MemoryStorage()

    def start(team: Any) -> None:
        script = RankScript(storage, team, random=False)
        shapes = {"w": (7 + team.place.rank, 3)}
        script.engine.register(other=SpreadArrays(shapes, team.place))
        script.run(2)

    for error in on_all_ranks(2, start):
        assert isinstance(error, ConfigError)
        assert "component other: is not the same on ranks 0 and 1" in str(error)


def test_ranks_that_see_different_directories_are_refused() -> None:
    storages = [MemoryStorage(), MemoryStorage()]
    for error in on_all_ranks(2, lambda team: RankScript(storages[team.place.rank], team).run(2)):
        assert isinstance(error, ConfigError)
        assert "another directory here than on rank 0" in str(error)


def test_segments_are_refused_by_name() -> None:
    storage = MemoryStorage()

    def start(team: Any) -> None:
        script = RankScript(storage, team)
        script.engine.register(replay=ReplayRing(10, {"x": ("f4", ())}))
        script.run(2)

    for error in on_all_ranks(2, start):
        assert isinstance(error, ConfigError)
        assert "component replay: is stored as segments, and 2 ranks save together" in str(error)


def test_a_part_of_a_tensor_is_not_saved_by_a_process_alone() -> None:
    engine = CheckpointEngine("run", storage=MemoryStorage(), save=every(steps=2))
    engine.register(model=SpreadArrays(SHAPES, RankPlace(0, 2)))
    with pytest.raises(ConfigError, match="process_group"):
        engine.start(2)


def test_parts_along_two_axes_that_some_ranks_repeat() -> None:
    storage = MemoryStorage()
    shapes = {"m": (5, 7), "v": (4, 4)}
    whole = {"m": np.arange(35, dtype=np.float32).reshape(5, 7), "v": np.eye(4, dtype=np.float32)}

    def run(team: Any, mesh: tuple[int, ...], cuts: tuple[int | None, ...], *, fill: bool) -> Any:
        engine = CheckpointEngine("run", storage=storage, process_group=team, save=every(steps=1))
        model = SpreadArrays(shapes, team.place, mesh=mesh, cuts=cuts)
        if fill:
            model.fill(whole)
        engine.register(model=model)
        engine.start(9, change_total=True)
        engine.complete_step()
        engine.close()
        return model

    on_all_ranks(6, lambda team: run(team, (3, 2), (None, 1), fill=True))
    shards = newest_manifest(storage).components["model"].shards
    assert [part.rank for part in shards["m"].parts] == [0, 1]
    for size, mesh, cuts in ((4, (2, 2), (0, 1)), (6, (2, 3), (1, None)), (3, (3,), (1,))):
        models = on_all_ranks(size, lambda team: run(team, mesh, cuts, fill=False))  # noqa: B023
        assert all(isinstance(model, SpreadArrays) and model.holds(whole) for model in models), (
            models
        )


def test_a_flipped_bit_of_a_part_is_found_by_whoever_reads_it() -> None:
    storage = MemoryStorage()
    run_ranks(storage, 2, total=2)
    reader = newest(storage)
    path = f"checkpoints/{reader.manifest.name.directory}/tensors/model.1-of-2.safetensors"
    data = bytearray(storage.read(path))
    data[-1] ^= 1
    storage.write_atomic(path, bytes(data))
    with pytest.raises(DamagedError, match="1-of-2"):
        reader.tensors("model")


def test_one_rank_writes_the_manifest_of_before() -> None:
    storage = MemoryStorage()
    run_ranks(storage, 1, total=2)
    manifest = json.loads(newest_manifest(storage).encode())
    assert manifest["features"] == []
    assert "ranks" not in manifest
    assert manifest["components"]["model"] == {
        "kind": "values",
        "schema_version": 1,
        "tensor_file": "tensors/model.safetensors",
    }


def test_what_is_no_process_group_and_what_is_no_option_is_refused() -> None:
    engine = CheckpointEngine("run", storage=MemoryStorage(), process_group="world")
    with pytest.raises(ConfigError, match=r"dist\.group\.WORLD"):
        engine.start(2)
    with pytest.raises(ConfigError, match="did you mean 'per_rank'"):
        engine.add("cursor", {"here": 1}, per_ranks=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match="rank_timeout_s"):
        CheckpointEngine("run", storage=MemoryStorage(), rank_timeout_s=-1)


GOLDEN = Path(__file__).parents[1] / "golden" / "ranks-v1"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_three_ranks_stored_in_format_1_stays_readable(size: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    reader = newest(PosixStorage(run))
    assert reader.manifest.ranks == 3
    assert reader.digest("model") == "47d1e1da14639e4af227dae826eb91fc"
    assert sorted(reader.manifest.components) == [
        *("counters", "generator", "generator/rank-1", "generator/rank-2", "model", "progress")
    ]
    ended = run_ranks(PosixStorage(run), size, total=4)
    all_right(ended, 4)
    assert all(script.engine.restored_from.step == 2 for script in ended)
