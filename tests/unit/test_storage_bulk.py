"""Writing and checking large files past the page cache, in this process and in another one."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from perdure.storage import bulk
from perdure.storage.bulk_process import BulkProcess, BulkProcessLost, SharedMemory

WAIT_S = 20.0
SIZES = [0, 1, 4095, 4096, bulk.CHUNK_BYTES, 2 * bulk.CHUNK_BYTES + 5]


class Shared:
    """Random bytes in memory that another process can map."""

    def __init__(self, key: int, size: int = 2 * bulk.CHUNK_BYTES + 3 * bulk.ALIGNMENT) -> None:
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, size)
        self.map = mmap.mmap(descriptor, size)
        self.map[:] = np.random.default_rng(key).bytes(size)
        self.memory = SharedMemory(key, descriptor, size)

    def close(self) -> None:
        self.map.close()
        os.close(self.memory.descriptor)


@pytest.fixture
def shared() -> Generator[Shared]:
    memory = Shared(1)
    yield memory
    memory.close()


@pytest.fixture
def process() -> Generator[BulkProcess]:
    started = BulkProcess(stall_s=WAIT_S)
    yield started
    started.close()


def sums_of(data: bytes) -> tuple[str, ...]:
    starts = range(0, max(1, len(data)), bulk.CHUNK_BYTES)
    return tuple(xxhash.xxh3_128_hexdigest(data[i : i + bulk.CHUNK_BYTES]) for i in starts)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direct", [True, False])
def test_the_file_holds_the_bytes_and_no_more(
    tmp_path: Path, shared: Shared, size: int, direct: bool
) -> None:
    beats: list[int] = []
    path = tmp_path / "image"
    with memoryview(shared.map) as memory:
        # Memory that ends with the file cannot be written in whole blocks.
        data = memory[: bulk.aligned(size) if direct else size]
        sums = bulk.write_image(str(path), data, size, progress=lambda: beats.append(1))
        data.release()
    assert path.read_bytes() == shared.map[:size]
    assert sums == sums_of(shared.map[:size])
    assert len(beats) == -(-size // bulk.CHUNK_BYTES)
    assert bulk.check_image(str(path), size, sums) == []


def test_memory_that_the_kernel_refuses_goes_through_the_page_cache(
    tmp_path: Path, shared: Shared
) -> None:
    size = bulk.CHUNK_BYTES + 7
    with memoryview(shared.map) as memory, memory[1:] as data:
        sums = bulk.write_image(str(tmp_path / "image"), data, size)
    assert (tmp_path / "image").read_bytes() == shared.map[1 : 1 + size]
    assert sums == sums_of(shared.map[1 : 1 + size])


def test_a_check_names_the_chunks_that_are_wrong(tmp_path: Path, shared: Shared) -> None:
    path, size = tmp_path / "image", 2 * bulk.CHUNK_BYTES + 5
    with memoryview(shared.map) as memory:
        sums = bulk.write_image(str(path), memory, size)
    with path.open("r+b") as file:
        file.seek(bulk.CHUNK_BYTES + 1)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())
    assert bulk.check_image(str(path), size, sums) == [1]
    os.truncate(path, size - 1)
    assert bulk.check_image(str(path), size, sums) == [1, 2]


def test_a_file_that_exists_is_never_written_into(
    tmp_path: Path, shared: Shared, process: BulkProcess
) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"kept")
    with memoryview(shared.map) as memory, pytest.raises(FileExistsError):
        bulk.write_image(str(path), memory, 10)
    with pytest.raises(FileExistsError):
        process.write(str(path), shared.memory, 0, 10, sums=True)
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        process.write(str(tmp_path / "absent/image"), shared.memory, 0, 10, sums=True)
    assert path.read_bytes() == b"kept"


def test_checksums_that_end_early_are_no_file(tmp_path: Path, shared: Shared) -> None:
    """Whatever ends the thread that computes them, no sums of a part of the file come back."""
    read_only = [memoryview(bytes(bulk.CHUNK_BYTES))] * 2
    with memoryview(shared.map) as memory, pytest.raises(OSError, match="read-only"):
        bulk.write_image(str(tmp_path / "image"), memory, bulk.CHUNK_BYTES + 1, buffers=read_only)


def test_without_a_thread_no_more_than_a_chunk_is_written(
    tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with memoryview(shared.map) as memory, pytest.raises(OSError, match="new thread"):
        bulk.write_image(str(tmp_path / "image"), memory, bulk.CHUNK_BYTES + 1)
    assert not (tmp_path / "image").exists()
    with memoryview(shared.map) as memory:
        sums = bulk.write_image(str(tmp_path / "image"), memory, 10)
    assert sums == sums_of(shared.map[:10])
    assert (tmp_path / "image").read_bytes() == shared.map[:10]


def test_room_that_is_kept_grows_and_holds_the_file_read_last(
    tmp_path: Path, shared: Shared
) -> None:
    room = bulk.Room()
    for size in (10, bulk.CHUNK_BYTES + 1, 4097, 0):
        path = str(tmp_path / str(size))
        sums = bulk.write_image(path, memoryview(shared.map[:size]), size)
        assert bulk.check_image(path, size, sums, room=room) == []
        if size:
            with open(path, "r+b") as file:
                file.write(bytes([shared.map[0] ^ 1]))
            assert bulk.check_image(path, size, sums, room=room) == [0]


def test_the_process_writes_and_checks_what_lies_in_shared_memory(
    tmp_path: Path, process: BulkProcess
) -> None:
    memories = [Shared(key) for key in (1, 2, 3)]
    for turn, memory in enumerate([*memories, *memories]):
        path, offset, size = str(tmp_path / f"{turn}"), 4096, bulk.CHUNK_BYTES + 1 + turn
        expected = memory.map[offset : offset + size]
        sums = process.write(path, memory.memory, offset, size, sums=True)
        assert sums == sums_of(expected)
        assert Path(path).read_bytes() == expected
        assert process.check(path, size, sums) == []
        assert process.check(path, size, [sums[1], sums[1]]) == [0]
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert maps.count("memfd:test") == 2
    for memory in memories:
        memory.close()


class Listening:
    """A connection that remembers what it has received."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.heard = b""

    def recv(self, size: int) -> bytes:
        data = self._connection.recv(size)
        self.heard += data
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.mark.parametrize("sums", [True, False])
def test_the_process_gives_a_sign_of_life_with_every_chunk(
    tmp_path: Path, shared: Shared, process: BulkProcess, sums: bool
) -> None:
    size = 2 * bulk.CHUNK_BYTES + 5
    process.write(str(tmp_path / "first"), shared.memory, 0, 1, sums=sums)
    line = process._connection = Listening(process._connection)
    taken = process.write(str(tmp_path / "image"), shared.memory, 0, size, sums=sums)
    assert line.heard.split(b"\n").count(b"") - 1 == 3
    expected = shared.map[:size]
    assert taken == (sums_of(expected) if sums else ())
    assert (tmp_path / "image").read_bytes() == expected


def test_the_process_starts_without_numpy_and_torch(
    tmp_path: Path, shared: Shared, process: BulkProcess
) -> None:
    process.write(str(tmp_path / "image"), shared.memory, 0, 1, sums=True)
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "xxhash" in maps
    assert "numpy" not in maps
    assert "torch" not in maps


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_is_noticed_and_replaced(
    tmp_path: Path, shared: Shared, number: signal.Signals
) -> None:
    process = BulkProcess(stall_s=0.5)
    process.write(str(tmp_path / "first"), shared.memory, 0, 4096, sums=True)
    first = process.pid
    assert first is not None
    os.kill(first, number)
    with pytest.raises(BulkProcessLost) as lost:
        process.write(str(tmp_path / "second"), shared.memory, 0, 4096, sums=True)
    assert lost.value.started
    assert process.pid is None
    assert not Path(f"/proc/{first}").exists()
    process.write(str(tmp_path / "third"), shared.memory, 0, 4096, sums=True)
    assert process.pid not in (None, first)
    process.close()


def test_a_process_that_cannot_be_started_is_told_apart(
    tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    for executable in (str(tmp_path / "absent"), "/bin/false"):
        monkeypatch.setattr(sys, "executable", executable)
        process = BulkProcess(stall_s=WAIT_S)
        with pytest.raises(BulkProcessLost) as lost:
            process.write(str(tmp_path / "image"), shared.memory, 0, 1, sums=True)
        assert not lost.value.started


PARENT = """
import mmap, os, sys, time
from perdure.storage.bulk_process import BulkProcess, SharedMemory
descriptor = os.memfd_create("parent")
os.ftruncate(descriptor, 4096)
process = BulkProcess(stall_s=20)
process.write(sys.argv[1], SharedMemory(1, descriptor, 4096), 0, 4096, sums=True)
sibling = os.fork()
if sibling == 0:
    time.sleep(60)
    os._exit(0)
print(process.pid, sibling, flush=True)
time.sleep(60)
"""


def test_the_process_dies_with_its_parent_whoever_else_holds_the_socket(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "image")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child, sibling = (int(word) for word in parent.stdout.readline().split())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait(WAIT_S)
    deadline_s = time.monotonic() + WAIT_S
    while _runs(child) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not _runs(child)
    assert _runs(sibling)
    os.kill(sibling, signal.SIGKILL)
    parent.stdout.close()


def _runs(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("sizes", [[1], [5, 0, 4096, 7], [bulk.CHUNK_BYTES + 3, bulk.CHUNK_BYTES]])
def test_parts_become_one_file(tmp_path: Path, sizes: list[int]) -> None:
    parts = [np.random.default_rng(size).bytes(size) for size in sizes]
    whole = b"".join(parts)
    path = str(tmp_path / "image")
    views = [memoryview(part) for part in parts]
    bulk.write_parts(path, views, len(whole), buffer=bulk.chunk_buffer())
    assert Path(path).read_bytes() == whole


@pytest.mark.parametrize("size", [1, bulk.ALIGNMENT, bulk.CHUNK_BYTES + 5])
def test_blocks_that_come_by_and_by_become_one_file(
    tmp_path: Path, shared: Shared, size: int
) -> None:
    step, path = 3 * bulk.ALIGNMENT, tmp_path / "file"
    with memoryview(shared.map) as memory:
        blocks = (
            (at, memory[at : min(at + step, bulk.aligned(size))]) for at in range(0, size, step)
        )
        bulk.write_blocks(str(path), blocks, size)
        del blocks
    assert path.read_bytes() == shared.map[:size]
