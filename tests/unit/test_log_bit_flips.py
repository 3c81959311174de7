"""Every flipped bit of a small log is damage, or cuts a batch that nothing vouches for."""

from __future__ import annotations

import functools

import pytest
from log_cases import (
    FLUSH_S,
    kept_keys,
    make_claim,
    make_run,
    open_writer,
    partials,
    read_head,
    session_done,
    started,
    submitted,
)

from perdure.core.errors import DamagedError, FutureFormatError
from perdure.experience.format import HEADER_BYTES, decode_header
from perdure.storage import MemoryStorage

CONTROL = "log/control-000001-000000.plog"
PAYLOAD = "log/payload-000001-000000.plog"


def _write(storage: MemoryStorage, *, close: bool) -> None:
    make_run(storage)
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed)
    writer.append([started(claimed), submitted(0)])
    writer.flush(FLUSH_S)
    writer.append([session_done(0), partials([1, 2], 0, 3)])
    writer.flush(FLUSH_S)
    writer.append([submitted(1)])
    writer.flush(FLUSH_S)
    if close:
        writer.close("done")


@functools.cache
def _log(*, close: bool) -> tuple[dict[str, bytes], list[str]]:
    storage = MemoryStorage()
    _write(storage, close=close)
    return storage.files(), kept_keys(read_head(storage))


def _flips(path: str, *, close: bool, stride: int) -> tuple[int, int]:
    """Flip bits one at a time; return how many were damage and how many a tail."""
    files, whole = _log(close=close)
    storage = MemoryStorage()
    _write(storage, close=close)
    data = files[path]
    damaged = cut = 0
    for bit in range(0, 8 * len(data), stride):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        storage.damage(path, bytes(flipped))
        try:
            log = read_head(storage)
        except (DamagedError, FutureFormatError) as error:
            assert path in str(error)
            damaged += 1
            continue
        kept = kept_keys(log)
        assert kept == whole[: len(kept)]
        assert [(tail.name.path, tail.size > 0) for tail in log.report.tails] == [(path, True)]
        assert log.report.tails[0].offset <= bit // 8
        cut += 1
    return damaged, cut


def test_log_flip_in_control_is_damage_or_cuts_the_last_batch() -> None:
    files, whole = _log(close=False)
    end = len(files[CONTROL])
    last_record = end - _end_without(1)
    assert kept_keys(read_head(_without_tail(1))) == whole[:-1]
    _, cut = _flips(CONTROL, close=False, stride=3)
    assert cut == len([bit for bit in range(0, 8 * end, 3) if bit // 8 >= end - last_record])


def _without_tail(size: int) -> MemoryStorage:
    storage = MemoryStorage()
    _write(storage, close=False)
    storage.damage(CONTROL, storage.files()[CONTROL][:-size])
    return storage


def test_log_flip_in_payload_that_control_vouches_for_is_damage() -> None:
    assert _flips(PAYLOAD, close=False, stride=3)[1] == 0


def _end_without(size: int) -> int:
    end = read_head(_without_tail(size)).end
    assert end is not None
    return end.offset


@pytest.mark.parametrize("path", [CONTROL, PAYLOAD])
def test_log_flip_in_a_sealed_log_is_damage(path: str) -> None:
    assert _flips(path, close=True, stride=5)[1] == 0


def _starts(data: bytes) -> list[int]:
    """Where the records of a segment start, and its end."""
    starts = [0]
    while starts[-1] < len(data):
        header = decode_header(memoryview(data), starts[-1])
        assert header is not None
        starts.append(starts[-1] + header.length)
    return starts


def _write_several(storage: MemoryStorage, *, close: bool) -> None:
    """Several segments of each stream; batches of payload hold two records."""
    make_run(storage)
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed, segment_bytes=1200)
    writer.append([started(claimed)])
    for group in range(4):
        writer.append([submitted(group)])
        writer.flush(FLUSH_S)
        writer.append([session_done(group), partials([8, 9], 3 * group, 3 * group + 3)])
        writer.flush(FLUSH_S)
    writer.append([submitted(4)])
    writer.flush(FLUSH_S)
    if close:
        writer.close("done")


def _damaged(path: str, data: bytes | None, *, close: bool) -> str:
    """What is said of a log one of whose files has these bytes now, or is not there."""
    storage = MemoryStorage()
    _write_several(storage, close=close)
    if data is None:
        storage.remove(path)
    else:
        storage.damage(path, data)
    with pytest.raises(DamagedError) as refused:
        read_head(storage)
    return str(refused.value)


@functools.cache
def _several(*, close: bool) -> dict[str, bytes]:
    storage = MemoryStorage()
    _write_several(storage, close=close)
    return {path: data for path, data in storage.files().items() if path.startswith("log/")}


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("stream", ["control", "payload"])
def test_log_damage_is_told_at_the_record_that_has_it(stream: str, close: bool) -> None:
    files = _several(close=close)
    paths = sorted(path for path in files if stream in path)
    assert len(paths) >= 2
    for path in paths:
        starts = _starts(files[path])
        # Nothing vouches for the last control batch of a log that is not sealed.
        last = -2 if path == paths[-1] and stream == "control" and not close else -1
        for start in starts[:last]:
            flipped = bytearray(files[path])
            flipped[start + HEADER_BYTES] ^= 1
            assert f"{path} at byte {start}: " in _damaged(path, bytes(flipped), close=close)


@pytest.mark.parametrize("close", [False, True])
def test_log_what_is_missing_is_told_where_it_should_be(close: bool) -> None:
    files = _several(close=close)
    before, path = sorted(path for path in files if "payload" in path)[-2:]
    starts = _starts(files[path])
    assert len(starts) >= 3
    for end, start in zip(starts[1:], starts, strict=False):
        for cut in (start, start + 100):
            said = _damaged(path, files[path][:cut], close=close)
            # Of a sealed segment is known how long it was.
            assert f"{path} at byte {cut if close else start}: " in said, (cut, end)
    said = _damaged(path, None, close=close)
    if close:
        assert f"{path} at byte 0: the file is missing" in said
    else:
        assert f"{before} at byte {len(files[before])}: the payload stream ends after " in said
        assert "restore the log from a copy" in said


@pytest.mark.parametrize("path", ["seals/1.json", "run.json"])
def test_log_flip_in_sealed_json_is_noticed(path: str) -> None:
    storage = MemoryStorage()
    _write(storage, close=True)
    data = storage.files()[path]
    whole = kept_keys(read_head(storage))
    noticed = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        storage.damage(path, bytes(flipped))
        try:
            # A flip between two kinds of white space says the same.
            assert kept_keys(read_head(storage)) == whole
        except (DamagedError, FutureFormatError) as error:
            assert path in str(error)
            noticed += 1
    assert noticed > 7 * len(data)
