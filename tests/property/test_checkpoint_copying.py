"""Copies with checksums: whatever is cut how, the image is right and so is each chunk's sum."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from perdure.checkpoint import copying
from perdure.checkpoint.copying import ImageCopy, copy_images
from perdure.checkpoint.files import FileEntry
from perdure.storage import bulk

CHUNK = 64
WAIT_S = 20.0


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "CHUNK_BYTES", CHUNK)
        patch.setattr(copying, "_STEP_BYTES", 24)
        patch.setattr(copying, "usable_cores", lambda: 3)
        yield


def sums_of(data: bytes, step: int = CHUNK) -> tuple[str, ...]:
    starts = range(0, max(1, len(data)), step)
    return tuple(xxhash.xxh3_128_hexdigest(data[start : start + step]) for start in starts)


spans = st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=12)


@given(st.lists(spans, max_size=4), st.randoms(use_true_random=False))
def test_every_image_is_whole_and_every_chunk_summed(
    files: list[list[tuple[bool, int]]], random: object
) -> None:
    """Spans are there already, or have yet to be copied."""
    draw = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    wanted: dict[str, bytes] = {}
    images: dict[str, np.ndarray] = {}
    copies: dict[str, ImageCopy] = {}
    for number, cut in enumerate(files):
        whole = draw.integers(0, 256, sum(size for _, size in cut), dtype=np.uint8)
        image, parts, start = whole.copy(), [], 0
        for copied, size in cut:
            if copied:
                parts.append((start, whole[start : start + size].copy()))
                image[start : start + size] = 0
            start += size
        wanted[f"{number}"], images[f"{number}"] = whole.tobytes(), image
        copies[f"{number}"] = ImageCopy(image, parts)
    sums = copy_images(copies)
    assert sums == {path: sums_of(data) for path, data in wanted.items()}
    assert {path: image.tobytes() for path, image in images.items()} == wanted
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


@given(st.lists(st.binary(max_size=150), max_size=8), st.integers(0, 200))
def test_sums_do_not_depend_on_how_the_bytes_come(parts: list[bytes], chunk_bytes: int) -> None:
    sums = bulk.ChunkSums(chunk_bytes)
    for part in parts:
        sums.update(part)
    data = b"".join(parts)
    assert sums.bytes == len(data)
    assert sums.hexdigests() == sums_of(data, max(1, chunk_bytes))


@given(st.binary(max_size=300), st.data())
def test_an_entry_reads_back_and_names_the_chunks_that_are_wrong(
    data: bytes, draw: st.DataObject
) -> None:
    entry = FileEntry.chunked(len(data), sums_of(data))
    assert FileEntry.decode(entry.encode()) == entry
    assert ("chunks" in entry.encode()) == (len(data) > CHUNK)
    assert entry.bad_chunks(memoryview(data)) == []
    if data:
        flipped = bytearray(data)
        at = draw.draw(st.integers(0, len(data) - 1))
        flipped[at] ^= 1
        assert entry.bad_chunks(memoryview(flipped)) == [at // CHUNK]
        if len(entry.sums) > 1:
            short = {**entry.encode()["chunks"], "xxh3_128": entry.sums[1:]}
            with pytest.raises(ValueError, match="do not cover"):
                FileEntry.decode({"bytes": len(data), "chunks": short})


def test_an_error_in_any_thread_is_raised() -> None:
    image = np.zeros(10 * CHUNK, np.uint8)
    # A source of another length than its place: what numpy says of it must not be lost.
    wrong = np.zeros((10 * CHUNK, 2), np.uint8)
    with pytest.raises(ValueError, match="broadcast"):
        copy_images({"f": ImageCopy(image, [(0, wrong)])})


def test_an_error_of_a_helper_alone_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, failed = threading.current_thread(), threading.Event()

    def copy_chunk(_: ImageCopy, index: int) -> None:
        if threading.current_thread() is caller:
            assert failed.wait(WAIT_S), "no helper has taken a chunk"
        else:
            failed.set()
            raise ValueError(f"chunk {index}")

    monkeypatch.setattr(ImageCopy, "copy_chunk", copy_chunk)
    with pytest.raises(ValueError, match="chunk"):
        copy_images({"f": ImageCopy(np.zeros(10 * CHUNK, np.uint8), [])})


def test_nothing_more_is_begun_when_the_caller_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller, begun, interrupted = threading.current_thread(), threading.Event(), threading.Event()
    taken: list[int] = []

    def copy_chunk(_: ImageCopy, index: int) -> None:
        if threading.current_thread() is caller:
            assert begun.wait(WAIT_S), "no helper has taken a chunk"
            interrupted.set()
            raise KeyboardInterrupt
        begun.set()
        assert interrupted.wait(WAIT_S)
        time.sleep(0.001)
        taken.append(index)

    monkeypatch.setattr(ImageCopy, "copy_chunk", copy_chunk)
    with pytest.raises(KeyboardInterrupt):
        copy_images({"f": ImageCopy(np.zeros(20_000 * CHUNK, np.uint8), [])})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]
    assert len(taken) < 19_999


def test_the_sums_are_those_of_the_copy_whatever_happens_to_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the copy that is written; another thread may go on with the tensor at any moment."""
    data = np.arange(3 * CHUNK, dtype=np.uint8)
    image, before, copyto = np.zeros_like(data), data.tobytes(), np.copyto

    def copy_and_change(place: np.ndarray, source: np.ndarray) -> None:
        copyto(place, source)
        source ^= 1

    monkeypatch.setattr(np, "copyto", copy_and_change)
    sums = copy_images({"f": ImageCopy(image, [(0, data)])})
    assert data.tobytes() != image.tobytes() == before
    assert sums["f"] == sums_of(before)


def test_without_further_threads_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    data = np.arange(5 * CHUNK, dtype=np.uint8)
    image = np.zeros_like(data)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    sums = copy_images({"f": ImageCopy(image, [(0, data)])})
    assert sums["f"] == sums_of(data.tobytes())
    assert np.array_equal(image, data)
