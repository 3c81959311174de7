"""Ranks as threads of one process: a channel in memory, parts of arrays, a script on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from standalone_loops import Events

from perdure import CheckpointEngine, every
from perdure.checkpoint import CheckpointReader, Manifest, verify
from perdure.checkpoint.shares import RankPlace
from perdure.checkpoint.team import Team
from perdure.core.boxes import Box, box_on
from perdure.core.components import ComponentState, Shard
from perdure.experience import read_experience
from perdure.storage import MemoryStorage

TIMEOUT_S = 20.0
Array = np.ndarray[Any, Any]


class Messages:
    """What the ranks of one job say to each other."""

    def __init__(self) -> None:
        self._said: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.lose: Callable[[str], bool] = lambda key: False
        """Whether a message never arrives."""

    def post(self, key: str, data: bytes) -> None:
        with self._changed:
            if not self.lose(key):
                self._said[key] = data
            self._changed.notify_all()

    def take(self, key: str, *, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._said, timeout_s):
                raise TimeoutError(key)
            return self._said.pop(key)

    @property
    def unread(self) -> list[str]:
        return sorted(self._said)


class SpreadArrays:
    """Arrays cut along axes over the places of a mesh; this rank's parts of them."""

    schema_version = 1

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        place: RankPlace,
        *,
        mesh: Sequence[int] = (),
        cuts: Sequence[int | None] = (0,),
    ) -> None:
        self._shapes = dict(shapes)
        self._mesh = tuple(mesh) or (place.size,)
        self._cuts = cuts
        self._coordinate = tuple(int(i) for i in np.unravel_index(place.rank, self._mesh))
        self.parts = {name: np.zeros(self.box(name).sizes, np.float32) for name in self._shapes}

    def box(self, name: str) -> Box:
        return box_on(
            self._shapes[name], mesh=self._mesh, coordinate=self._coordinate, cuts=self._cuts
        )

    def fill(self, wholes: Mapping[str, Array]) -> None:
        for name, whole in wholes.items():
            shape = self._shapes[name]
            self.parts[name][...] = whole[self.box(name).within(Box.whole(shape))]

    def holds(self, wholes: Mapping[str, Array]) -> bool:
        return all(
            np.array_equal(self.parts[name], whole[self.box(name).within(Box.whole(whole.shape))])
            for name, whole in wholes.items()
        )

    def shard(self, name: str) -> Shard:
        repeated = [p for p, c in zip(self._coordinate, self._cuts, strict=True) if c is None]
        part, offsets = self.parts[name], self.box(name).offsets
        return Shard(self._shapes[name], offsets, part, stored=not any(repeated))

    def state(self) -> ComponentState:
        return ComponentState({name: self.shard(name) for name in self._shapes})

    def live_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
        return {name: self.shard(name) for name in shapes if name in self._shapes}

    def load(self, state: ComponentState, schema_version: int) -> None:
        for name, part in self.parts.items():
            stored = state.tensors[name]
            if tuple(stored.shape) != self._shapes[name]:
                raise ValueError(f"{name} is {stored.shape}, expected {self._shapes[name]}")
            part[...] = stored.data


SHAPES = {"w": (7, 3), "b": (5,), "one": (1, 2)}


class RankScript:
    """One rank of a script: after ``n`` steps every element is its first value plus ``n``."""

    def __init__(self, storage: Any, team: Team, **options: Any) -> None:
        self.place = team.place
        self.events = Events()
        self.model = SpreadArrays(SHAPES, team.place)
        self.model.fill(wholes(0))
        self.counters = {"steps": 0}
        self.generator = np.random.default_rng(100 + team.place.rank)
        self.drawn: list[float] = []
        random = options.pop("random", True)
        options = {"save": every(steps=2, budget=1.0), "events": self.events} | options
        self.engine = CheckpointEngine("run", storage=storage, process_group=team, **options)
        self.engine.register(model=self.model, counters=self.counters)
        if random:
            self.engine.register(generator=self.generator)

    def run(
        self, total: int | None, each: Callable[[RankScript, int], Any] = lambda *_: None
    ) -> RankScript:
        for step in self.engine.steps(total, change_total=True):
            for part in self.model.parts.values():
                part += 1
            self.counters["steps"] = step
            self.drawn.append(float(self.generator.random()))
            if each(self, step) is True:
                break
            # Every save is committed before the next one is due.
            assert self.engine._run is not None
            assert self.engine._run.saver.wait(TIMEOUT_S)
        return self


def wholes(steps: int) -> dict[str, Array]:
    """The arrays after so many steps."""
    return {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + steps
        for name, shape in SHAPES.items()
    }


def teams(size: int, *, timeout_s: float = TIMEOUT_S) -> tuple[list[Team], Messages]:
    messages = Messages()
    return [Team(RankPlace(rank, size), messages, timeout_s) for rank in range(size)], messages


def on_all_ranks(
    size: int, do: Callable[[Team], Any], *, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Call it on every rank at once; what it returned or raised, by rank."""
    together, _ = teams(size, timeout_s=timeout_s)

    def one(team: Team) -> Any:
        try:
            return do(team)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, together))


def run_ranks(
    storage: Any,
    size: int,
    *,
    total: int | None = 6,
    each: Callable[[RankScript, int], Any] = lambda *_: None,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> list[Any]:
    """A script on so many ranks; each rank's script, or what it raised."""
    return on_all_ranks(
        size,
        lambda team: RankScript(storage, team, **options).run(total, each),
        timeout_s=timeout_s,
    )


def newest(storage: MemoryStorage) -> CheckpointReader:
    """The last committed checkpoint, verified."""
    return CheckpointReader(storage, newest_manifest(storage))


def newest_manifest(storage: MemoryStorage) -> Manifest:
    state, _ = read_experience(storage)
    record = state.checkpoints[-1]
    report = verify(storage, record.directory, manifest_digest=record.manifest_digest)
    assert report.ok, report.reason
    assert report.manifest is not None
    return report.manifest
