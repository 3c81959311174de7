"""Reports of users of other engines about files that were taken for something they were not.

The letters and numbers are those of the collected reports; each test says what used to go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from standalone_loops import Script, committed, crash_at, crashed, uninterrupted

from perdure import every
from perdure.checkpoint import ReplayArrays
from perdure.core import sealed_json
from perdure.storage import FaultyStorage, MemoryStorage, StorageFault, StorageFaultKind

NEWEST = "step-00000020-1"


def resumed(storage: MemoryStorage) -> int:
    """The step that a script goes on from; in the end it is as if nothing had happened."""
    script = Script(storage.open_as_new_process())
    script.run()
    assert script.state() == uninterrupted()
    assert script.engine.restored_from is not None
    assert script.engine.restored_from.skipped == ()
    return script.engine.restored_from.step


def test_10_counters_belong_to_the_save_not_to_the_log_behind_it() -> None:
    """Saved in epoch 2 and killed in epoch 4, a run went on in 4 with the weights of 2."""
    storage = MemoryStorage()
    script = Script(storage, save=every(steps=10_000))

    def each(step: int) -> None:
        if step == 20:
            script.engine.save()
        crash_at(39)(step)

    with pytest.raises(Exception, match="^$"):
        script.run(each=each)
    assert resumed(storage) == 20


def absent(storage: MemoryStorage) -> None:
    storage.remove("checkpoints/latest.json")


def empty(storage: MemoryStorage) -> None:
    storage.damage("checkpoints/latest.json", b"")


def older(storage: MemoryStorage) -> None:
    pointer = {"format": 1, "directory": "step-00000010-1", "manifest_digest": ""}
    storage.write_atomic("checkpoints/latest.json", sealed_json.encode(pointer))


def newer(storage: MemoryStorage) -> None:
    pointer = {"format": 1, "directory": "step-00000030-1", "manifest_digest": ""}
    storage.write_atomic("checkpoints/latest.json", sealed_json.encode(pointer))


@pytest.mark.parametrize("change", [absent, empty, older, newer])
def test_a3_4_the_pointer_decides_nothing(change: Callable[[MemoryStorage], None]) -> None:
    """Zero bytes after a power cut, or a pointer that moved before the files: training anew."""
    storage = MemoryStorage()
    crashed(storage, 25, keep=9)
    change(storage)
    assert resumed(storage) == 20


def test_a3_6_a_quota_met_while_the_pointer_is_written_costs_no_checkpoint() -> None:
    """10,000 steps were repeated, and then the directory was there already."""
    inner = MemoryStorage()
    fault = StorageFault(StorageFaultKind.NO_SPACE, 2, path_contains="latest.json")
    storage = FaultyStorage(inner, plan=[fault])
    crashed(storage, 25, keep=9)  # type: ignore[arg-type]
    assert sum(storage.fired.values()) == 1
    assert resumed(inner) == 20


@pytest.mark.parametrize("files", [{}, {"state.msgpack": b"half"}, "without its manifest"])
def test_a3_8_the_newest_name_is_not_the_newest_checkpoint(files: Any) -> None:
    """Half written when the job died, it was what everything resumed from."""
    storage = MemoryStorage()
    crashed(storage, 25, keep=9)
    if isinstance(files, str):
        root = f"checkpoints/{NEWEST}"
        whole = {p[len(root) + 1 :]: d for p, d in storage.files().items() if p.startswith(root)}
        files = {path: data for path, data in whole.items() if path != "manifest.json"}
        assert files
    for path, data in files.items():
        target = f"checkpoints/step-00000024-1/{path}"
        storage.make_dirs(target.rpartition("/")[0])
        storage.write_atomic(target, data)
    storage.make_dirs("checkpoints/step-00000024-1")
    assert resumed(storage) == 20
    assert "step-00000024-1" not in storage.list("checkpoints")


def test_a3_8_a_whole_one_that_was_never_committed_does_not_count() -> None:
    storage = MemoryStorage()
    crashed(storage, 25, keep=9)
    for path, data in storage.files().items():
        if NEWEST in path:
            target = path.replace(NEWEST, "step-00000024-1")
            storage.make_dirs(target.rpartition("/")[0])
            storage.write_atomic(target, data)
    assert resumed(storage) == 20


def test_a_temporary_file_is_neither_the_newest_nor_one_of_those_kept() -> None:
    """``checkpoint_temp`` sorted behind every number: three tries, then training from scratch."""
    storage = MemoryStorage()
    crashed(storage, 25, keep=2)
    for name in (".tmp-manifest.json", ".tmp-state.msgpack"):
        storage.write_atomic(f"checkpoints/{name}", b"torn")
        storage.write_atomic(f"checkpoints/{NEWEST}/{name}", b"torn")
    assert resumed(storage) == 20
    assert committed(storage) == [20, 30, 40]


def test_43_views_of_one_array_stay_views() -> None:
    """K17: buffers of several environments came apart from what they share: base 1, view 0."""

    class Owner:
        def __init__(self) -> None:
            self.pos, self.full = 0, False
            self.base = np.zeros((8, 2), np.float32)
            self.views = [self.base[:4], self.base[4:]]

    def make(storage: MemoryStorage) -> tuple[Script, Owner]:
        owner, script = Owner(), Script(storage)
        script.engine.register(replay=ReplayArrays({"base": owner.base}, owner))
        return script, owner

    storage = MemoryStorage()
    script, owner = make(storage)

    def each(step: int) -> None:
        owner.base[owner.pos] = step
        owner.pos = (owner.pos + 1) % 8
        owner.full |= owner.pos == 0

    script.run(11, each=each)
    again, fresh = make(storage)
    again.run(11)
    assert (fresh.pos, fresh.full) == (3, True)
    assert [view[0, 0] for view in fresh.views] == [9, 5]
    fresh.base[0] = 1
    assert fresh.views[0][0, 0] == 1
