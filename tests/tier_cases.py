"""A small run with a real log and real checkpoints, its remote tier, and what a pull must find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import experience_records as make
import numpy as np
from obstore.store import MemoryStore
from replay_cases import rows, small_ring, values_of

from perdure.checkpoint import (
    ArraysComponent,
    Checkpointer,
    CheckpointOptions,
    Registry,
    StagedInfo,
    ValuesComponent,
    decode_manifest,
)
from perdure.checkpoint.keep import Keep
from perdure.checkpoint.tier import (
    Head,
    ObjectStore,
    ObstoreObjects,
    RemoteTier,
    RetryPolicy,
    TierContext,
    TierOptions,
    pull,
    push,
    read_head,
)
from perdure.checkpoint.tier.objects import Bytes
from perdure.checkpoint.tier.pieces import segments_of
from perdure.core.clock import Clock, ManualClock
from perdure.core.events import format_event, ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, GroupId, LogPosition
from perdure.core.inline_executor import InlineExecutor
from perdure.core.record_types import GroupOutcome
from perdure.core.records import Checkpointed, Collect
from perdure.core.storage_api import Storage
from perdure.experience import (
    ExperienceStore,
    LogOptions,
    RunInfo,
    claim_experience,
    create_run,
)
from perdure.runtime.ledger import LogLedger
from perdure.storage import MemoryStorage

RUN_ID = "f" * 32
WAIT_S = 60.0
PIECE_BYTES = 4096
WEIGHTS = 3000
"""Numbers of the model; with their header they fill several pieces."""
REPLAY_ROWS, ROWS_PER_STEP = 12, 5
"""The ring holds a little more than two steps, in segments of four rows."""
OPTIONS = TierOptions(
    piece_bytes=PIECE_BYTES, retry=RetryPolicy(attempts=4, first_delay_s=0.01, longest_delay_s=0.05)
)


class Said:
    """An event sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def __call__(self, name: str, fields: dict[str, object]) -> None:
        assert format_event(name, fields)
        self.events.append((name, fields))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def memory_objects() -> ObstoreObjects:
    return ObstoreObjects(MemoryStore())


def weights_at(step: int) -> np.ndarray[Any, Any]:
    """The whole state of a step is a function of it."""
    return (np.arange(WEIGHTS, dtype=np.float32) * (step + 1)).astype(np.float32)


class FlushedLedger(LogLedger):
    """Commits at once: the log of these runs has no thread of its own."""

    def commit(self, record: Checkpointed) -> Future[LogPosition]:
        return self._flushed(super().commit(record))

    def collect(self, record: Collect) -> Future[LogPosition]:
        return self._flushed(super().collect(record))

    def _flushed(self, future: Future[LogPosition]) -> Future[LogPosition]:
        self._started().flush(WAIT_S)
        return future


class TieredRun:
    """One incarnation of a run whose model is a function of the step; a step trains one group."""

    def __init__(
        self,
        storage: Storage,
        *,
        keep: int | Keep = 2,
        clock: Clock | None = None,
        take_over: bool = False,
        segment_bytes: int = 1 << 12,
    ) -> None:
        self.storage = storage
        self.clock = clock or ManualClock()
        create_run(storage, RunInfo(RUN_ID, 1.0))
        self.claimed = claim_experience(
            storage,
            clock=self.clock,
            faults=NoFaults(),
            take_over=take_over,
            options=LogOptions(segment_bytes=segment_bytes, threaded=False),
        )
        self.incarnation = self.claimed.incarnation
        self.weights = {"w": np.zeros(WEIGHTS, np.float32)}
        self.counters = {"global_step": 0}
        self.replay = small_ring(capacity=REPLAY_ROWS)
        self.ledger = FlushedLedger(self.claimed.state)
        self.engine = Checkpointer(
            storage,
            registry=self._registry(),
            ledger=self.ledger,
            clock=self.clock,
            faults=NoFaults(),
            events=ignore_events,
            options=CheckpointOptions(keep=keep),
            executor=InlineExecutor(),
        )
        self.restored_step = self._restore()
        self.step = int(self.claimed.state.last_step)
        """Steps trained; those after the restored checkpoint come from the log."""
        assert self.step >= self.restored_step
        self.store: ExperienceStore = self.claimed.start()
        self.ledger.start(self.store)

    def train(self) -> None:
        """One step: a group is generated, taken and trained, all acknowledged."""
        self.step += 1
        group = GroupId(self.step - 1)
        self.store.submit([make.submitted(group, step=self.step)])
        for index in range(2):
            self.store.session_done(make.trajectory(group, index), reward=float(index))
        self.store.settle(group, GroupOutcome.FINISHED)
        self.store.take(make.update_id(self.step), groups=[group], config_digest="c")
        self.store.append(make.step_done(self.step))
        self.store.flush(WAIT_S)

    def save(self) -> str:
        """A committed checkpoint of this step; returns its directory."""
        self.weights["w"][:] = weights_at(self.step)
        self.replay.append(rows(self.replay.total, ROWS_PER_STEP * self.step - self.replay.total))
        self.counters["global_step"] = self.step
        name = CheckpointName("train", self.step, self.incarnation)
        info = StagedInfo(
            position=self.store.position,
            clocks={"global_step": self.step},
            lineage={"run_id": RUN_ID, "incarnation": self.incarnation, "parent": 0},
            algorithm="grpo",
            config_digest="c",
            dataset_digest="d",
        )
        assert self.engine.stage(name, info=info)
        assert self.engine.wait(WAIT_S)
        assert self.engine.last_error is None
        return name.directory

    def train_and_save(self) -> str:
        self.train()
        return self.save()

    def push(self, objects: ObjectStore, **more: Any) -> Head:
        return push(
            self.storage,
            objects,
            ledger=self.ledger,
            incarnation=self.incarnation,
            context=context(self.clock, **more),
        )

    def tier(self, objects: ObjectStore, **more: Any) -> RemoteTier:
        tier = RemoteTier(
            self.storage,
            objects,
            ledger=self.ledger,
            incarnation=self.incarnation,
            context=context(self.clock, **more),
        )
        self.engine.ship_to(tier)
        return tier

    def close(self) -> None:
        self.engine.close()
        self.store.close("done")

    def release(self) -> None:
        """Let go of the run without an orderly end."""
        self.claimed.release()

    def _registry(self) -> Registry:
        registry = Registry(["policy"])
        registry.register("policy", ArraysComponent(self.weights), kind="model")
        registry.register("replay", self.replay, kind="experience")
        registry.register("counters", ValuesComponent(self.counters), kind="counters")
        return registry

    def _restore(self) -> int:
        if not self.claimed.state.checkpoints:
            return 0
        self.engine.restore(self.engine.choose(self.ledger.committed()))
        step = int(self.counters["global_step"])
        np.testing.assert_array_equal(self.weights["w"], weights_at(step))
        end = ROWS_PER_STEP * step
        assert values_of(self.replay) == list(range(max(0, end - REPLAY_ROWS), end))
        return step


def resumed_elsewhere(objects: ObjectStore, **more: Any) -> TieredRun:
    """The run as an empty machine gets it: pulled, claimed, its checkpoint restored."""
    storage = MemoryStorage()
    report = pull(storage, objects, context=context())
    # Its clock is another one, and so is its claim.
    run = TieredRun(storage, clock=ManualClock(2_000_000.0), **more)
    assert run.engine.verify(report.checkpoint).ok
    return run


def experience_of(run: TieredRun) -> dict[str, Any]:
    """All that the log says, comparable between machines."""
    return make.comparable(run.claimed.state, places=False)


def context(clock: Clock | None = None, **more: Any) -> TierContext:
    """A context with small pieces and short waits."""
    return TierContext(clock or ManualClock(), **{"options": OPTIONS, **more})


def check_no_leftovers(objects: ObjectStore) -> None:
    """The remote tier holds the checkpoints of its pointer and their segments, nothing else."""
    head = read_head(objects)
    assert not head.dropped
    named: set[str] = set()
    for one in head.checkpoints:
        where = f"checkpoints/{one.directory}/manifest.json"
        named |= set(segments_of(decode_manifest(objects.read(where), where=where)))
    kept = {one.directory for one in head.checkpoints}
    assert {key.split("/")[1] for key in objects.list("checkpoints")} == kept
    assert {key.rpartition("/")[0] for key in objects.list("segments")} == named
    assert named


class Died(Exception):
    """The process that ships ended here."""


class BreakingObjects:
    """An object store that breaks at chosen requests, before or after they take effect.

    Args:
        objects: The store behind it.
        breaks: Number of a request (from 0) → what is raised, and whether the request was done.
    """

    def __init__(
        self, objects: ObjectStore, breaks: Mapping[int, tuple[Exception, bool]] | None = None
    ) -> None:
        self.objects = objects
        self.breaks = dict(breaks or {})
        self.requests: list[tuple[str, str]] = []
        self.broke = 0

    def create(self, key: str, data: Bytes) -> bool:
        return self._do("create", key, lambda: self.objects.create(key, data))

    def overwrite(self, key: str, data: Bytes) -> None:
        self._do("overwrite", key, lambda: self.objects.overwrite(key, data))

    def swap(self, key: str, data: Bytes, *, expected: str | None) -> str | None:
        return self._do("swap", key, lambda: self.objects.swap(key, data, expected=expected))

    def read(self, key: str) -> bytes:
        return self._do("read", key, lambda: self.objects.read(key))

    def read_into(self, key: str, out: memoryview) -> bool:
        return self._do("read_into", key, lambda: self.objects.read_into(key, out))

    def fingerprint(self, key: str, *, chunk_bytes: int) -> tuple[int, tuple[str, ...]]:
        def call() -> tuple[int, tuple[str, ...]]:
            return self.objects.fingerprint(key, chunk_bytes=chunk_bytes)

        return self._do("fingerprint", key, call)

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        return self._do("read_tagged", key, lambda: self.objects.read_tagged(key))

    def list(self, prefix: str) -> dict[str, int]:
        return self._do("list", prefix, lambda: self.objects.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self._do("delete", keys[0], lambda: self.objects.delete(keys))

    def _do(self, action: str, key: str, call: Callable[[], Any]) -> Any:
        number = len(self.requests)
        self.requests.append((action, key))
        if number not in self.breaks:
            return call()
        self.broke += 1
        error, done = self.breaks[number]
        if done:
            with contextlib.suppress(FileNotFoundError):
                call()
        raise error
