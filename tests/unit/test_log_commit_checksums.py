"""Checksums of the thread that commits: the usual ones, made without letting others in between."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.faults import NoFaults
from perdure.core.ids import IncarnationNumber
from perdure.core.record_codec import record_fields
from perdure.core.record_types import Stream
from perdure.core.records import Closed
from perdure.experience.commit_checksums import checksum_held, update_held
from perdure.experience.format import Stamp, prepare_record, stamp_record
from perdure.experience.stream_writer import StreamIdentity, StreamWriter
from perdure.storage import MemoryStorage

LARGE = 64 * 2**20
"""So many bytes take milliseconds: whoever lets go of the interpreter that long loses it."""


@given(st.integers(0, 3), st.integers(-2, 2), st.binary(max_size=100))
def test_held_checksum_is_the_usual_one(pieces: int, more: int, first: bytes) -> None:
    data = (first + bytes(range(256)) * 1000)[: max(pieces * 2**16 + more, 0)]
    assert checksum_held(data) == xxhash.xxh3_64_intdigest(data)
    state = xxhash.xxh3_64(b"before")
    update_held(state, data)
    assert state.intdigest() == xxhash.xxh3_64_intdigest(b"before" + data)


def _others_that_ran_during(work: Callable[[], object]) -> int:
    """How many threads got the interpreter while ``work`` ran, of one that waits for it."""
    go, ran = threading.Lock(), list[int]()

    def other() -> None:
        with go:
            ran.append(1)

    thread = threading.Thread(target=other)
    interval_s = sys.getswitchinterval()
    go.acquire()
    thread.start()
    # From here on the interpreter is only given up, never taken away.
    sys.setswitchinterval(600)
    try:
        go.release()
        for _ in range(10**6):
            # The other one wakes up meanwhile, and waits for the interpreter.
            pass
        work()
        return len(ran)
    finally:
        sys.setswitchinterval(interval_s)
        thread.join()


def test_large_plain_checksum_lets_others_run() -> None:
    # If this fails, what the tests below show is nothing.
    assert _others_that_ran_during(lambda: xxhash.xxh3_64_intdigest(bytearray(LARGE)))


def test_stamping_a_record_lets_nobody_run() -> None:
    record = prepare_record(1, key="k", fields={}, arrays=None)
    record += bytes(LARGE)
    stamp = Stamp(1, False, 0, 0, 0)
    assert not _others_that_ran_during(lambda: stamp_record(record, stamp))


@pytest.mark.parametrize("sizes", [[LARGE], [200_000] * 300], ids=["large", "small"])
def test_checksum_of_a_written_batch_lets_nobody_run(sizes: list[int]) -> None:
    storage = MemoryStorage()
    storage.make_dirs("log")
    writer = StreamWriter(
        storage,
        identity=StreamIdentity("0" * 32, IncarnationNumber(1), Stream.PAYLOAD),
        segment_bytes=2**30,
        faults=NoFaults(),
    )
    closed = Closed(IncarnationNumber(1), "")
    record = prepare_record(closed.type, key=closed.key(), fields=record_fields(closed))
    records = [record + bytes(size) for size in sizes]

    def write_all() -> None:
        for one in records:
            writer.write([one], other_durable=0)
            writer.sync()

    assert not _others_that_ran_during(write_all)
