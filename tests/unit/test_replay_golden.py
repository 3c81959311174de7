"""Published formats of replay stay readable, and on a real disk they are what the page says."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from replay_cases import ReplayRun, rows, small_ring, values_of

from perdure.checkpoint import Choice, choose, restore, verify
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import IncarnationNumber, LogPosition
from perdure.core.records import Checkpointed
from perdure.storage import PosixStorage

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_replay", GOLDEN / "make_replay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path) -> PosixStorage:
    shutil.copytree(GOLDEN / "replay-v1", tmp_path, dirs_exist_ok=True)
    return PosixStorage(tmp_path)


def committed(run: PosixStorage) -> list[Checkpointed]:
    records = json.loads(run.read("ledger.json"))
    positions = [LogPosition(IncarnationNumber(1), 0, item.pop("position")[2]) for item in records]
    return [
        Checkpointed(position=position, **item)
        for item, position in zip(records, positions, strict=True)
    ]


def loaded(run: PosixStorage, made: ModuleType, choice: Choice) -> Any:
    parts = made.Parts()
    restore(run, choice, parts.registry.entries(), faults=NoFaults())
    return parts


def test_format_1_newest(run: PosixStorage, made: ModuleType) -> None:
    parts = loaded(run, made, choose(run, committed(run), events=ignore_events))
    assert (parts.ring.head, parts.ring.total) == (3, 12)
    expected = made.rows(3, 12)
    for name, column in parts.ring.rows(np.arange(3, 12)).items():
        np.testing.assert_array_equal(column, expected[name])
    assert (parts.flat.pos, parts.flat.full) == (2, True)
    assert parts.flat.arrays["actions"].ravel().tolist() == [10, 11, 7, 8, 9]
    assert parts.flat.arrays["dones"].tolist() == [10, 11, 7, 8, 9]
    assert parts.priorities.highest == 2.5
    parts.ring.append(made.rows(12, 14))
    assert parts.ring.head == 6


def test_format_1_oldest(run: PosixStorage, made: ModuleType) -> None:
    first = committed(run)[0]
    assert verify(run, first.directory, manifest_digest=first.manifest_digest).ok
    parts = loaded(run, made, choose(run, [first], events=ignore_events))
    assert (parts.ring.head, parts.ring.total) == (0, 7)
    np.testing.assert_array_equal(
        parts.ring.rows(np.arange(7))["reward"], made.rows(0, 7)["reward"]
    )
    assert parts.priorities.of(np.arange(7)).tolist() == [1, 1, 1, 1, 1, 1, 2.5]


def test_a_second_reader_finds_every_row(tmp_path: Path) -> None:
    """Reads a segment from the page alone: nothing of the package is used."""
    run = ReplayRun(PosixStorage(tmp_path), small_ring(100, 100))
    run.replay.append(rows(0, 30))
    run.save_well(1)
    (path,) = (tmp_path / "segments" / "replay").iterdir()
    data = path.read_bytes()
    magic, version, size, length = struct.unpack_from("<8sIII", data)
    assert (magic, version, size % 4096) == (b"PERDSEG\n", 1, 0)
    index = msgpack.unpackb(data[20 : 20 + length])
    assert (index["component"], index["first"], index["rows"]) == ("replay", 0, 30)
    first, count, incarnation, checksum = path.stem.split("-")
    assert (int(first), int(count), int(incarnation)) == (0, 30, 1)
    assert checksum == xxhash.xxh3_128_hexdigest(data)
    types = {"U8": "u1", "I64": "<i8", "BOOL": "?"}
    expected = rows(0, 30)
    for name, code, shape, offset, blocks in index["columns"]:
        assert (size + offset) % 4096 == 0
        column = np.frombuffer(data, types[code], 30 * int(np.prod(shape)), size + offset).reshape(
            30, *shape
        )
        np.testing.assert_array_equal(column, expected[name])
        assert blocks == struct.pack("<Q", xxhash.xxh3_64_intdigest(column.tobytes()))
    manifest = json.loads(next((tmp_path / "checkpoints").glob("*/manifest.json")).read_text())
    (entry,) = manifest["segments"]["replay"]
    assert entry["path"] == f"segments/replay/{path.name}"
    assert entry["index_xxh3_128"] == xxhash.xxh3_128_hexdigest(data[:size])
    assert manifest["features"] == ["segments"]


def test_on_a_real_disk_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    run = ReplayRun(PosixStorage(tmp_path), small_ring(40, 8), keep=1)
    for incarnation in range(2, 6):
        run.replay.append(rows(run.replay.total, 23))
        run.save_well(incarnation)
        inodes = {path: path.stat().st_ino for path in (tmp_path / "segments/replay").iterdir()}
        run = ReplayRun(PosixStorage(tmp_path), small_ring(40, 8), keep=1, incarnation=incarnation)
        run.restore()
        run.engine.sweep(run.ledger.collected())
        total = run.replay.total
        assert values_of(run.replay) == list(range(max(0, total - 40), total))
        assert inodes == {p: p.stat().st_ino for p in (tmp_path / "segments/replay").iterdir()}
    assert len(inodes) <= 40 / 8 + 4
