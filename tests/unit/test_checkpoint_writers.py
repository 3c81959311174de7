"""Saves on a real disk: by a thread, by a process, by one that is lost, with one arena or two."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from perdure.checkpoint import (
    ArraysComponent,
    ChangeCounter,
    Checkpointer,
    CheckpointOptions,
    MemoryLedger,
    Registry,
    StagedInfo,
)
from perdure.checkpoint.arena import Arena, spec_of
from perdure.checkpoint.image_files import ProcessFiles, image_files
from perdure.checkpoint.layout import plan
from perdure.checkpoint.torch_components import ModuleComponent
from perdure.checkpoint.verification import committed_manifest, verify
from perdure.core import sealed_json
from perdure.core.clock import SystemClock
from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError, StorageError
from perdure.core.events import ignore_events
from perdure.core.faults import FaultPoint
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.storage import MemoryStorage, PosixStorage, bulk

ONE = IncarnationNumber(1)
WAIT_S = 20.0
ELEMENTS = (2 * bulk.CHUNK_BYTES + 12) // 4


class AtPoint:
    """Does something each time a fault point is reached."""

    def __init__(self) -> None:
        self._acts: dict[FaultPoint, Callable[[], None]] = {}

    def do(self, point: FaultPoint, act: Callable[[], None]) -> None:
        self._acts[point] = act

    def reach(self, point: FaultPoint) -> None:
        self._acts.get(point, lambda: None)()


class Rig:
    """An engine over two files of tensors, the first of three chunks."""

    def __init__(self, storage: Any, **options: Any) -> None:
        self.weights = {"w": np.arange(ELEMENTS, dtype=np.float32)}
        self.module = torch.nn.Linear(3, 2)
        self.registry = Registry()
        self.registry.register("policy", ArraysComponent(self.weights), kind="model")
        self.registry.register("value", ModuleComponent(self.module), kind="model")
        self.ledger = MemoryLedger()
        self.events: list[tuple[str, dict[str, object]]] = []
        self.at = AtPoint()
        self.engine = Checkpointer(
            storage,
            registry=self.registry,
            ledger=self.ledger,
            clock=SystemClock(),
            faults=self.at,
            events=lambda name, fields: self.events.append((name, fields)),
            options=CheckpointOptions(**options),
        )

    def stage(self, step: int, *, must: bool = False) -> bool:
        info = StagedInfo(LogPosition(ONE, 0, step), {}, {}, "ppo", "", "")
        return self.engine.stage(CheckpointName("train", step, ONE), info=info, must=must)

    def said(self, name: str) -> list[dict[str, object]]:
        return [fields for event, fields in self.events if event == name]

    def pid(self) -> int:
        files = self.engine._pipeline._images
        assert isinstance(files, ProcessFiles)
        assert files.pid is not None
        return files.pid


@pytest.mark.parametrize("writer", ["process", "thread", "auto"])
def test_whoever_writes_the_same_comes_back(tmp_path: Path, writer: str) -> None:
    rig = Rig(PosixStorage(tmp_path), writer=writer)
    for step in range(3):
        rig.weights["w"][:] = step
        with torch.no_grad():
            rig.module.weight.fill_(step)
        assert rig.stage(step, must=True)
    started = writer == "process"
    if started:
        assert rig.pid() > 0
    choice = rig.engine.choose(rig.ledger.committed())
    rig.weights["w"].fill(-1)
    with torch.no_grad():
        rig.module.weight.fill_(-1)
    rig.engine.restore(choice)
    assert np.all(rig.weights["w"] == 2)
    assert torch.all(rig.module.weight == 2)
    rig.engine.close()
    assert rig.engine.arena_bytes == 0
    entry = choice.manifest.files["model/policy.safetensors"]
    assert (entry.chunk_bytes, len(entry.sums)) == (bulk.CHUNK_BYTES, 3)
    assert len(choice.manifest.files["model/value.safetensors"].sums) == 1
    assert choice.manifest.features == ("chunks",)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_memory_is_known_beforehand_and_in_the_manifest(tmp_path: Path) -> None:
    for arenas in (1, 2):
        rig = Rig(PosixStorage(tmp_path / str(arenas)), arenas=arenas)
        held = rig.engine.reserve()
        assert rig.stage(1, must=True)
        assert rig.stage(2, must=True)
        assert rig.engine.arena_bytes == held
        manifest = rig.engine.choose(rig.ledger.committed()).manifest
        assert manifest.arenas == arenas
        assert manifest.arenas * manifest.arena_bytes == held
        rig.engine.close()
    with pytest.raises(ConfigError, match="arenas"):
        CheckpointOptions(arenas=3)  # type: ignore[arg-type]


def test_without_memory_a_save_fails_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(PosixStorage(tmp_path), arenas=1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        assert not rig.stage(1)
        assert "set arenas to 1" in str(rig.engine.last_error)
        with pytest.raises(StorageError, match="for a copy of the state"):
            rig.stage(2, must=True)
    assert rig.stage(3, must=True)
    assert rig.engine.last_error is None
    rig.engine.close()


def test_one_arena_skips_while_it_is_written() -> None:
    rig = Rig(MemoryStorage(), arenas=1)
    opened = threading.Event()
    rig.at.do(FaultPoint.CHECKPOINT_FILES_DURABLE, lambda: assert_true(opened.wait(WAIT_S)))
    assert rig.stage(1)
    assert not rig.stage(2)
    opened.set()
    assert rig.engine.wait(WAIT_S)
    assert rig.stage(3, must=True)
    assert rig.engine.skipped == 1
    rig.engine.close()


def assert_true(value: bool) -> None:
    assert value


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_lost_in_the_middle_is_replaced_and_the_save_committed(
    tmp_path: Path, number: signal.Signals
) -> None:
    rig = Rig(PosixStorage(tmp_path), writer="process", stall_timeout_s=1.0)
    assert rig.stage(1, must=True)
    lost = rig.pid()
    left = [number]

    def strike_once() -> None:
        if left:
            os.kill(lost, left.pop())

    rig.at.do(FaultPoint.CHECKPOINT_FILE_WRITTEN, strike_once)
    assert rig.stage(2, must=True)
    (event,) = rig.said("checkpoint_writer_lost")
    assert event["replacement"] == "another one"
    assert rig.pid() != lost
    assert rig.engine.verify(rig.ledger.committed()[-1].directory).ok
    rig.engine.close()


@pytest.mark.parametrize("writer", ["process", "thread", "memory"])
def test_a_save_that_is_not_waited_for_any_longer_ends_at_its_next_chunk(
    tmp_path: Path, writer: str
) -> None:
    storage = MemoryStorage() if writer == "memory" else PosixStorage(tmp_path)
    rig = Rig(storage, writer="process" if writer == "process" else "thread")
    assert rig.stage(1, must=True)
    arrived, left = threading.Event(), threading.Event()

    def hold() -> None:
        if writer == "process":
            os.kill(rig.pid(), signal.SIGSTOP)
        arrived.set()
        assert writer == "process" or left.wait(WAIT_S)

    rig.at.do(FaultPoint.CHECKPOINT_FILE_WRITTEN, hold)
    assert rig.stage(2)
    assert arrived.wait(WAIT_S)
    with pytest.raises(StorageError, match=r"before the grace period did.*grace_s"):
        rig.engine.close(SystemClock().monotonic_s() + 0.05)
    left.set()
    assert rig.engine.wait(WAIT_S)
    assert "was given up" in str(rig.engine.last_error)
    assert [record.step for record in rig.ledger.committed()] == [1]
    assert not rig.said("checkpoint_writer_lost")


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("writer", ["thread", "memory"])
def test_a_file_that_is_given_up_is_not_written_to_its_end(
    tmp_path: Path, writer: str, summed: bool
) -> None:
    weights = {"w": np.arange(ELEMENTS, dtype=np.float32)}
    layout = plan({"f": {"w": spec_of(weights["w"])}})
    arena = Arena()
    sums = arena.fill(layout, {"f": weights})["f"]
    storage = MemoryStorage() if writer == "memory" else PosixStorage(tmp_path)
    files = image_files(storage, writer="thread", stall_s=WAIT_S, events=ignore_events)
    storage.make_dirs("")
    files.give_up()
    with pytest.raises(StorageError, match="given up"):
        files.write("image", arena, layout.images[0], sums if summed else None)


def test_a_writer_lost_again_and_again_fails_the_save_and_not_the_next(tmp_path: Path) -> None:
    rig = Rig(PosixStorage(tmp_path), writer="process")
    assert rig.stage(1, must=True)
    process = rig.engine._pipeline._images._process  # type: ignore[attr-defined]
    ask = process._ask

    def dies_on_the_job(job: dict[str, Any], **more: Any) -> dict[str, Any]:
        if job["do"] == "write":
            os.kill(rig.pid(), signal.SIGKILL)
        return ask(job, **more)

    process._ask = dies_on_the_job
    assert rig.stage(2)
    assert rig.engine.wait(WAIT_S)
    assert isinstance(rig.engine.last_error, StorageError)
    assert len(rig.said("checkpoint_writer_lost")) == 2
    assert [record.step for record in rig.ledger.committed()] == [1]
    del process._ask
    assert rig.stage(3, must=True)
    rig.engine.close()


DIES_AT_FIRST = """#!/bin/sh
echo >> {starts}
[ $(wc -l < {starts}) -gt {deaths} ] || kill -KILL $$
exec {python} "$@"
"""


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_a_writer_that_dies_before_it_has_started_is_replaced_and_after_three_by_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    python, starts = tmp_path / "python", tmp_path / "starts"
    python.write_text(DIES_AT_FIRST.format(starts=starts, deaths=deaths, python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    rig = Rig(PosixStorage(tmp_path / "run"), writer="process")
    assert rig.stage(1, must=True)
    assert rig.stage(2, must=True)
    replacements = [event["replacement"] for event in rig.said("checkpoint_writer_lost")]
    if deaths < 3:
        assert replacements == ["another one"] * deaths
        assert rig.pid() > 0
    else:
        assert replacements == ["another one", "another one", "a thread"]
        assert len(starts.read_text()) == deaths
    assert all(rig.engine.verify(one.directory).ok for one in rig.ledger.committed())
    rig.engine.close()


def test_verification_names_the_chunk(tmp_path: Path) -> None:
    rig = Rig(PosixStorage(tmp_path))
    assert rig.stage(1, must=True)
    rig.engine.close()
    directory = rig.ledger.committed()[0].directory
    path = tmp_path / "checkpoints" / directory / "model/policy.safetensors"
    data = bytearray(path.read_bytes())
    data[bulk.CHUNK_BYTES * 2 + 3] ^= 4
    path.write_bytes(data)
    (problem,) = rig.engine.verify(directory).problems
    assert problem.file == "model/policy.safetensors"
    assert problem.reason == "checksum does not match in chunk 2"


def assert_a_wrong_chunk_is_not_committed(rig: Rig) -> None:
    assert rig.stage(1)
    assert rig.engine.wait(WAIT_S)
    assert "in chunk 1" in str(rig.engine.last_error)
    assert not rig.ledger.committed()
    rig.engine.close()


def test_bytes_that_the_disk_loses_are_found_before_the_commit(tmp_path: Path) -> None:
    rig = Rig(PosixStorage(tmp_path), writer="thread")
    directory = CheckpointName("train", 1, ONE).directory
    path = tmp_path / "checkpoints" / directory / "model/policy.safetensors"

    def lose_a_byte() -> None:
        if path.exists():
            with path.open("r+b") as file:
                file.seek(bulk.CHUNK_BYTES)
                file.write(b"\xff\xfe\xfd\xfc")
                os.fsync(file.fileno())

    rig.at.do(FaultPoint.CHECKPOINT_FILE_WRITTEN, lose_a_byte)
    assert_a_wrong_chunk_is_not_committed(rig)


@pytest.mark.parametrize("writer", ["process", "thread", "memory"])
def test_a_copy_that_changes_in_memory_is_found_before_the_commit(
    tmp_path: Path, writer: str
) -> None:
    """The checksums are those of what was copied, whoever writes it later."""
    storage = MemoryStorage() if writer == "memory" else PosixStorage(tmp_path)
    rig = Rig(storage, writer="process" if writer == "process" else "thread", arenas=1)
    rig.engine.reserve()

    def lose_a_bit() -> None:
        (arena,) = rig.engine._pipeline.arenas
        arena._buffer[bulk.CHUNK_BYTES + 5] ^= 1

    rig.at.do(FaultPoint.CHECKPOINT_STAGED, lose_a_bit)
    assert_a_wrong_chunk_is_not_committed(rig)


@pytest.mark.parametrize("writer", ["process", "thread", "memory"])
def test_what_a_gpu_has_copied_gets_its_checksums_from_who_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    storage = MemoryStorage() if writer == "memory" else PosixStorage(tmp_path)
    rig = Rig(storage, writer="process" if writer == "process" else "thread")
    with monkeypatch.context() as patch:
        patch.setattr("perdure.checkpoint.arena._on_gpu", lambda _: True)
        patch.setattr("perdure.checkpoint.arena.copy_images", _nothing_to_copy)
        assert rig.stage(1, must=True)
    assert rig.stage(2, must=True)
    one, two = (committed_manifest(storage, record).files for record in rig.ledger.committed())
    tensors = [path for path in one if path.endswith(".safetensors")]
    assert len(tensors) == 2
    assert [one[path] for path in tensors] == [two[path] for path in tensors]
    assert rig.engine.verify(rig.ledger.committed()[0].directory).ok
    rig.engine.close()


def _nothing_to_copy(copies: dict[str, Any]) -> dict[str, Any]:
    assert not copies
    return {}


def test_a_manifest_with_checksums_of_files_and_chunks_stays_readable(tmp_path: Path) -> None:
    """As versions before the feature ``chunks`` wrote it."""
    storage = PosixStorage(tmp_path)
    rig = Rig(storage)
    assert rig.stage(1, must=True)
    (record,) = rig.ledger.committed()
    path = tmp_path / "checkpoints" / record.directory / "manifest.json"
    value = json.loads(path.read_bytes())
    del value["digest"]
    value["features"] = []
    file = path.parent / "model/policy.safetensors"
    value["files"]["model/policy.safetensors"]["xxh3_128"] = xxhash.xxh3_128_hexdigest(
        file.read_bytes()
    )
    path.write_bytes(sealed_json.encode(value))
    digest = xxhash.xxh3_128_hexdigest(path.read_bytes())
    report = verify(storage, record.directory, manifest_digest=digest)
    assert report.ok
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (problem,) = verify(storage, record.directory, manifest_digest=digest).problems
    assert problem.chunks == (2,)
    rig.engine.close()


class Counted:
    """A component that says when it changes; its state is read by a function of the test."""

    schema_version = 1

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self.counter = ChangeCounter()
        self._read = read

    @property
    def state_version(self) -> int:
        return self.counter.value

    def state(self) -> ComponentState:
        return ComponentState(tensors=self._read())

    def load(self, state: ComponentState, schema_version: int) -> None:
        del state, schema_version


def test_a_state_in_the_middle_of_a_change_is_not_copied() -> None:
    rig = Rig(MemoryStorage())
    counted = Counted(lambda: {"a": np.zeros(2)})
    rig.registry.register("counted", counted, kind="tensors")
    with counted.counter.changing():
        assert not rig.stage(1)
        with counted.counter.changing():
            assert not rig.stage(2)
        assert not rig.stage(3)
    assert rig.stage(4, must=True)
    assert rig.engine.torn == 3
    reasons = {fields["reason"] for fields in rig.said("checkpoint_skipped")}
    assert reasons == {"changed while it was copied: counted"}
    rig.engine.close()


def test_a_change_during_the_copy_is_noticed_and_must_tries_again() -> None:
    rig = Rig(MemoryStorage())

    def changed_meanwhile() -> dict[str, Any]:
        if left:
            with counted.counter.changing():
                left.pop()
        return {"a": np.zeros(2)}

    left = [1, 2]
    counted = Counted(changed_meanwhile)
    rig.registry.register("counted", counted, kind="tensors")
    assert not rig.stage(1)
    assert rig.stage(2, must=True)
    left += range(100)
    with pytest.raises(StorageError, match="changed during each of"):
        rig.stage(3, must=True)
    assert [record.step for record in rig.ledger.committed()] == [2]
    rig.engine.close()


def test_torchs_own_counter_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(MemoryStorage())
    tensor = torch.zeros(3)
    with torch.inference_mode():
        uncounted = torch.zeros(3)
    rig.registry.register(
        "plain", Counted(lambda: {"t": tensor, "uncounted": uncounted}), kind="tensors"
    )
    fill = type(rig.engine._pipeline.arenas[0]).fill

    def filled_while_training(*args: Any) -> None:
        fill(*args)
        tensor.add_(1)

    monkeypatch.setattr("perdure.checkpoint.arena.Arena.fill", filled_while_training)
    assert not rig.stage(1)
    monkeypatch.undo()
    assert rig.stage(2, must=True)
    assert rig.engine.torn == 1
    rig.engine.close()
