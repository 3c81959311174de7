"""A small run whose state is a replay, over any storage."""

from __future__ import annotations

import json
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import numpy as np

from perdure.checkpoint import (
    Checkpointer,
    CheckpointOptions,
    Registry,
    ReplayRing,
    RingOptions,
    StagedInfo,
    ValuesComponent,
)
from perdure.core.clock import ManualClock
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.core.inline_executor import InlineExecutor
from perdure.core.records import Checkpointed, Collect
from perdure.core.storage_api import Storage

COLUMNS: dict[str, Any] = {"obs": ("u1", (3,)), "value": ("i8", ()), "done": ("?", ())}


def rows(first: int, count: int) -> dict[str, np.ndarray[Any, Any]]:
    """A batch whose contents say which rows they are."""
    numbers = np.arange(first, first + count)
    return {
        "obs": np.stack([numbers % 251, numbers % 13, numbers % 7], 1).astype(np.uint8),
        "value": numbers,
        "done": numbers % 3 == 0,
    }


def values_of(ring: ReplayRing) -> list[int]:
    """The ``value`` of every row, oldest first, the other columns checked against it."""
    found: list[int] = []
    for block in ring.blocks():
        count = len(block["value"])
        for name, expected in rows(int(block["value"][0]) if count else 0, count).items():
            np.testing.assert_array_equal(block[name], expected)
        found += block["value"].tolist()
    return found


class DiskLedger:
    """A ledger that survives with the disk it lies on: one exclusive file per record."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        storage.make_dirs("ledger")

    def commit(self, record: Checkpointed) -> Future[Any]:
        return self._append(
            {
                "directory": record.directory,
                "step": record.step,
                "digest": record.manifest_digest,
                "offset": record.position.offset,
            }
        )

    def collect(self, record: Collect) -> Future[Any]:
        return self._append({"collect": list(record.directories)})

    def committed(self) -> list[Checkpointed]:
        kept: dict[str, Checkpointed] = {}
        for item in self._items():
            for directory in item.get("collect", ()):
                kept.pop(directory, None)
            if "directory" in item:
                kept[item["directory"]] = Checkpointed(
                    directory=item["directory"],
                    phase="train",
                    step=item["step"],
                    manifest_digest=item["digest"],
                    position=LogPosition(IncarnationNumber(1), 0, item["offset"]),
                )
        return list(kept.values())

    def collected(self) -> list[str]:
        return [directory for item in self._items() for directory in item.get("collect", ())]

    def _items(self) -> list[dict[str, Any]]:
        names = self._storage.list("ledger")
        return [json.loads(self._storage.read(f"ledger/{name}")) for name in names]

    def _append(self, item: dict[str, Any]) -> Future[Any]:
        number = len(self._storage.list("ledger"))
        assert self._storage.create_exclusive(
            f"ledger/{number:06d}.json", json.dumps(item).encode()
        )
        future: Future[Any] = Future()
        future.set_result(None)
        return future


class ReplayRun:
    """An engine over one replay and a counter."""

    def __init__(
        self,
        storage: Storage,
        replay: Any = None,
        *,
        keep: int = 2,
        incarnation: int = 1,
        faults: Any = None,
    ) -> None:
        self.storage = storage
        self.incarnation = IncarnationNumber(incarnation)
        self.replay = ReplayRing(12, COLUMNS) if replay is None else replay
        self.counters = {"global_step": 0}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.ledger = DiskLedger(storage)
        self.registry = Registry(["replay"])
        self.registry.register("replay", self.replay, kind="experience")
        self.registry.register("counters", ValuesComponent(self.counters), kind="counters")
        self.engine = Checkpointer(
            storage,
            registry=self.registry,
            ledger=self.ledger,
            clock=ManualClock(),
            faults=faults or NoFaults(),
            events=lambda name, fields: self.events.append((name, fields)),
            options=CheckpointOptions(keep=keep),
            executor=InlineExecutor(),
        )

    def stage(self, step: int) -> bool:
        self.counters["global_step"] = step
        info = StagedInfo(
            position=LogPosition(self.incarnation, 0, step),
            clocks={"global_step": step},
            lineage={"run_id": "r", "incarnation": self.incarnation, "parent": 0},
            algorithm="dqn",
            config_digest="c",
            dataset_digest="d",
        )
        return self.engine.stage(CheckpointName("train", step, self.incarnation), info=info)

    def save(self, step: int) -> None:
        assert self.stage(step)
        assert self.engine.wait(5)

    def save_well(self, step: int) -> None:
        self.save(step)
        assert self.engine.last_error is None

    def restore(self, *, cold: Collection[str] = ()) -> int:
        choice = self.engine.choose(
            self.ledger.committed(), segments="nothing" if cold else "index"
        )
        self.engine.restore(choice, cold=cold)
        return choice.name.step

    def files(self) -> list[str]:
        return self.storage.list("segments/replay")


def small_ring(capacity: int = 12, rows_per_segment: int = 4, **options: Any) -> ReplayRing:
    """A ring of :data:`COLUMNS` (12 bytes a row) with small segments."""
    return ReplayRing(
        capacity, COLUMNS, options=RingOptions(segment_bytes=12 * rows_per_segment, **options)
    )
