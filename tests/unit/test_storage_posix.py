"""The real disk: failure paths, the order of system calls, locks and forks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.core.errors import StorageError
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.storage import PosixStorage

_SAID = {errno.ENOSPC: "free space", errno.EROFS: "remount", errno.EIO: "check the disk"}


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    made = PosixStorage(tmp_path / "run")
    made.make_dirs("")
    return made


def _failing(number: int) -> Callable[..., int]:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", sorted(_SAID))
def test_a_failed_append_abandons_the_file(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = storage.create_append("log")
    file.append([b"kept"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", _failing(number))
        with pytest.raises(StorageError, match=_SAID[number]) as caught:
            file.append([b"lost"])
    assert caught.value.where == "log"
    assert file.size == 4
    with pytest.raises(StorageError, match="abandoned"):
        file.append([b"more"])
    with pytest.raises(StorageError, match="abandoned"):
        file.sync()
    file.close()


def test_a_failed_sync_is_never_retried(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = storage.create_append("log")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", _failing(errno.EIO))
        with pytest.raises(StorageError, match="cannot sync: Input/output error"):
            file.sync()
    with pytest.raises(StorageError, match="abandoned"):
        file.sync()
    file.close()


def test_short_writes_are_continued(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.writev
    calls: list[int] = []

    def short(descriptor: int, pieces: list[bytes | memoryview]) -> int:
        calls.append(len(pieces))
        data = b"".join(pieces)
        return whole(descriptor, [data[:3]])

    file = storage.create_append("log")
    pieces = [b"ab", b"", memoryview(b"cdefgh"), b"ij"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", short)
        file.append(pieces)
    assert storage.read("log") == b"abcdefghij"
    assert len(calls) == 4
    file.close()


def test_a_failed_atomic_write_leaves_the_old_file_and_no_other(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    storage.write_atomic("p", b"old")
    for call in ("writev", "fdatasync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, _failing(errno.ENOSPC))
            with pytest.raises(StorageError, match="No space left"):
                storage.write_atomic("p", b"new")
    assert storage.read("p") == b"old"
    assert os.listdir(tmp_path / "run") == ["p"]


def test_without_hard_links_the_way_out_is_said(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", _failing(errno.EPERM))
        with pytest.raises(StorageError, match="hard links"):
            storage.create_exclusive("claim", b"")
    assert os.listdir(tmp_path / "run") == []


def test_an_unknown_errno_still_gives_a_sentence(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", _failing(errno.ELOOP))
        with pytest.raises(StorageError, match="way out"):
            storage.list("")


def test_permission_denied_is_not_absence(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", _failing(errno.EACCES))
        with pytest.raises(StorageError, match="Permission denied"):
            storage.exists("f")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the system calls that order durability, as they happen."""
    seen: list[str] = []
    for name in ("writev", "fdatasync", "fsync", "rename", "link", "unlink", "mkdir"):
        real = getattr(os, name)

        def spy(*args: object, _name: str = name, _real: Callable[..., object] = real) -> object:
            seen.append(_name)
            return _real(*args)

        monkeypatch.setattr(os, name, spy)
    return seen


def test_atomic_write_orders_its_calls(storage: PosixStorage, calls: list[str]) -> None:
    calls.clear()
    storage.write_atomic("p", b"x")
    assert calls[:4] == ["writev", "fdatasync", "rename", "fsync"]


def test_exclusive_creation_syncs_the_directory_also_when_it_lost(
    storage: PosixStorage, calls: list[str]
) -> None:
    for expected in (True, False):
        calls.clear()
        assert storage.create_exclusive("p", b"x") is expected
        assert calls == ["writev", "fdatasync", "link", "unlink", "fsync"]


def test_every_level_of_directories_is_synced_once_even_if_it_exists(
    storage: PosixStorage, calls: list[str]
) -> None:
    storage.make_dirs("a/b")
    for opened, synced in ((PosixStorage(storage.root), ["fsync"]), (storage, [])):
        calls.clear()
        opened.make_dirs("a/b")
        assert calls == ["mkdir", *synced] * 3
    storage.remove("a")
    calls.clear()
    storage.make_dirs("a/b")
    assert calls == ["mkdir", "mkdir", "fsync", "mkdir", "fsync"]


@pytest.mark.parametrize("leave", [lambda s: s.remove("a"), lambda s: s.rename("a", "c")])
def test_a_directory_that_another_process_made_again_is_synced(
    storage: PosixStorage, calls: list[str], leave: Callable[[PosixStorage], None]
) -> None:
    storage.make_dirs("a/b")
    leave(storage)
    (storage.root / "a" / "b").mkdir(parents=True)
    calls.clear()
    storage.make_dirs("a/b")
    assert calls == ["mkdir", "mkdir", "fsync", "mkdir", "fsync"]


def test_a_directory_whose_sync_failed_is_synced_by_the_next_attempt(
    storage: PosixStorage, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _failing(errno.EIO))
        with pytest.raises(StorageError):
            storage.make_dirs("a")
    calls.clear()
    storage.make_dirs("a")
    assert calls == ["mkdir", "mkdir", "fsync"]


def test_create_append_syncs_the_directory(storage: PosixStorage, calls: list[str]) -> None:
    calls.clear()
    storage.create_append("log").close()
    assert calls == ["fsync"]


@pytest.mark.parametrize(
    ("point", "found"),
    [(FaultPoint.STORAGE_TEMPORARY_SYNCED, b"old"), (FaultPoint.STORAGE_RENAMED, b"new")],
)
def test_faults_strike_between_the_steps_of_an_atomic_write(
    tmp_path: Path, point: FaultPoint, found: bytes
) -> None:
    plan = FaultPlan([FaultRule(point, hit=2, action=FaultAction.RAISE)])
    storage = PosixStorage(tmp_path, faults=plan)
    storage.write_atomic("p", b"old")
    with pytest.raises(InjectedFault):
        storage.write_atomic("p", b"new")
    assert plan.fired == list(plan.rules)
    assert storage.read("p") == found
    assert os.listdir(tmp_path) == ["p"]


def test_a_fault_after_the_link_leaves_a_whole_claim(tmp_path: Path) -> None:
    plan = FaultPlan([FaultRule(FaultPoint.STORAGE_LINKED, action=FaultAction.RAISE)])
    storage = PosixStorage(tmp_path, faults=plan)
    with pytest.raises(InjectedFault):
        storage.create_exclusive("claim", b"whole")
    assert storage.read("claim") == b"whole"
    assert os.listdir(tmp_path) == ["claim"]


@pytest.mark.parametrize("write", ["write_atomic", "create_exclusive"])
def test_the_temporary_file_of_a_live_writer_is_left_alone(tmp_path: Path, write: str) -> None:
    plan = FaultPlan()
    collected: list[int] = []

    def collect(point: FaultPoint) -> None:
        if point is FaultPoint.STORAGE_TEMPORARY_SYNCED:
            assert len(list(tmp_path.glob(".tmp-*"))) == 1
            collected.append(PosixStorage(tmp_path).collect_temporaries(""))

    plan.observers.append(collect)
    getattr(PosixStorage(tmp_path, faults=plan), write)("p", b"whole")
    assert collected == [0]
    assert PosixStorage(tmp_path).read("p") == b"whole"
    assert os.listdir(tmp_path) == ["p"]


def test_the_temporary_file_of_a_killed_writer_is_collected(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        kill = FaultRule(FaultPoint.STORAGE_TEMPORARY_SYNCED, action=FaultAction.KILL)
        PosixStorage(tmp_path, faults=FaultPlan([kill])).write_atomic("p", b"never")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-")
    assert PosixStorage(tmp_path).collect_temporaries("") == 1
    assert not os.listdir(tmp_path)


def test_a_writer_whose_new_file_is_collected_takes_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock a temporary file looks like one that was left behind."""
    flock, collected = fcntl.flock, list[int]()

    def collect_first(descriptor: int, operation: int) -> None:
        if not collected:
            collected.append(0)
            collected.append(PosixStorage(tmp_path).collect_temporaries(""))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", collect_first)
    PosixStorage(tmp_path).write_atomic("p", b"whole")
    assert collected == [0, 1]
    assert PosixStorage(tmp_path).read("p") == b"whole"
    assert os.listdir(tmp_path) == ["p"]


_HOLDER = """
import os, sys
from pathlib import Path
from perdure.storage import PosixStorage
lock = PosixStorage(Path(sys.argv[1])).lock("lock")
child = os.fork() if sys.argv[2] == "forks" else None
if child == 0:
    lock.release()
    os.write(1, b"child\\n")
elif child is None:
    os.write(1, b"child\\n")
sys.stdin.read()
"""


@pytest.mark.parametrize("holder_forks", ["forks", "alone"])
def test_a_lock_dies_with_its_process(storage: PosixStorage, holder_forks: str) -> None:
    """Neither a living child of the dead holder keeps it, nor does the child's release free it."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(storage.root), holder_forks],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"child\n"
        assert storage.lock("lock") is None
        os.kill(holder.pid, signal.SIGKILL)
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        lock = storage.lock("lock")
        assert lock is not None
        lock.release()
