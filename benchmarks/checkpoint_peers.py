"""What :mod:`benchmarks/checkpoint.py` measures: one way to save a state each, perdure first."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from perdure.checkpoint import (
    Checkpointer,
    CheckpointOptions,
    MemoryLedger,
    Registry,
    StagedInfo,
)
from perdure.checkpoint.torch_components import ModuleComponent, OptimizerComponent
from perdure.core.clock import SystemClock
from perdure.core.events import ignore_events
from perdure.core.faults import FaultPlan, FaultPoint
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.storage import PosixStorage

DEADLINE_S = 600.0
TENSORS = 24


class State:
    """A module of equal layers and an AdamW with its moments: a third of the bytes each."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        elements = max(1, size // (3 * TENSORS * 4))
        self.module = torch.nn.ParameterDict(
            {f"layer{i}": torch.randn(elements) for i in range(TENSORS)}
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        for parameter in self.module.parameters():
            parameter.grad = torch.randn(elements)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.bytes = 3 * TENSORS * elements * 4

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name, live."""
        tensors = {f"model.{name}": value.detach() for name, value in self.module.items()}
        for name, value in self.module.items():
            held = self.optimizer.state[value]
            tensors |= {f"{key}.{name}": held[key] for key in ("exp_avg", "exp_avg_sq")}
        return tensors


class Method(Protocol):
    """One way to save."""

    def save(self, directory: Path) -> Callable[[], None]:
        """Save below a new directory; what is returned waits for what goes on behind."""
        ...

    def durable_s(self) -> float | None:
        """When the last save's bytes were durable, if that is before it was complete."""
        ...

    def close(self) -> None: ...


class Perdure:
    """The engine. Complete = committed, everything read back from the disk before."""

    def __init__(self, state: State, directory: Path, writer: Any) -> None:
        registry = Registry(["policy", "optimizer"])
        registry.register("policy", ModuleComponent(state.module), kind="model")
        registry.register(
            "optimizer", OptimizerComponent(state.optimizer, state.module), kind="optimizer"
        )
        faults = FaultPlan()
        faults.observers.append(self._reached)
        self._durable_s: float | None = None
        self._steps = 0
        self._engine = Checkpointer(
            PosixStorage(directory / "run"),
            registry=registry,
            ledger=MemoryLedger(),
            clock=SystemClock(),
            faults=faults,
            events=ignore_events,
            options=CheckpointOptions(keep=1, writer=writer),
        )
        self._engine.reserve()

    def save(self, directory: Path) -> Callable[[], None]:
        del directory
        self._steps += 1
        position = LogPosition(IncarnationNumber(1), 0, self._steps)
        info = StagedInfo(position, {"global_step": self._steps}, {}, "benchmark", "", "")
        name = CheckpointName("train", self._steps, IncarnationNumber(1))
        assert self._engine.stage(name, info=info)
        return self._wait

    def durable_s(self) -> float | None:
        return self._durable_s

    def close(self) -> None:
        self._engine.close()

    def _wait(self) -> None:
        assert self._engine.wait(DEADLINE_S)
        assert self._engine.last_error is None, self._engine.last_error

    def _reached(self, point: FaultPoint) -> None:
        if point is FaultPoint.CHECKPOINT_FILE_WRITTEN:
            self._durable_s = time.perf_counter()


class Blocking:
    """A function that writes one file, followed by fsync."""

    def __init__(self, state: State, write: Callable[[dict[str, torch.Tensor], Path], None]):
        self._state, self._write = state, write

    def save(self, directory: Path) -> Callable[[], None]:
        path = directory / "state"
        self._write(self._state.tensors(), path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        return _nothing

    def durable_s(self) -> float | None:
        return None

    def close(self) -> None:
        """Nothing is held."""


class Dcp:
    """torch.distributed.checkpoint; it syncs its files by itself."""

    def __init__(self, state: State, kind: str) -> None:
        import torch.distributed as dist

        self._state, self._kind = state, kind
        if not dist.is_initialized():
            self._store = tempfile.mkdtemp()
            dist.init_process_group(
                "gloo", init_method=f"file://{self._store}/store", rank=0, world_size=1
            )

    def save(self, directory: Path) -> Callable[[], None]:
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        tensors = self._state.tensors()
        writer = dcp.FileSystemWriter(directory / "dcp", sync_files=True)
        if self._kind == "sync":
            dcp.save(tensors, storage_writer=writer)
            return _nothing
        kind = AsyncCheckpointerType.THREAD
        if self._kind == "process":
            kind = AsyncCheckpointerType.PROCESS
        future = dcp.async_save(tensors, storage_writer=writer, async_checkpointer_type=kind)
        return lambda: _result(future)

    def durable_s(self) -> float | None:
        return None

    def close(self) -> None:
        """The process group serves the next kind."""


class Orbax:
    """Orbax's asynchronous checkpointer over numpy arrays, with its own settings."""

    def __init__(self, state: State) -> None:
        import orbax.checkpoint as ocp

        self._state = state
        self._ocp = ocp
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(self, directory: Path) -> Callable[[], None]:
        arrays = {name: tensor.numpy() for name, tensor in self._state.tensors().items()}
        plain = {name: self._ocp.SaveArgs() for name in arrays}
        args = self._ocp.args.PyTreeSave(arrays, save_args=plain)
        self._checkpointer.save(directory / "orbax", args=args)
        return self._checkpointer.wait_until_finished

    def durable_s(self) -> float | None:
        return None

    def close(self) -> None:
        self._checkpointer.close()


def _torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(tensors, path)


def _safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)


def _result(future: Any) -> None:
    future.result()


def _nothing() -> None:
    """It was all done while the caller waited."""


BUILDERS: dict[str, Callable[[State, Path], Method]] = {
    "perdure process": lambda state, directory: Perdure(state, directory, "process"),
    "perdure thread": lambda state, directory: Perdure(state, directory, "thread"),
    "torch.save + fsync": lambda state, _: Blocking(state, _torch_save),
    "safetensors + fsync": lambda state, _: Blocking(state, _safetensors),
    "DCP sync": lambda state, _: Dcp(state, "sync"),
    "DCP async thread": lambda state, _: Dcp(state, "thread"),
    "DCP async process": lambda state, _: Dcp(state, "process"),
    "Orbax async": lambda state, _: Orbax(state),
}


@contextmanager
def built(name: str, state: State, root: Path) -> Iterator[Method | None]:
    """A method ready to save, or None if what it needs is not installed."""
    directory = root / name.replace(" ", "-")
    directory.mkdir()
    try:
        method = BUILDERS[name](state, directory)
    except ImportError:
        yield None
        return
    try:
        yield method
    finally:
        method.close()
        shutil.rmtree(directory)
