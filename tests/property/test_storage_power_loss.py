"""The power-loss model keeps what was promised durable and loses nothing else by accident.

A workload runs on the storage and beside it on a model: for every path the contents a crash may
show. What is synced narrows them to one; a started change widens them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.core.storage_api import AppendFile
from perdure.storage import CrashMode, MemoryStorage, PowerLost

Content = bytes | None
DIRS = ("", "d")
PATHS = ("p", "q", "d/p", "d/q")
LOGS = ("log0", "d/log1")


@dataclass
class Promises:
    """What may be found after a crash at this moment."""

    now: dict[str, bytes] = field(default_factory=dict)
    possible: dict[str, set[Content]] = field(default_factory=lambda: defaultdict(lambda: {None}))
    synced: dict[str, bytes] = field(default_factory=dict)
    written: dict[str, bytes] = field(default_factory=dict)

    def start(self, path: str, content: Content) -> None:
        self.possible[path].add(content)

    def done(self, path: str, content: Content) -> None:
        self.possible[path].add(content)
        self.now.pop(path, None)
        if content is not None:
            self.now[path] = content

    def dir_synced(self, directory: str) -> None:
        for path in PATHS:
            if _directory(path) == directory:
                self.possible[path] = {self.now.get(path)}

    def check(self, found: MemoryStorage) -> None:
        files = found.files()
        for path in PATHS:
            assert files.get(path) in self.possible[path]
        for path, synced in self.synced.items():
            assert files[path].startswith(synced)
            assert len(files[path]) <= len(self.written[path])
        for path in found.list("") + [f"d/{name}" for name in found.list("d")]:
            assert path in {*PATHS, *LOGS, "d"}


Step = tuple[str, ...]
steps_strategy = st.lists(
    st.one_of(
        st.tuples(st.just("atomic"), st.sampled_from(PATHS)),
        st.tuples(st.just("exclusive"), st.sampled_from(PATHS)),
        st.tuples(st.just("remove"), st.sampled_from(PATHS)),
        st.tuples(st.just("rename"), st.sampled_from(PATHS), st.sampled_from(PATHS)),
        st.tuples(st.just("sync_dirs")),
        st.tuples(st.just("append"), st.sampled_from(LOGS)),
        st.tuples(st.just("sync"), st.sampled_from(LOGS)),
        st.tuples(st.just("sync_file"), st.sampled_from(LOGS)),
    ),
    max_size=14,
)


class Workload:
    """Runs steps on a storage and keeps the promises beside it."""

    def __init__(self, storage: MemoryStorage) -> None:
        self.storage = storage
        self.promises = Promises()
        self.logs: dict[str, AppendFile] = {}

    def run(self, steps: list[Step]) -> None:
        self.storage.make_dirs("d")
        for number, (kind, *paths) in enumerate(steps):
            getattr(self, f"_{kind}")(*paths, number=number)

    def _atomic(self, path: str, *, number: int) -> None:
        value = b"atomic%d" % number
        self.promises.start(path, value)
        self.storage.write_atomic(path, value)
        self.promises.done(path, value)
        self.promises.dir_synced(_directory(path))

    def _exclusive(self, path: str, *, number: int) -> None:
        value = b"exclusive%d" % number
        free = path not in self.promises.now
        if free:
            self.promises.start(path, value)
        assert self.storage.create_exclusive(path, value) is free
        if free:
            self.promises.done(path, value)
        self.promises.dir_synced(_directory(path))

    def _remove(self, path: str, *, number: int) -> None:
        self.promises.start(path, None)
        self.storage.remove(path)
        self.promises.done(path, None)

    def _rename(self, source: str, target: str, *, number: int) -> None:
        value = self.promises.now.get(source)
        if value is None or source == target:
            return
        self.promises.start(target, value)
        self.promises.start(source, None)
        self.storage.rename(source, target)
        self.promises.done(source, None)
        self.promises.done(target, value)
        if _directory(source) != _directory(target):
            self._sync_dirs(number=number)

    def _sync_dirs(self, *, number: int) -> None:
        for directory in DIRS:
            self.storage.sync_dir(directory)
        for directory in DIRS:
            self.promises.dir_synced(directory)

    def _append(self, path: str, *, number: int) -> None:
        data = bytes([number]) * (1 + 331 * number)
        promises = self.promises
        promises.written[path] = promises.written.get(path, b"") + data
        if path not in self.logs:
            self.logs[path] = self.storage.create_append(path)
            promises.synced[path] = b""
        self.logs[path].append([data])

    def _sync(self, path: str, *, number: int) -> None:
        if path in self.logs:
            self.logs[path].sync()
            self.promises.synced[path] = self.promises.written[path]

    def _sync_file(self, path: str, *, number: int) -> None:
        if path in self.logs:
            self.storage.sync_file(path)
            self.promises.synced[path] = self.promises.written[path]


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def _crashes(storage: MemoryStorage) -> Iterator[MemoryStorage]:
    yield from storage.crash_states()
    for seed in range(4):
        yield storage.crash(seed=seed)


@given(steps=steps_strategy, lost_after=st.integers(0, 60))
@settings(max_examples=120, deadline=None)
def test_what_was_synced_survives_any_crash_at_any_step(steps: list[Step], lost_after: int) -> None:
    workload = Workload(MemoryStorage())
    workload.storage.fail_after = lost_after
    with contextlib.suppress(PowerLost):
        workload.run(steps)
    for found in _crashes(workload.storage):
        workload.promises.check(found)


@given(steps=steps_strategy, lost_after=st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_a_killed_process_leaves_everything_written(steps: list[Step], lost_after: int) -> None:
    workload = Workload(MemoryStorage())
    workload.storage.fail_after = lost_after
    with contextlib.suppress(PowerLost):
        workload.run(steps)
    left = workload.storage.process_kill()
    assert left.files() == workload.storage.files()
    for found in _crashes(left):
        workload.promises.check(found)


@given(steps=steps_strategy)
@settings(max_examples=40, deadline=None)
def test_nothing_found_after_a_crash_is_lost_in_the_next(steps: list[Step]) -> None:
    workload = Workload(MemoryStorage())
    workload.run(steps)
    found = workload.storage.crash(seed=1)
    for again in _crashes(found):
        assert again.files() == found.files()


@given(steps=steps_strategy)
@settings(max_examples=40, deadline=None)
def test_everything_kept_is_everything(steps: list[Step]) -> None:
    workload = Workload(MemoryStorage())
    workload.run(steps)
    found = workload.storage.crash(CrashMode.EVERYTHING_KEPT)
    assert found.files() == workload.storage.files()


@given(steps=steps_strategy, seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_seed_repeats_a_crash(steps: list[Step], seed: int) -> None:
    crashes: list[dict[str, bytes]] = []
    for _ in range(2):
        workload = Workload(MemoryStorage(seed=3))
        workload.run(steps)
        crashes.append(workload.storage.crash(seed=seed).files())
    assert crashes[0] == crashes[1]
