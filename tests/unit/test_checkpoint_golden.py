"""Published formats stay readable: the files in ``tests/golden`` are never written again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from perdure.checkpoint import (
    ArraysComponent,
    Checkpointer,
    CheckpointReader,
    Choice,
    MemoryLedger,
    Registry,
    StagedInfo,
    ValuesComponent,
    choose,
    restore,
)
from perdure.checkpoint.torch_components import (
    ModuleComponent,
    OptimizerComponent,
    RngComponent,
    SchedulerComponent,
)
from perdure.core.clock import SystemClock
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.core.records import Checkpointed
from perdure.storage import PosixStorage

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-v1"
TYPES = ["?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8", "<c8"]
VALUES = {"global_step": 3, "mean": 0.1, "text": "ä", "raw": b"\x00\xff", "list": [1, None, True]}


@pytest.fixture
def run(tmp_path: Path) -> PosixStorage:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    return PosixStorage(tmp_path)


def chosen(run: PosixStorage) -> Choice:
    item = json.loads(run.read("ledger.json"))
    incarnation, segment, offset = item.pop("position")
    position = LogPosition(IncarnationNumber(incarnation), segment, offset)
    return choose(run, [Checkpointed(position=position, **item)], events=ignore_events)


def test_format_1_manifest(run: PosixStorage) -> None:
    manifest = chosen(run).manifest
    assert manifest.name == CheckpointName("train", 3, IncarnationNumber(1))
    assert manifest.info.position == LogPosition(IncarnationNumber(1), 0, 4096)
    assert manifest.info.clocks == {
        "global_step": 3,
        "local_update": 0,
        "optimizer_step": 1,
        "policy_version": 2,
    }
    assert manifest.info.lineage == {"run_id": "0" * 32, "incarnation": 1, "parent": 0}
    assert manifest.info.algorithm == "ppo"
    assert (manifest.info.config_digest, manifest.info.dataset_digest) == ("c0ffee", "da7a")
    assert manifest.info.metrics == {}
    assert manifest.info.environment == {"threads": 1}
    assert manifest.created_wall_s == 1_700_000_000.0
    assert CheckpointReader(run, manifest).experience() == {
        "next_group": 24,
        "next_data_index": 24,
        "segments": ["payload-000001-000000.plog"],
    }


def test_format_1_components(run: PosixStorage) -> None:
    names = {np.dtype(kind).name: np.zeros((2, 3), kind) for kind in TYPES}
    arrays = names | {"scalar": np.array(0, np.int64), "empty": np.zeros((0, 4), np.float32)}
    values: dict[str, Any] = dict.fromkeys(VALUES)
    module, value = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9], gamma=0.9)
    rng = RngComponent()
    registry = Registry()
    registry.register("policy", ModuleComponent(module), kind="model")
    registry.register("agents/1/value", ModuleComponent(value), kind="model")
    registry.register("optimizer", OptimizerComponent(optimizer, module), kind="optimizer")
    registry.register("scheduler", SchedulerComponent(scheduler), kind="scheduler")
    registry.register("statistics", ArraysComponent(arrays), kind="tensors")
    registry.register("counters", ValuesComponent(values), kind="counters")
    registry.register("rng", rng, kind="rng")
    choice = chosen(run)
    restore(run, choice, registry.entries(), faults=NoFaults())

    for kind in TYPES:
        expected = (np.arange(6) % (2 if kind == "?" else 6)).astype(kind).reshape(2, 3)
        np.testing.assert_array_equal(arrays[np.dtype(kind).name], expected)
    assert arrays["scalar"] == 42
    assert values == VALUES
    assert torch.equal(value.weight, torch.tensor([[0.5, 1.5], [-2, 3]]).bfloat16())
    moment = optimizer.state[module.weight]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((2, 3), 0.2))
    assert optimizer.state[module.weight]["step"] == 1
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert scheduler.milestones == {1: 1, 3: 1}
    assert scheduler.last_epoch == 1
    stored = CheckpointReader(run, choice.manifest).tensors("rng")
    for name, state in rng.state().tensors.items():
        np.testing.assert_array_equal(np.asarray(state), stored[name])


def test_on_a_real_disk_other_tools_read_the_tensors(tmp_path: Path) -> None:
    weights = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    registry = Registry()
    registry.register("policy", ArraysComponent(weights), kind="model")
    ledger = MemoryLedger()
    engine = Checkpointer(
        PosixStorage(tmp_path),
        registry=registry,
        ledger=ledger,
        clock=SystemClock(),
        faults=NoFaults(),
        events=ignore_events,
    )
    info = StagedInfo(LogPosition(IncarnationNumber(1), 0, 0), {}, {}, "ppo", "", "")
    for step in range(4):
        name = CheckpointName("train", step, IncarnationNumber(1))
        engine.stage(name, info=info, must=True)
    engine.close()
    folder = tmp_path / "checkpoints" / ledger.committed()[-1].directory
    with safetensors.safe_open(folder / "model/policy.safetensors", framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("w"), weights["w"])
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["latest.json", "step-00000002-1", "step-00000003-1"]
    assert not list(tmp_path.rglob(".tmp-*"))
