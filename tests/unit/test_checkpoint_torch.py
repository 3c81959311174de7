"""Torch components: exact resume, in place, by name; file images of torch types."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from perdure.checkpoint import Checkpointer, MemoryLedger, Registry, StagedInfo
from perdure.checkpoint.arena import Arena, materialize, spec_of
from perdure.checkpoint.layout import parse_header, plan
from perdure.checkpoint.torch_components import (
    ModuleComponent,
    OptimizerComponent,
    RngComponent,
    SchedulerComponent,
)
from perdure.core.clock import SystemClock
from perdure.core.components import ComponentState
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.storage import MemoryStorage

ONE = IncarnationNumber(1)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "two_groups": lambda p: _two_groups(list(p)),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
}


def _two_groups(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.01}]
    return torch.optim.AdamW(groups, betas=(0.8, 0.9))


class Loop:
    """A model that trains on a global random stream, with dropout and batch statistics."""

    def __init__(self, optimizer: str = "adamw", scheduler: str = "multistep", seed: int = 0):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the legacy stream is what user code draws from
        torch.manual_seed(seed)
        self.module = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 2),
        )
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.registry = Registry(["policy", "optimizer"])
        parts: list[tuple[str, Any, Any]] = [
            ("policy", ModuleComponent(self.module), "model"),
            ("optimizer", OptimizerComponent(self.optimizer, self.module), "optimizer"),
            ("scheduler", SchedulerComponent(self.scheduler), "scheduler"),
            ("rng", RngComponent(), "rng"),
        ]
        for name, component, kind in parts:
            self.registry.register(name, component, kind=kind)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            scale = random.random() + float(np.random.rand())  # noqa: NPY002
            loss = (self.module(torch.randn(6, 4)) * scale).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()

    def engine(self, storage: MemoryStorage, ledger: MemoryLedger) -> Checkpointer:
        return Checkpointer(
            storage,
            registry=self.registry,
            ledger=ledger,
            clock=SystemClock(),
            faults=NoFaults(),
            events=ignore_events,
        )

    def save(self, storage: MemoryStorage, ledger: MemoryLedger, step: int) -> None:
        engine = self.engine(storage, ledger)
        info = StagedInfo(LogPosition(ONE, 0, 0), {"global_step": step}, {}, "ppo", "c", "d")
        engine.stage(CheckpointName("train", step, ONE), info=info, must=True)
        engine.close()

    def restore(self, storage: MemoryStorage, ledger: MemoryLedger) -> None:
        engine = self.engine(storage, ledger)
        engine.restore(engine.choose(ledger.committed()))
        engine.close()


def assert_equal_states(one: Any, other: Any) -> None:
    """Bit for bit, types included."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_states(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal_states(left, right)
    else:
        assert one == other


def parts_of(storage: MemoryStorage, step: int) -> dict[str, bytes]:
    root = f"checkpoints/{CheckpointName('train', step, ONE).directory}/"
    return {
        path[len(root) :]: data
        for path, data in storage.files().items()
        if path.startswith(root) and not path.endswith("manifest.json")
    }


@pytest.mark.parametrize("fresh_steps", [0, 3], ids=["into_fresh", "into_used"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_resumed_run_equals_the_uninterrupted_one(optimizer: str, fresh_steps: int) -> None:
    storage, ledger = MemoryStorage(), MemoryLedger()
    whole = Loop(optimizer)
    whole.train(3)
    whole.save(storage, ledger, 3)
    whole.train(4)
    resumed = Loop(optimizer, seed=5)
    resumed.train(fresh_steps)
    resumed.restore(storage, ledger)
    resumed.train(4)
    assert_equal_states(dict(whole.module.state_dict()), dict(resumed.module.state_dict()))
    assert_equal_states(whole.optimizer.state_dict(), resumed.optimizer.state_dict())
    assert_equal_states(whole.scheduler.state_dict(), resumed.scheduler.state_dict())


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_save_load_save_gives_equal_bytes(scheduler: str) -> None:
    storage, ledger = MemoryStorage(), MemoryLedger()
    first = Loop(scheduler=scheduler)
    first.train(3)
    first.save(storage, ledger, 1)
    second = Loop(scheduler=scheduler, seed=9)
    second.restore(storage, ledger)
    second.save(storage, ledger, 2)
    assert parts_of(storage, 1) == parts_of(storage, 2)
    # Deterministic sides go on alike, whatever the random stream did.
    state = torch.get_rng_state()
    first.train(3)
    torch.set_rng_state(state)
    second.train(3)
    assert_equal_states(first.scheduler.state_dict(), second.scheduler.state_dict())


def test_the_state_before_the_first_step_empties_a_used_optimizer() -> None:
    storage, ledger = MemoryStorage(), MemoryLedger()
    Loop().save(storage, ledger, 0)
    used = Loop(seed=3)
    used.train(2)
    used.restore(storage, ledger)
    assert len(used.optimizer.state) == 0


def test_restoring_keeps_every_object_in_place() -> None:
    storage, ledger = MemoryStorage(), MemoryLedger()
    loop = Loop()
    loop.train(2)
    loop.save(storage, ledger, 2)
    parameters = [parameter.data_ptr() for parameter in loop.module.parameters()]
    group = loop.optimizer.param_groups[0]
    moment = loop.optimizer.state[next(loop.module.parameters())]["exp_avg"]
    loop.train(1)
    loop.restore(storage, ledger)
    assert parameters == [parameter.data_ptr() for parameter in loop.module.parameters()]
    assert loop.optimizer.param_groups[0] is group
    assert loop.scheduler.optimizer is loop.optimizer
    assert loop.optimizer.state[next(loop.module.parameters())]["exp_avg"] is moment


def test_the_order_of_parameters_in_the_module_does_not_matter_their_names_do() -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    other = torch.nn.ModuleDict({"b": torch.nn.Linear(2, 2), "a": torch.nn.Linear(2, 2)})
    state = ModuleComponent(module).state()
    ModuleComponent(other).load(state, 1)
    assert torch.equal(module["a"].weight, other["a"].weight)  # type: ignore[union-attr]
    assert torch.equal(module["b"].weight, other["b"].weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_types_that_numpy_lacks_survive(dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(3, 5).to(dtype), "empty": torch.zeros(0, 2, dtype=dtype)}
    layout = plan({"f": {name: spec_of(tensor) for name, tensor in tensors.items()}})
    arena = Arena()
    arena.fill(layout, {"f": tensors})
    data = bytes(arena.file_bytes(layout.images[0]))
    theirs = safetensors.torch.load(data)
    start, places = parse_header(data, file_size=len(data))
    raw = np.frombuffer(data, np.uint8)
    for place in places:
        ours = materialize(raw[start + place.start : start + place.end], place.spec)
        for tensor in (ours, theirs[place.name]):
            assert tensor.dtype == dtype
            assert tensor.shape == tensors[place.name].shape
            assert torch.equal(tensor.float(), tensors[place.name].float())


def test_a_bfloat16_module_is_restored_exactly() -> None:
    storage, ledger = MemoryStorage(), MemoryLedger()
    registry, other = Registry(), Registry()
    module, empty = torch.nn.Linear(3, 3).bfloat16(), torch.nn.Linear(3, 3).bfloat16()
    registry.register("policy", ModuleComponent(module), kind="model")
    other.register("policy", ModuleComponent(empty), kind="model")
    loop = Loop()
    loop.registry = registry
    loop.save(storage, ledger, 1)
    loop.registry = other
    loop.restore(storage, ledger)
    assert torch.equal(module.weight, empty.weight)


def _for_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(300, 301)


LARGE: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.randn(300, 301),
    "bfloat16": lambda: torch.randn(300, 301).bfloat16(),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(300, 301)),
    "turned": lambda: torch.randn(300, 301).T,
    "every other row": lambda: torch.randn(600, 301)[::2],
    "complex": lambda: torch.randn(300, 301, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(300, 301, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(300, 301, dtype=torch.complex64).conj().imag,
    "made for inference": _for_inference,
    "zeros without memory": lambda: torch._efficientzerotensor((300, 301)),
}


@pytest.mark.parametrize("kind", sorted(LARGE))
def test_large_tensors_are_copied_as_they_are(kind: str) -> None:
    tensor, small = LARGE[kind](), torch.randn(3)
    layout = plan({"f": {"t": spec_of(tensor), "small": spec_of(small)}})
    arena = Arena()
    arena.fill(layout, {"f": {"t": tensor, "small": small}})
    stored = safetensors.torch.load(bytes(arena.file_bytes(layout.images[0])))
    assert torch.equal(stored["t"], tensor)
    assert torch.equal(stored["small"], small)


def test_non_contiguous_and_sparse_tensors() -> None:
    turned = torch.arange(6.0).reshape(2, 3).T
    layout = plan({"f": {"t": spec_of(turned)}})
    arena = Arena()
    arena.fill(layout, {"f": {"t": turned}})
    theirs = safetensors.torch.load(bytes(arena.file_bytes(layout.images[0])))
    assert torch.equal(theirs["t"], turned)
    with pytest.raises(ValueError, match="cannot be stored"):
        spec_of(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="device meta"):
        spec_of(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="neither"):
        spec_of(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("weight"), "missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected"),
        (lambda t: t.update(weight=torch.zeros(3, 2)), "expected"),
        (lambda t: t.update(weight=torch.zeros(2, 3, dtype=torch.float64)), "float64"),
    ],
)
def test_a_module_takes_all_or_nothing(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    module = torch.nn.Linear(3, 2)
    before = module.weight.clone()
    tensors = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        ModuleComponent(module).load(ComponentState(tensors), 1)
    assert torch.equal(module.weight, before)


def test_an_optimizer_refuses_other_groups_other_shapes_and_strangers() -> None:
    one, two = Loop("adamw"), Loop("two_groups")
    one.train(1)
    two.train(1)
    stored = OptimizerComponent(one.optimizer, one.module).state()
    with pytest.raises(ValueError, match="parameter groups"):
        OptimizerComponent(two.optimizer, two.module).load(stored, 1)
    wrong = dict(stored.tensors)
    wrong["state/0.weight/exp_avg"] = torch.zeros(1)
    with pytest.raises(ValueError, match="exp_avg"):
        OptimizerComponent(one.optimizer, one.module).load(ComponentState(wrong, stored.values), 1)
    with pytest.raises(ValueError, match="not in the module"):
        OptimizerComponent(one.optimizer, torch.nn.Linear(1, 1)).state()
    sgd = torch.optim.SGD(one.module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="of class AdamW, expected SGD"):
        OptimizerComponent(sgd, one.module).load(stored, 1)
    cosine = SchedulerComponent(SCHEDULERS["cosine"](sgd))
    with pytest.raises(ValueError, match="of class MultiStepLR, expected CosineAnnealingLR"):
        cosine.load(SchedulerComponent(one.scheduler).state(), 1)
    with pytest.raises(ValueError, match="schema version 9"):
        OptimizerComponent(one.optimizer, one.module).load(stored, 9)


def test_optimizer_states_with_lists_of_tensors_resume_too() -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.LBFGS]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 1)
        return module, torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=2)

    def train(module: torch.nn.Module, optimizer: torch.optim.LBFGS) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (module(torch.arange(6.0).reshape(2, 3)) - 1).pow(2).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    module, optimizer = build()
    train(module, optimizer)
    weights = ModuleComponent(module).state()
    weights = ComponentState({name: t.clone() for name, t in weights.tensors.items()})
    state = OptimizerComponent(optimizer, module).state()
    assert any("/old_dirs/" in name for name in state.tensors)
    state = ComponentState({name: t.clone() for name, t in state.tensors.items()}, state.values)
    train(module, optimizer)
    other, resumed = build()
    ModuleComponent(other).load(weights, 1)
    OptimizerComponent(resumed, other).load(state, 1)
    train(other, resumed)
    assert_equal_states(dict(module.state_dict()), dict(other.state_dict()))


def test_every_global_stream_goes_on_where_it_was() -> None:
    component = RngComponent()
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    state = component.state()
    expected = [random.gauss(0, 1), float(np.random.randn()), torch.rand(3).tolist()]  # noqa: NPY002
    component.load(state, 1)
    assert [random.gauss(0, 1), float(np.random.randn()), torch.rand(3).tolist()] == expected  # noqa: NPY002
    with pytest.raises(ValueError, match="no state of torch"):
        component.load(
            ComponentState({k: v for k, v in state.tensors.items() if k != "torch"}, state.values),
            1,
        )


def test_the_package_does_not_import_torch() -> None:
    script = "import sys, perdure.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
