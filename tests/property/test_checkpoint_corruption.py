"""Damage: every flipped, cut, missing, swapped or stale file is noticed; the older one serves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.checkpoint import (
    ArraysComponent,
    Checkpointer,
    MemoryLedger,
    Registry,
    StagedInfo,
    ValuesComponent,
    choose,
    verify,
)
from perdure.checkpoint.manifest import digest_of
from perdure.core import sealed_json
from perdure.core.clock import ManualClock
from perdure.core.errors import DamagedError, FutureFormatError, NothingToResumeError
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.core.records import Checkpointed
from perdure.storage import FaultyStorage, MemoryStorage, StorageFault, StorageFaultKind

ONE = IncarnationNumber(1)
OLD, NEW = "step-00000001-1", "step-00000002-1"
ROOT = f"checkpoints/{NEW}"


class Saved:
    """Two committed checkpoints of arrays that hold their step."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.weights = {"w": np.zeros(64, np.float32)}
        self.ledger = MemoryLedger()
        registry = Registry()
        registry.register("policy", ArraysComponent(self.weights), kind="model")
        counters = {"n": 0}
        registry.register("counters", ValuesComponent(counters), kind="counters")
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.engine = Checkpointer(
            self.storage,
            registry=registry,
            ledger=self.ledger,
            clock=ManualClock(),
            faults=NoFaults(),
            events=lambda name, fields: self.events.append((name, fields)),
        )
        for step in (1, 2):
            self.weights["w"][:] = counters["n"] = step
            info = StagedInfo(
                LogPosition(ONE, 0, step), {"global_step": step}, {"run_id": "r"}, "grpo", "c", "d"
            )
            assert self.engine.stage(CheckpointName("train", step, ONE), info=info, must=True)
        self.engine.close()
        self.digest = self.ledger.committed()[-1].manifest_digest
        self.files = {
            path: data for path, data in self.storage.files().items() if path.startswith(ROOT)
        }

    def expect_fallback(self, reason: str) -> None:
        self.events.clear()
        before = {p: d for p, d in self.storage.files().items() if p.startswith(ROOT + "/")}
        choice = self.engine.choose(self.ledger.committed())
        assert choice.directory == OLD
        assert [directory for directory, _ in choice.skipped] == [NEW]
        assert reason in choice.skipped[0][1]
        assert all(name == "checkpoint_damaged" for name, _ in self.events)
        assert self.events
        self.engine.restore(choice)
        assert np.all(self.weights["w"] == 1)
        after = self.storage.files()
        assert not self.storage.exists(ROOT)
        for path, data in before.items():
            assert after[path.replace("checkpoints/", "quarantine/")] == data
        note = sealed_json.decode(
            self.storage.read(f"quarantine/{NEW}.reason.json"), where="note", newest_format=1
        )
        assert note["directory"] == NEW
        assert note["problems"]


@pytest.fixture(scope="module")
def saved() -> Saved:
    """Read only: tests put back what they change."""
    return Saved()


def test_every_flipped_byte_is_noticed(saved: Saved) -> None:
    for path, data in saved.files.items():
        for place in range(len(data)):
            flipped = bytearray(data)
            flipped[place] ^= 1 << (place % 8)
            saved.storage.damage(path, bytes(flipped))
            report = verify(saved.storage, NEW, manifest_digest=saved.digest)
            assert not report.ok, (path, place)
        saved.storage.damage(path, data)
    assert verify(saved.storage, NEW, manifest_digest=saved.digest).ok


def test_every_truncation_and_extension_is_noticed(saved: Saved) -> None:
    for path, data in saved.files.items():
        lengths = range(0, len(data), max(1, len(data) // 50))
        for changed in itertools.chain((data[:length] for length in lengths), [data + b"\0"]):
            saved.storage.damage(path, changed)
            report = verify(saved.storage, NEW, manifest_digest=saved.digest)
            assert [problem.file for problem in report.problems] == [path[len(ROOT) + 1 :]]
        saved.storage.damage(path, data)


def test_a_manifest_alone_seals_itself(saved: Saved) -> None:
    """Without the ledger's digest too: a flipped byte may only ever touch white space."""
    path = f"{ROOT}/manifest.json"
    data = saved.files[path]
    manifest = verify(saved.storage, NEW).manifest
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 4
        saved.storage.damage(path, bytes(flipped))
        report = verify(saved.storage, NEW)
        assert not report.ok or report.manifest == manifest
    saved.storage.damage(path, data)


FILES = ["manifest.json", "state.msgpack", "experience.msgpack", "model/policy.safetensors"]


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_falls_back(file: str) -> None:
    saved = Saved()
    saved.storage.remove(f"{ROOT}/{file}")
    saved.expect_fallback(f"{file}: missing")


@pytest.mark.parametrize("file", FILES)
def test_a_stale_copy_falls_back(file: str) -> None:
    saved = Saved()
    stale = saved.storage.read(f"checkpoints/{OLD}/{file}")
    assert stale != saved.files[f"{ROOT}/{file}"]
    saved.storage.damage(f"{ROOT}/{file}", stale)
    saved.expect_fallback("digest" if file == "manifest.json" else "checksum does not match")


def test_swapped_files_fall_back() -> None:
    saved = Saved()
    for file, other in itertools.permutations(["state.msgpack", "experience.msgpack"]):
        saved.storage.damage(f"{ROOT}/{file}", saved.files[f"{ROOT}/{other}"])
    saved.expect_fallback("state.msgpack")


def test_a_whole_directory_swapped_for_an_older_one_falls_back() -> None:
    saved = Saved()
    for path in saved.files:
        saved.storage.damage(path, saved.storage.read(path.replace(NEW, OLD)))
    saved.expect_fallback("digest differs from the committed one")


def test_a_missing_directory_falls_back_and_leaves_a_reason() -> None:
    saved = Saved()
    saved.storage.remove(ROOT)
    saved.expect_fallback("manifest.json: missing")
    assert saved.storage.list("quarantine") == [f"{NEW}.reason.json"]


@pytest.mark.parametrize("lost", [True, False])
def test_a_checkpoint_that_is_still_the_newest_is_reported_once(lost: bool) -> None:
    """Every resume passes over it until another one is committed."""
    saved = Saved()
    if lost:
        saved.storage.remove(ROOT)
    else:
        saved.storage.damage(f"{ROOT}/state.msgpack", b"bad")
    saved.expect_fallback("missing" if lost else "state.msgpack")
    first = {p: d for p, d in saved.storage.files().items() if p.startswith("quarantine/")}
    for _ in range(3):
        assert saved.engine.choose(saved.ledger.committed()).skipped
    again = {p: d for p, d in saved.storage.files().items() if p.startswith("quarantine/")}
    assert again == first


@given(
    data=st.data(),
    file=st.sampled_from(FILES),
)
@settings(max_examples=25, deadline=None)
def test_any_other_bytes_fall_back(data: st.DataObject, file: str) -> None:
    saved = Saved()
    path = f"{ROOT}/{file}"
    original = saved.files[path]
    start = data.draw(st.integers(0, len(original) - 1))
    piece = data.draw(st.binary(min_size=0, max_size=40))
    end = data.draw(st.integers(start, len(original)))
    changed = original[:start] + piece + original[end:]
    if changed != original:
        saved.storage.damage(path, changed)
        saved.expect_fallback(file)


def test_when_nothing_is_whole_it_stops_and_moves_nothing() -> None:
    saved = Saved()
    saved.storage.remove(f"{ROOT}/state.msgpack")
    saved.storage.damage(f"checkpoints/{OLD}/manifest.json", b"{}")
    before = saved.storage.files()
    for _ in range(2):
        with pytest.raises(DamagedError, match="none of 2 committed checkpoints") as caught:
            saved.engine.choose(saved.ledger.committed())
        assert OLD in str(caught.value)
        assert NEW in str(caught.value)
    assert saved.storage.files() == before


def test_nothing_committed_is_not_damage() -> None:
    with pytest.raises(NothingToResumeError):
        choose(MemoryStorage(), [], events=ignore_events)


def test_what_cannot_be_read_now_is_passed_over_but_not_moved() -> None:
    saved = Saved()
    plan = [StorageFault(StorageFaultKind.EIO_READ, hit, f"{NEW}/state") for hit in (1, 2)]
    faulty = FaultyStorage(saved.storage, plan=plan)
    choice = choose(faulty, saved.ledger.committed(), events=ignore_events)
    assert sum(faulty.fired.values()) == 1
    assert choice.directory == OLD
    assert saved.storage.exists(ROOT)
    assert choose(saved.storage, saved.ledger.committed(), events=ignore_events).directory == NEW


def test_a_second_quarantine_of_the_same_name_keeps_the_first() -> None:
    saved = Saved()
    saved.storage.damage(f"{ROOT}/state.msgpack", b"first")
    saved.expect_fallback("state.msgpack")
    for path, data in saved.files.items():
        saved.storage.make_dirs(path.rpartition("/")[0])
        saved.storage.write_atomic(path, data)
    saved.storage.damage(f"{ROOT}/state.msgpack", b"second")
    assert saved.engine.choose(saved.ledger.committed()).directory == OLD
    assert saved.storage.read(f"quarantine/{NEW}/state.msgpack") == b"first"
    assert saved.storage.read(f"quarantine/{NEW}.2/state.msgpack") == b"second"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2 is newer than 1"),
        ({"features": ["sharded"]}, "features this version does not know: sharded"),
    ],
)
def test_an_intact_newer_format_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    saved = Saved()
    path = f"{ROOT}/manifest.json"
    value = sealed_json.decode(saved.files[path], where=path, newest_format=1)
    data = sealed_json.encode({**value, **change})
    saved.storage.damage(path, data)
    newest = saved.ledger.committed()[-1]
    digest = digest_of(data)
    record = Checkpointed(newest.directory, newest.phase, newest.step, digest, newest.position)
    with pytest.raises(FutureFormatError, match=message):
        choose(saved.storage, [saved.ledger.committed()[0], record], events=ignore_events)
    assert saved.storage.exists(path)


def test_a_sealed_manifest_without_its_fields_is_damage() -> None:
    saved = Saved()
    value = sealed_json.decode(saved.files[f"{ROOT}/manifest.json"], where="", newest_format=1)
    for field in ("name", "files", "components", "position", "clocks"):
        lacking = {key: item for key, item in value.items() if key != field}
        saved.storage.damage(f"{ROOT}/manifest.json", sealed_json.encode(lacking))
        assert "lacks a readable field" in verify(saved.storage, NEW).reason


def test_damage_between_choosing_and_restoring_is_noticed() -> None:
    saved = Saved()
    choice = saved.engine.choose(saved.ledger.committed())
    for file in FILES[1:2] + FILES[3:]:
        data = bytearray(saved.files[f"{ROOT}/{file}"])
        data[-1] ^= 1
        saved.storage.damage(f"{ROOT}/{file}", bytes(data))
        with pytest.raises(DamagedError, match=file):
            saved.engine.restore(choice)
        saved.storage.damage(f"{ROOT}/{file}", saved.files[f"{ROOT}/{file}"])
    saved.engine.restore(choice)


def test_a_renamed_checkpoint_is_not_another_one() -> None:
    saved = Saved()
    saved.storage.rename(f"checkpoints/{OLD}", "checkpoints/step-00000003-1")
    assert verify(saved.storage, "step-00000003-1").reason == f"manifest.json: belongs to {OLD}"
