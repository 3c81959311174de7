"""The engine around one save: staging, skipping, failing, keeping, closing."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from perdure.checkpoint import (
    ArraysComponent,
    Checkpointer,
    CheckpointOptions,
    CheckpointReader,
    MemoryLedger,
    Registry,
    StagedInfo,
    ValuesComponent,
)
from perdure.core import sealed_json
from perdure.core.clock import ManualClock, SystemClock
from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError, DamagedError, FencedError, StorageError
from perdure.core.events import format_event
from perdure.core.faults import (
    FaultAction,
    FaultPlan,
    FaultPoint,
    FaultRule,
    InjectedFault,
    NoFaults,
)
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.core.records import Checkpointed, Collect
from perdure.core.storage_api import Storage
from perdure.storage import FaultyStorage, MemoryStorage, StorageFault, StorageFaultKind

ONE = IncarnationNumber(1)
WAIT_S = 20.0


class Gate:
    """A fault hook that holds the writing thread at one point until it is opened."""

    def __init__(self, point: FaultPoint) -> None:
        self.opened = threading.Event()
        self.arrived = threading.Event()
        self._point = point

    def reach(self, point: FaultPoint) -> None:
        if point is self._point:
            self.arrived.set()
            assert self.opened.wait(WAIT_S)


class SlowLedger(MemoryLedger):
    """Never acknowledges a commit, or refuses it."""

    def __init__(self, refusal: Exception | None = None) -> None:
        super().__init__()
        self._refusal = refusal

    def commit(self, record: Checkpointed) -> Future[Any]:
        future: Future[Any] = Future()
        if self._refusal is not None:
            future.set_exception(self._refusal)
        return future


class Rig:
    """An engine over a few arrays, with everything it said."""

    def __init__(
        self,
        storage: Storage,
        *,
        ledger: Any = None,
        faults: Any = None,
        options: CheckpointOptions | None = None,
    ) -> None:
        self.weights = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
        self.counters: dict[str, Any] = {"n": 0}
        self.registry = Registry(["policy"])
        self.registry.register("policy", ArraysComponent(self.weights), kind="model")
        self.registry.register("counters", ValuesComponent(self.counters), kind="counters")
        self.events: list[tuple[str, dict[str, object]]] = []
        self.ledger = MemoryLedger() if ledger is None else ledger
        self.engine = Checkpointer(
            storage,
            registry=self.registry,
            ledger=self.ledger,
            clock=SystemClock(),
            faults=faults or NoFaults(),
            events=self._event,
            options=options or CheckpointOptions(),
        )

    def stage(self, step: int, *, must: bool = False, info: StagedInfo | None = None) -> bool:
        name = CheckpointName("train", step, ONE)
        return self.engine.stage(name, info=info or staged_info(step), must=must)

    def save(self, step: int) -> None:
        assert self.stage(step)
        assert self.engine.wait(WAIT_S)

    def said(self, name: str) -> list[dict[str, object]]:
        return [fields for event, fields in self.events if event == name]

    def directories(self) -> list[str]:
        return [record.directory for record in self.ledger.committed()]

    def _event(self, name: str, fields: dict[str, object]) -> None:
        assert format_event(name, fields)
        self.events.append((name, fields))


def staged_info(step: int, **more: Any) -> StagedInfo:
    return StagedInfo(
        position=LogPosition(ONE, 0, step),
        clocks={"global_step": step},
        lineage={"run_id": "r", "incarnation": 1, "parent": 0},
        algorithm="grpo",
        config_digest="c",
        dataset_digest="d",
        **more,
    )


def directory(step: int) -> str:
    return CheckpointName("train", step, ONE).directory


def test_one_save_says_what_it_did_and_points_to_itself() -> None:
    storage = MemoryStorage()
    rig = Rig(storage)
    rig.save(1)
    rig.engine.close()
    assert rig.directories() == [directory(1)]
    assert [name for name, _ in rig.events] == ["checkpoint_staged", "checkpoint_committed"]
    assert rig.said("checkpoint_staged")[0]["bytes"] == rig.said("checkpoint_committed")[0]["bytes"]
    pointer = sealed_json.decode(
        storage.read("checkpoints/latest.json"), where="latest", newest_format=1
    )
    assert pointer["directory"] == directory(1)
    assert pointer["manifest_digest"] == rig.ledger.committed()[0].manifest_digest
    assert rig.engine.verify(directory(1)).ok
    assert rig.engine.last_error is None


def test_staging_aliases_nothing_of_the_caller() -> None:
    storage = MemoryStorage()
    first_file = Gate(FaultPoint.CHECKPOINT_FILE_WRITTEN)
    rig = Rig(storage, faults=first_file)
    rig.counters["nested"] = {"list": [1]}
    experience, clocks = {"groups": [1]}, {"global_step": 1}
    info = StagedInfo(LogPosition(ONE, 0, 1), clocks, {"run_id": "r"}, "grpo", "c", "d", experience)
    assert rig.stage(1, info=info)
    assert first_file.arrived.wait(WAIT_S)
    rig.weights["w"].fill(-1)
    rig.counters["n"] = 99
    rig.counters["nested"]["list"].append(2)
    experience["groups"].append(2)
    clocks["global_step"] = 5
    first_file.opened.set()
    assert rig.engine.wait(WAIT_S)
    manifest = rig.engine.choose(rig.ledger.committed()).manifest
    reader = CheckpointReader(storage, manifest)
    assert manifest.info.clocks == {"global_step": 1}
    assert reader.experience() == {"groups": [1]}
    assert reader.values()["counters"] == {"n": 0, "nested": {"list": [1]}}
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(reader.tensors("policy")["w"], expected)
    rig.engine.close()


def test_restored_values_alias_neither_files_nor_each_other() -> None:
    class Keeper:
        schema_version = 1
        kept: ComponentState

        def state(self) -> ComponentState:
            return ComponentState(tensors={"a": np.ones(3), "b": np.ones(3)})

        def load(self, state: ComponentState, schema_version: int) -> None:
            self.kept = state

    storage = MemoryStorage()
    rig = Rig(storage)
    keeper = Keeper()
    rig.registry.register("statistics", keeper, kind="tensors")
    rig.save(1)
    rig.engine.close()
    before = storage.files()
    rig.engine.restore(rig.engine.choose(rig.ledger.committed()))
    keeper.kept.tensors["a"][:] = 7
    np.testing.assert_array_equal(keeper.kept.tensors["b"], np.ones(3))
    assert before == {path: storage.files()[path] for path in before}
    assert rig.engine.verify(directory(1)).ok


def test_with_both_arenas_busy_a_save_is_skipped_and_must_waits() -> None:
    gate = Gate(FaultPoint.CHECKPOINT_FILES_DURABLE)
    rig = Rig(MemoryStorage(), faults=gate)
    assert rig.stage(1)
    assert gate.arrived.wait(WAIT_S)
    assert rig.stage(2)
    assert not rig.stage(3)
    assert not rig.engine.wait(0.0)
    assert rig.engine.skipped == 1
    assert rig.said("checkpoint_skipped") == [{"step": 3, "reason": "all arenas are busy"}]
    opener = threading.Timer(0.05, gate.opened.set)
    opener.start()
    assert rig.stage(4, must=True)
    opener.join()
    assert rig.directories() == [directory(2), directory(4)]
    # A skipped name is still free.
    assert rig.stage(3, must=True)
    rig.engine.close()


def test_must_gives_up_at_its_deadline() -> None:
    gate = Gate(FaultPoint.CHECKPOINT_FILES_DURABLE)
    rig = Rig(MemoryStorage(), faults=gate, options=CheckpointOptions(must_timeout_s=0.01))
    with pytest.raises(StorageError, match=r"did not end within 0\.01 s"):
        rig.stage(1, must=True)
    with pytest.raises(StorageError, match="did not end"):
        rig.engine.close()
    gate.opened.set()
    assert rig.engine.wait(WAIT_S)
    assert rig.directories() == [directory(1)]


@pytest.mark.parametrize("kind", [StorageFaultKind.NO_SPACE, StorageFaultKind.EIO_SYNC])
@pytest.mark.parametrize("file", ["policy", "state.msgpack", "manifest.json"])
def test_a_refused_save_leaves_the_older_one_and_training_goes_on(
    kind: StorageFaultKind, file: str
) -> None:
    disk = MemoryStorage()
    rig = Rig(FaultyStorage(disk, plan=[StorageFault(kind, 1, f"step-00000002-1/.tmp-{file}")]))
    if file == "policy":
        rig = Rig(FaultyStorage(disk, plan=[StorageFault(kind, 1, "step-00000002-1/model/.tmp")]))
    rig.save(1)
    rig.save(2)
    assert rig.directories() == [directory(1)]
    assert isinstance(rig.engine.last_error, StorageError)
    assert rig.engine.failed == 1
    assert rig.said("checkpoint_failed")[0]["name"] == directory(2)
    assert disk.list("checkpoints") == ["latest.json", directory(1)]
    assert rig.engine.choose(rig.ledger.committed()).name.step == 1
    # The disk has room again: the same step may be saved after all.
    assert rig.stage(2, must=True)
    assert rig.engine.last_error is None
    assert rig.directories() == [directory(1), directory(2)]
    rig.engine.close()


def test_a_disk_too_full_for_the_hint_is_relieved_all_the_same() -> None:
    disk = MemoryStorage()
    fault = StorageFault(StorageFaultKind.NO_SPACE, 2, path_contains="latest.json")
    storage = FaultyStorage(disk, plan=[fault])
    rig = Rig(storage, options=CheckpointOptions(keep=1))
    rig.save(1)
    rig.save(2)
    assert storage.fired
    assert rig.said("checkpoint_failed") == []
    assert (rig.engine.last_error, rig.engine.failed) == (None, 0)
    assert "latest.json could not be written" in str(rig.said("warning")[0]["message"])
    assert disk.list("checkpoints") == ["latest.json", directory(2)]
    rig.save(3)
    pointer = sealed_json.decode(disk.read("checkpoints/latest.json"), where="", newest_format=1)
    assert pointer["directory"] == directory(3)
    rig.engine.close()


def test_must_raises_what_prevented_the_save() -> None:
    rig = Rig(FaultyStorage(MemoryStorage(), plan=[StorageFault(StorageFaultKind.NO_SPACE, 2)]))
    with pytest.raises(StorageError):
        rig.stage(0, must=True)
    rig.engine.close()


def test_bytes_that_read_back_wrong_are_never_committed() -> None:
    plan = [StorageFault(StorageFaultKind.FLIP_WRITE, 1, "policy.safetensors")]
    storage = FaultyStorage(MemoryStorage(), plan=plan)
    rig = Rig(storage)
    with pytest.raises(DamagedError, match="reads back wrong"):
        rig.stage(1, must=True)
    assert storage.fired[StorageFaultKind.FLIP_WRITE] == 1
    assert rig.directories() == []
    rig.engine.close()


def test_a_fenced_writer_commits_nothing_and_deletes_nothing() -> None:
    storage = MemoryStorage()
    rig = Rig(storage, ledger=SlowLedger(FencedError("a newer incarnation has claimed the run")))
    with pytest.raises(FencedError):
        rig.stage(1, must=True)
    assert rig.directories() == []
    assert storage.exists(f"checkpoints/{directory(1)}/manifest.json")
    assert not storage.exists("checkpoints/latest.json")
    rig.engine.close()


def test_without_acknowledgement_the_outcome_is_unknown_and_the_files_stay() -> None:
    storage = MemoryStorage()
    rig = Rig(storage, ledger=SlowLedger(), options=CheckpointOptions(commit_timeout_s=0.01))
    rig.save(1)
    assert isinstance(rig.engine.last_error, TimeoutError)
    assert storage.exists(f"checkpoints/{directory(1)}/manifest.json")
    with pytest.raises(ConfigError, match="exists"):
        rig.stage(1)
    rig.engine.close()


def test_an_unexpected_failure_reaches_the_owner_and_frees_the_arena() -> None:
    plan = FaultPlan([FaultRule(FaultPoint.MANIFEST_WRITTEN, action=FaultAction.RAISE)])
    rig = Rig(MemoryStorage(), faults=plan)
    assert rig.stage(1)
    with pytest.raises(InjectedFault):
        rig.engine.wait(WAIT_S)
    for step in (2, 3, 4):
        rig.save(step)
    assert rig.directories() == [directory(3), directory(4)]
    assert rig.stage(5)
    rig.engine.close()
    assert rig.directories() == [directory(4), directory(5)]


def test_an_unexpected_failure_found_at_the_end_loses_no_other_save() -> None:
    class FailsOnce(Gate):
        failed = False

        def reach(self, point: FaultPoint) -> None:
            super().reach(point)
            if point is FaultPoint.CHECKPOINT_FILES_DURABLE and not self.failed:
                self.failed = True
                raise InjectedFault("a bug")

    gate = FailsOnce(FaultPoint.CHECKPOINT_FILES_DURABLE)
    rig = Rig(MemoryStorage(), faults=gate)
    assert rig.stage(1)
    assert rig.stage(2)
    gate.opened.set()
    with pytest.raises(InjectedFault):
        rig.engine.close()
    assert rig.directories() == [directory(2)]
    assert rig.engine.arena_bytes == 0


def test_a_name_is_used_once() -> None:
    storage = MemoryStorage()
    rig = Rig(storage)
    rig.save(1)
    with pytest.raises(ConfigError, match="never overwritten"):
        rig.stage(1)
    rig.engine.close()
    later = Rig(storage, ledger=rig.ledger)
    with pytest.raises(ConfigError, match="never overwritten"):
        later.stage(1)
    later.engine.close()
    forgetful = Rig(storage)
    with pytest.raises(StorageError, match="not empty"):
        forgetful.stage(1, must=True)
    forgetful.engine.close()
    assert later.engine.verify(directory(1)).ok


def test_a_foreign_directory_is_refused_and_left_alone() -> None:
    storage = MemoryStorage()
    storage.make_dirs(f"checkpoints/{directory(1)}")
    storage.write_atomic(f"checkpoints/{directory(1)}/notes.txt", b"mine")
    rig = Rig(storage)
    with pytest.raises(StorageError, match="not empty"):
        rig.stage(1, must=True)
    assert storage.read(f"checkpoints/{directory(1)}/notes.txt") == b"mine"
    rig.engine.close()


def test_a_missing_required_component_refuses_the_save_and_is_named() -> None:
    rig = Rig(MemoryStorage())
    rig.engine.registry = Registry(["policy", "optimizer"])
    rig.engine.registry.register("policy", ArraysComponent({}), kind="model")
    with pytest.raises(ConfigError, match="optimizer: required components are not registered"):
        rig.stage(1)
    rig.engine.close()


@pytest.mark.parametrize(
    ("tensors", "values"),
    [
        ({"a": np.array(["text"])}, {}),
        ({"a": np.array([None])}, {}),
        ({"a": np.zeros(2, np.complex128)}, {}),
        ({"a": [1, 2]}, {}),
        ({}, {"a": object()}),
        ({}, {"a": 2**70}),
    ],
)
def test_what_cannot_be_stored_is_refused_at_once(tensors: Any, values: Any) -> None:
    class Odd:
        schema_version = 1

        def state(self) -> ComponentState:
            return ComponentState(tensors, values)

        def load(self, state: ComponentState, schema_version: int) -> None:
            raise AssertionError

    rig = Rig(MemoryStorage())
    rig.registry.register("odd", Odd(), kind="tensors")
    with pytest.raises(ConfigError, match="odd"):
        rig.stage(1)
    rig.engine.close()


def test_a_manifest_takes_plain_numbers_only() -> None:
    rig = Rig(MemoryStorage())
    with pytest.raises(ConfigError, match="cannot be written to a manifest"):
        rig.stage(1, info=staged_info(1, metrics={"m": np.float32(1)}))
    rig.save(1)
    rig.engine.close()


def test_memory_is_bounded_reported_and_reused() -> None:
    rig = Rig(MemoryStorage())
    for step in range(1, 5):
        rig.save(step)
    held = rig.engine.arena_bytes
    manifest = rig.engine.choose(rig.ledger.committed()).manifest
    assert 0 < held <= 2 * manifest.arena_bytes
    rig.save(5)
    assert rig.engine.arena_bytes == held
    rig.engine.close()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_stay_across_restarts(keep: int) -> None:
    storage = MemoryStorage()
    ledger = MemoryLedger()
    for start in (1, 4, 7):
        rig = Rig(storage, ledger=ledger, options=CheckpointOptions(keep=keep))
        for step in range(start, start + 3):
            rig.save(step)
        rig.engine.close()
    expected = [directory(step) for step in range(10 - keep, 10)]
    assert rig.directories() == expected
    assert storage.list("checkpoints") == ["latest.json", *expected]


def test_a_damaged_one_does_not_count_among_the_kept() -> None:
    storage = MemoryStorage()
    rig = Rig(storage)
    rig.save(1)
    rig.save(2)
    storage.damage(f"checkpoints/{directory(2)}/state.msgpack", b"")
    assert rig.engine.choose(rig.ledger.committed()).name.step == 1
    rig.save(3)
    assert storage.list("checkpoints") == ["latest.json", directory(1), directory(3)]
    rig.engine.close()


def test_nothing_is_deleted_before_the_ledger_acknowledged() -> None:
    class Refusing(MemoryLedger):
        def collect(self, record: Collect) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(StorageError("disk full"))
            return future

    storage = MemoryStorage()
    rig = Rig(storage, ledger=Refusing(), options=CheckpointOptions(keep=1))
    rig.save(1)
    rig.save(2)
    assert rig.directories() == [directory(1), directory(2)]
    assert storage.list("checkpoints") == ["latest.json", directory(1), directory(2)]
    assert rig.engine.last_error is None
    assert rig.said("checkpoint_failed") == []
    assert "could not be collected" in str(rig.said("warning")[0]["message"])
    rig.engine.close()


def test_sweep_finishes_deletions_and_clears_cut_off_saves() -> None:
    storage = MemoryStorage()
    rig = Rig(storage)
    for step in (1, 2):
        rig.save(step)
    rig.ledger.collect(Collect((directory(1),)))
    storage.make_dirs("checkpoints/step-00000009-1/model")
    storage.write_atomic("checkpoints/step-00000009-1/model/policy.safetensors", b"cut off")
    swept = rig.engine.sweep([directory(1), "step-00000000-1"])
    assert swept == (directory(1), "step-00000009-1")
    assert storage.list("checkpoints") == ["latest.json", directory(2)]
    assert rig.engine.sweep([directory(1)]) == ()
    rig.engine.close()


def test_staged_blocking_time_is_measured_on_the_given_clock() -> None:
    clock = ManualClock()

    class Slow(ArraysComponent):
        def state(self) -> ComponentState:
            clock.advance(0.25)
            return super().state()

    rig = Rig(MemoryStorage())
    rig.engine.clock = clock
    rig.registry.register("slow", Slow({"a": np.zeros(1)}), kind="tensors")
    rig.save(1)
    assert rig.said("checkpoint_staged")[0]["blocked_ms"] == pytest.approx(250)
    rig.engine.close()


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(keep: int) -> None:
    with pytest.raises(ConfigError, match="never deleted"):
        CheckpointOptions(keep=keep)
