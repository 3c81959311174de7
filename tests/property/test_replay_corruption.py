"""Damaged segments: every flipped, cut, missing or swapped file is noticed before a row is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import COLUMNS, ReplayRun, rows, small_ring, values_of

from perdure.checkpoint import ReplayRing, RingOptions, verify
from perdure.core import sealed_json
from perdure.core.errors import DamagedError
from perdure.storage import FaultyStorage, MemoryStorage, StorageFault, StorageFaultKind

OLD, NEW = "step-00000001-1", "step-00000002-1"


def saved() -> ReplayRun:
    """Two checkpoints: rows 0 to 8, then 4 to 12 of which the second half is new."""
    run = ReplayRun(MemoryStorage(), small_ring(8))
    for step in (1, 2):
        run.replay.append(rows(run.replay.total, 8 if step == 1 else 4))
        run.save_well(step)
    return run


def next_process(run: ReplayRun, storage: Any = None) -> ReplayRun:
    return ReplayRun(storage or run.storage, small_ring(8), incarnation=2)


@pytest.fixture(scope="module")
def run() -> ReplayRun:
    """Read only: tests put back what they change."""
    return saved()


def newest_file(run: ReplayRun) -> str:
    return f"segments/replay/{run.files()[-1]}"


def test_every_flipped_byte_is_noticed_by_verify(run: ReplayRun) -> None:
    for name in run.files():
        path = f"segments/replay/{name}"
        data = run.storage.read(path)
        for place in range(0, len(data), 1 if name == run.files()[-1] else 97):
            run.storage.damage(
                path, data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
            )
            directory = NEW if int(name.split("-")[0]) >= 4 else OLD
            assert not verify(run.storage, directory).ok
        run.storage.damage(path, data)
    assert verify(run.storage, NEW).ok


@settings(max_examples=300)
@given(st.data())
def test_no_damaged_row_is_ever_given_out(data: st.DataObject) -> None:
    """Whatever byte of the newest segment is wrong, what comes out is right or refused."""
    run = saved()
    path = newest_file(run)
    content = bytearray(run.storage.read(path))
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "zero"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[place:]
    elif kind == "grow":
        content += b"\0" * (place + 1)
    else:
        content[place] = 0 if content[place] else 255
    run.storage.damage(path, bytes(content))
    after = next_process(run)
    step = after.restore()
    if step == 1:
        assert values_of(after.replay) == list(range(8))
        return
    try:
        assert values_of(after.replay) == list(range(4, 12))
    except DamagedError as error:
        assert error.where == path
        again = next_process(run)
        assert again.restore() == 1
        assert values_of(again.replay) == list(range(8))


def test_damage_met_while_sampling_leads_to_the_checkpoint_before() -> None:
    run = saved()
    path = newest_file(run)
    data = bytearray(run.storage.read(path))
    data[-1] ^= 1
    run.storage.damage(path, bytes(data))
    after = next_process(run)
    assert after.restore() == 2
    after.replay.rows(np.array([4, 7]))
    with pytest.raises(DamagedError, match="block 0 of column done") as caught:
        after.replay.rows(np.array([11]))
    assert caught.value.where == path
    assert ("segment_damaged", {"file": path, "reason": caught.value.what}) in after.events
    assert run.storage.read(f"quarantine/{path}") == bytes(data)
    note = sealed_json.decode(
        run.storage.read(f"quarantine/{path}.reason.json"), where="", newest_format=1
    )
    assert note["problems"] == {path: caught.value.what}
    again = next_process(run)
    assert again.restore() == 1
    assert again.storage.exists(f"quarantine/{NEW}/manifest.json")


def test_a_shared_segment_that_is_gone_takes_all_and_a_cold_start_helps() -> None:
    run = saved()
    shared = next(name for name in run.files() if name.startswith("000000000004"))
    run.storage.remove(f"segments/replay/{shared}")
    with pytest.raises(DamagedError, match=f"{shared}: missing"):
        next_process(run).restore()
    cold = next_process(run)
    assert cold.restore(cold=["replay"]) == 2
    assert (len(cold.replay), cold.replay.total) == (0, 12)


def test_swapped_segments_are_noticed_at_once() -> None:
    run = saved()
    one, two = (f"segments/replay/{name}" for name in run.files()[1:])
    contents = run.storage.read(one), run.storage.read(two)
    assert len(contents[0]) == len(contents[1])
    run.storage.damage(one, contents[1])
    run.storage.damage(two, contents[0])
    with pytest.raises(DamagedError, match="does not match"):
        next_process(run).restore()


def test_rows_are_checked_block_by_block_as_they_are_touched() -> None:
    """The damage is in the last block; what lies in others can be used."""
    columns: dict[str, Any] = {"wide": ("u1", (1 << 15,)), "big": ("u1", (200_000,))}
    ring = ReplayRing(16, columns, options=RingOptions(segment_bytes=1 << 30))
    run = ReplayRun(MemoryStorage(), ring)
    content = np.random.default_rng(0).integers(0, 256, (5, 200_000), np.uint8)
    ring.append({"wide": content[:, : 1 << 15], "big": content})
    run.save_well(1)
    path = newest_file(run)
    data = bytearray(run.storage.read(path))
    data[-1] ^= 1
    run.storage.damage(path, bytes(data))
    fresh = ReplayRing(16, columns, options=RingOptions(segment_bytes=1 << 30))
    after = ReplayRun(run.storage, fresh, incarnation=2)
    after.restore()
    np.testing.assert_array_equal(fresh.rows(np.array([3, 0]))["big"], content[[3, 0]])
    with pytest.raises(DamagedError, match="block 15 of column big"):
        fresh.rows(np.array([4]))


@pytest.mark.parametrize(
    ("kind", "found"),
    [(StorageFaultKind.FLIP_WRITE, "wrong"), (StorageFaultKind.NO_SPACE, "space")],
)
def test_a_segment_that_cannot_be_written_fails_the_save_and_the_next_one_works(
    kind: StorageFaultKind, found: str
) -> None:
    storage = FaultyStorage(
        MemoryStorage(), plan=[StorageFault(kind, hit=2, path_contains="segments/replay/")]
    )
    run = ReplayRun(storage, small_ring(8))
    run.replay.append(rows(0, 6))
    run.save(1)
    assert storage.fired[kind] == 1
    assert found in str(run.engine.last_error)
    assert run.ledger.committed() == []
    run.save_well(2)
    after = ReplayRun(storage, small_ring(8), incarnation=2)
    assert after.restore() == 2
    assert values_of(after.replay) == list(range(6))


def test_what_failed_saves_left_is_deleted_once_nothing_needs_it() -> None:
    storage = FaultyStorage(
        MemoryStorage(),
        plan=[StorageFault(StorageFaultKind.NO_SPACE, path_contains="manifest.json")],
    )
    run = ReplayRun(storage, small_ring(8))
    run.replay.append(rows(0, 4))
    run.save(1)
    assert run.engine.last_error is not None
    assert len(run.files()) == 1
    run.replay.append(rows(4, 12))
    run.save_well(2)
    run.save_well(3)
    assert [name.split("-")[0] for name in run.files()] == ["000000000008", "000000000012"]


def test_a_manifest_that_cannot_be_read_keeps_every_segment() -> None:
    inner = MemoryStorage()
    run = ReplayRun(inner, small_ring(8), keep=1)
    run.replay.append(rows(0, 8))
    run.save_well(1)
    inner.make_dirs("quarantine/step-00000000-1")
    inner.write_atomic("quarantine/step-00000000-1/manifest.json", b"whatever")
    before = run.files()
    faults = [
        StorageFault(StorageFaultKind.EIO_READ, hit=hit, path_contains="step-00000000-1")
        for hit in range(1, 9)
    ]
    faulty = FaultyStorage(inner, plan=faults)
    run = ReplayRun(faulty, small_ring(8), keep=1, incarnation=2)
    run.restore()
    run.replay.append(rows(8, 20))
    run.save_well(2)
    assert [record.directory for record in run.ledger.committed()] == ["step-00000002-2"]
    assert set(before) < set(run.files())
    assert faulty.fired[StorageFaultKind.EIO_READ]


def test_a_damaged_manifest_in_quarantine_still_keeps_what_it_names() -> None:
    run = saved()
    path = f"checkpoints/{NEW}/manifest.json"
    data = run.storage.read(path)
    run.storage.damage(path, data.replace(b'"dqn"', b'"dqm"'))
    after = next_process(run)
    assert after.restore() == 1
    after.engine.sweep(after.ledger.collected())
    for step in (3, 4, 5):
        after.replay.append(rows(after.replay.total, 8))
        after.save_well(step)
    kept = {name.split("-")[0] for name in after.files()}
    assert {"000000000004", "000000000008"} <= kept
    assert "000000000000" not in kept


def test_a_lost_committed_checkpoint_keeps_orphans() -> None:
    run = saved()
    run.storage.rename(f"checkpoints/{NEW}", "moved-by-hand")
    before = run.files()
    after = next_process(run)
    assert after.restore() == 1
    after.engine.sweep(after.ledger.collected())
    assert after.files() == before


def test_an_unreadable_segment_is_passed_over_and_left_in_place() -> None:
    run = saved()
    path = newest_file(run)
    faulty = FaultyStorage(
        run.storage, plan=[StorageFault(StorageFaultKind.EIO_READ, path_contains=path)]
    )
    after = next_process(run, faulty)
    assert after.restore() == 1
    assert run.storage.exists(path)
    assert run.storage.exists(f"checkpoints/{NEW}/manifest.json")


def test_reading_without_the_engine_moves_nothing(run: ReplayRun) -> None:
    from perdure.checkpoint import CheckpointReader

    path = newest_file(run)
    data = run.storage.read(path)
    run.storage.damage(path, data[:-1] + bytes([data[-1] ^ 1]))
    manifest = verify(run.storage, NEW).manifest
    assert manifest is not None
    segment = CheckpointReader(run.storage, manifest).segments("replay")[-1]
    assert dict(segment.columns) == {
        name: (np.dtype(dtype), shape) for name, (dtype, shape) in COLUMNS.items()
    }
    with pytest.raises(DamagedError):
        segment.view("done", 0, segment.rows)
    assert run.storage.exists(path)
    run.storage.damage(path, data)
