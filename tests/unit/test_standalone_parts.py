"""Every type of part goes through a save and comes back in a part that was made anew."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from standalone_loops import StillClock

from perdure import CheckpointEngine
from perdure.core.errors import ConfigError
from perdure.storage import MemoryStorage

lr = torch.optim.lr_scheduler

GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "pcg64": (lambda: np.random.default_rng(3), lambda g: g.random(3).tolist()),
    "mt19937": (
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda g: g.standard_normal(3).tolist(),
    ),
    "philox": (lambda: np.random.Generator(np.random.Philox(3)), lambda g: g.random(3).tolist()),
    "sfc64": (lambda: np.random.Generator(np.random.SFC64(3)), lambda g: g.integers(9, size=3)),
    "legacy": (lambda: np.random.RandomState(3), lambda g: g.normal(size=3).tolist()),
    "python": (lambda: random.Random(3), lambda g: [g.gauss(0, 1) for _ in range(3)]),
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g)),
}

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr.StepLR(o, 3, 0.5),
    "multi_step": lambda o: lr.MultiStepLR(o, [2, 7]),
    "constant": lambda o: lr.ConstantLR(o, 0.3, total_iters=4),
    "exponential": lambda o: lr.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 20),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 4, 2),
    "polynomial": lambda o: lr.PolynomialLR(o, 12, 2.0),
    "one_cycle": lambda o: lr.OneCycleLR(o, 0.3, total_steps=20),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=4), lr.CosineAnnealingLR(o, 10)], [4]
    ),
    "chained": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.1, total_iters=2), lr.ExponentialLR(o, 0.9)]
    ),
}


def run(
    storage: MemoryStorage, parts: dict[str, Any], body: Callable[[], object], steps: int
) -> None:
    """From wherever the run is to ``steps``."""
    engine = CheckpointEngine("run", storage=storage, clock=StillClock())
    engine.register(**parts)
    for _ in engine.steps(steps, change_total=True):
        body()


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_go_on_with_their_next_number(name: str) -> None:
    make, draw = GENERATORS[name]
    storage, reference = MemoryStorage(), make()
    expected = [draw(reference) for _ in range(4)]
    for steps in (2, 4):
        generator = make()
        drawn: list[Any] = []
        run(
            storage, {"generator": generator}, lambda g=generator, d=drawn: d.append(draw(g)), steps
        )
        assert str(drawn) == str(expected[steps - 2 : steps])


def trained(
    make: Callable[[torch.optim.Optimizer], Any],
) -> tuple[dict[str, Any], Callable[[], None]]:
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = make(optimizer)

    def body() -> None:
        optimizer.zero_grad()
        module(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        if isinstance(schedule, lr.ReduceLROnPlateau):
            schedule.step(1.0)
        else:
            schedule.step()

    return {"module": module, "optimizer": optimizer, "schedule": schedule}, body


@pytest.mark.parametrize("name", [*SCHEDULES, "plateau"])
@pytest.mark.parametrize("at", [3, 6])
def test_schedules_go_on_with_their_next_rate(name: str, at: int) -> None:
    make = SCHEDULES.get(name, lambda o: lr.ReduceLROnPlateau(o, patience=1))
    reference, body = trained(make)
    for _ in range(12):
        body()
    storage = MemoryStorage()
    for steps in (at, 12):
        parts, body = trained(make)
        run(storage, parts, body, steps)
    assert torch.equal(parts["module"].weight, reference["module"].weight)
    rates = [group["lr"] for group in parts["optimizer"].param_groups]
    assert rates == [group["lr"] for group in reference["optimizer"].param_groups]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda o: lr.CosineAnnealingLR(o, 20), lambda o: lr.CosineAnnealingLR(o, 30)),
        (lambda o: lr.StepLR(o, 3), lambda o: lr.StepLR(o, 4)),
        (lambda o: lr.MultiStepLR(o, [2, 7]), lambda o: lr.MultiStepLR(o, [2, 8])),
        (
            lambda o: lr.OneCycleLR(o, 0.3, total_steps=20),
            lambda o: lr.OneCycleLR(o, 0.3, total_steps=21),
        ),
        (
            SCHEDULES["sequential"],
            lambda o: lr.SequentialLR(
                o, [lr.LinearLR(o, 0.1, total_iters=4), lr.CosineAnnealingLR(o, 11)], [4]
            ),
        ),
        (lambda o: lr.StepLR(o, 3), lambda o: lr.ExponentialLR(o, 0.9)),
    ],
)
def test_a_changed_schedule_is_refused(before: Any, after: Any) -> None:
    storage = MemoryStorage()
    parts, body = trained(before)
    run(storage, parts, body, 2)
    parts, body = trained(after)
    with pytest.raises(ConfigError, match="component schedule: the stored state does not fit"):
        run(storage, parts, body, 4)


def test_a_gradient_scaler_keeps_its_scale() -> None:
    storage = MemoryStorage()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    module = torch.nn.Linear(1, 1)

    def body() -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler.scale(module(torch.full((1, 1), float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    run(storage, {"scaler": scaler}, body, 1)
    assert scaler.get_scale() == 4.0
    fresh = torch.amp.GradScaler("cpu", init_scale=8.0)
    run(storage, {"scaler": fresh}, lambda: None, 2)
    assert fresh.get_scale() == 4.0
    with pytest.raises(ConfigError, match="off in the other"):
        run(storage, {"scaler": torch.amp.GradScaler("cpu", enabled=False)}, lambda: None, 3)


def test_shared_parameters_are_one() -> None:
    storage = MemoryStorage()

    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        trunk = torch.nn.Linear(2, 2)
        policy = torch.nn.Sequential(trunk, torch.nn.Linear(2, 1))
        value = torch.nn.Sequential(trunk, torch.nn.Linear(2, 1))
        parameters = {id(p): p for m in (policy, value) for p in m.parameters()}
        optimizer = torch.optim.Adam(parameters.values(), lr=0.1)
        return {"policy": policy, "value": value, "optimizer": optimizer}

    def train(parts: dict[str, Any]) -> None:
        x = torch.ones(1, 2)
        parts["optimizer"].zero_grad()
        (parts["policy"](x) + parts["value"](x)).square().sum().backward()
        parts["optimizer"].step()

    reference = make()
    for _ in range(4):
        train(reference)
    for steps in (2, 4):
        parts = make()
        run(storage, parts, lambda parts=parts: train(parts), steps)
    assert parts["policy"][0] is parts["value"][0]
    for name in ("policy", "value"):
        for key, tensor in reference[name].state_dict().items():
            assert torch.equal(parts[name].state_dict()[key], tensor)


def test_a_script_without_torch_has_its_global_generators(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import random, sys\n"
        "import numpy as np\n"
        "from perdure import CheckpointEngine, every\n"
        "random.seed(0); np.random.seed(0)\n"
        "drawn = []\n"
        f"engine = CheckpointEngine({str(tmp_path)!r} + '/' + sys.argv[1], save=every(steps=2))\n"
        "engine.register(drawn=drawn, rng='all')\n"
        "for step in engine.steps(6):\n"
        "    if step == int(sys.argv[2]):\n"
        "        break\n"
        "    drawn.append((random.gauss(0, 1), float(np.random.normal())))\n"
        "assert 'torch' not in sys.modules\n"
        "print(drawn)\n"
    )

    def said(*arguments: str) -> str:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    said("run", "5")
    assert said("run", "9") == said("reference", "9")
