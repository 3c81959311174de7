"""Trajectories come back as views of the mapped file, verified."""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path

import numpy as np
import pytest
import xxhash
from log_cases import (
    FLUSH_S,
    check_contents,
    make_claim,
    make_run,
    open_writer,
    payload_with,
    read_head,
    session_done,
    sessions_done,
    started,
    trajectory,
)

from perdure.core.errors import DamagedError
from perdure.core.ids import GroupId, PayloadRef, SessionId
from perdure.core.record_types import RecordType
from perdure.core.storage_api import Storage
from perdure.core.trajectories import Array, Trajectory
from perdure.experience.entries import Entry, Payload
from perdure.experience.format import (
    Stamp,
    parse_record,
    prepare_record,
    record_arrays,
    record_body,
    stamp_record,
)
from perdure.experience.payloads import PayloadReader, require_encodable
from perdure.storage import MemoryStorage, PosixStorage

STAMP = Stamp(incarnation=3, last_of_batch=True, lsn=9, durable_upto=128, other_durable_lsn=4)


def _write(storage: Storage, *entries: Entry, segment_bytes: int = 2**20) -> list[PayloadRef]:
    make_run(storage)
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed, segment_bytes=segment_bytes)
    writer.append([started(claimed)])
    for entry in entries:
        writer.append([entry])
        writer.flush(FLUSH_S)
    return [entry.ref for entry in entries if entry.ref is not None]


def _read(reader: PayloadReader, ref: PayloadRef, group: int, row: int = 0) -> Trajectory:
    return reader.trajectory(ref, row=row, session=SessionId(GroupId(group), 0))


def _root(array: Array) -> object:
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base


def test_log_arrays_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    (ref,) = _write(storage, session_done(3, tokens=1000))
    found = _read(PayloadReader(storage), ref, 3)
    arrays = [found.prompt_ids_P, found.response_ids_T, found.logprobs_T, found.loss_mask_T]
    for array in arrays:
        assert isinstance(_root(array), mmap.mmap)
        assert not array.flags.writeable
        assert not array.flags.owndata
        assert array.flags.aligned
    np.testing.assert_array_equal(found.response_ids_T, trajectory(3, 1000).response_ids_T)
    found.check()


def test_log_two_reads_share_one_map(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    first, second = _write(storage, session_done(0), session_done(1))
    reader = PayloadReader(storage)
    one, two = _read(reader, first, 0), _read(reader, second, 1)
    assert _root(one.logprobs_T) is _root(two.logprobs_T)


def test_log_growing_segment_is_mapped_again(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    make_run(storage)
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed)
    writer.append([started(claimed)])
    reader = PayloadReader(storage)
    kept = []
    for group in range(5):
        entry = session_done(group, tokens=2000)
        writer.append([entry])
        writer.flush(FLUSH_S)
        assert entry.ref is not None
        kept.append(_read(reader, entry.ref, group))
    for group, found in enumerate(kept):
        np.testing.assert_array_equal(found.logprobs_T, trajectory(group, 2000).logprobs_T)


def test_log_many_segments_are_read_with_few_maps(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    entries = [session_done(group) for group in range(80)]
    refs = _write(storage, *entries, segment_bytes=64)
    assert len({ref.segment for ref in refs}) == 80
    reader = PayloadReader(storage)
    for _ in range(2):
        for group, ref in enumerate(refs):
            assert _read(reader, ref, group).session.group == group


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 5000])
def test_log_trajectory_round_trip(tokens: int) -> None:
    storage = MemoryStorage()
    _write(storage, session_done(9, tokens=tokens))
    check_contents(storage, read_head(storage))


def test_log_changed_payload_is_damage() -> None:
    storage = MemoryStorage()
    first, second = _write(storage, session_done(0), session_done(1))
    path = "log/payload-000001-000000.plog"
    data = bytearray(storage.files()[path])
    data[first.offset + first.length - 1] ^= 1
    storage.damage(path, bytes(data))
    reader = PayloadReader(storage)
    with pytest.raises(DamagedError, match=f"{path} at byte {first.offset}"):
        _read(reader, first, 0)
    assert _read(reader, second, 1).session.group == 1


def test_log_wrong_references_are_damage() -> None:
    storage = MemoryStorage()
    first, second = _write(storage, session_done(0), session_done(1))
    reader = PayloadReader(storage)
    for wrong in (
        dataclasses.replace(first, checksum=second.checksum),
        dataclasses.replace(first, offset=first.offset + 64),
        dataclasses.replace(second, offset=second.offset + 64 * 100),
        dataclasses.replace(first, segment=5),
        dataclasses.replace(first, length=first.length - 64),
    ):
        with pytest.raises(DamagedError):
            _read(reader, wrong, 0)


def test_log_payload_of_another_type_is_no_trajectory() -> None:
    storage = MemoryStorage()
    key = "transitions/a/0"
    record = prepare_record(
        RecordType.TRANSITIONS, key=key, fields={"actor": "a"}, arrays={"x": [np.ones(3)]}
    )
    (ref,) = _write(storage, Entry(None, Payload(key, record)))
    reader = PayloadReader(storage)
    record_type, fields, arrays = reader.read(ref)
    assert (record_type, fields["actor"]) == (RecordType.TRANSITIONS, "a")
    np.testing.assert_array_equal(arrays["x"], np.ones(3))
    with pytest.raises(DamagedError, match="TRANSITIONS is not g0.s0"):
        _read(reader, ref, 0)


def test_log_rows_of_a_record_are_its_sessions_in_order(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    groups = [5, 2, 9, 4]
    (ref,) = _write(storage, sessions_done(groups, tokens=300))
    check_contents(storage, read_head(storage))
    reader = PayloadReader(storage)
    for row, group in enumerate(groups):
        assert _root(_read(reader, ref, group, row).logprobs_T) is _root(
            _read(reader, ref, groups[0]).logprobs_T
        )
    for row, group in ((1, 5), (4, 5), (0, 2)):
        with pytest.raises(DamagedError, match=rf"row {row} .* is not g{group}\.s0"):
            _read(reader, ref, group, row)


def test_log_trajectories_payload_is_the_documented_one() -> None:
    payload = payload_with([trajectory(7), trajectory(8, tokens=0)])
    assert payload.key == "trajectories/g7.s0"
    stamp_record(payload.record, STAMP)
    view = memoryview(payload.record)
    header = parse_record(view, 0, where="test")
    assert header is not None
    assert header.type == RecordType.TRAJECTORIES
    assert header.key_hash == xxhash.xxh3_64_intdigest(b"trajectories/g7.s0")
    fields = record_body(view, 0, header)
    arrays = record_arrays(view, 0, fields)
    listed = [entry[:3] for entry in fields.pop("arrays")]
    assert fields == {
        "sessions": [[7, 0], [8, 0]],
        "prompt_tokens": [3, 3],
        "response_tokens": [5, 0],
        "segments": [[[1, 0, 5]], []],
        "stop_reasons": ["stop", "stop"],
    }
    assert listed == [
        ["prompt_ids", "<i4", [6]],
        ["response_ids", "<i4", [5]],
        ["logprobs", "<f4", [5]],
        ["loss_mask", "|u1", [5]],
    ]
    assert arrays["prompt_ids"].tolist() == [7, 8, 9, 8, 9, 10]


def test_log_trajectory_of_another_byte_order_is_turned_round() -> None:
    given = trajectory(7)
    swapped = dataclasses.replace(given, prompt_ids_P=given.prompt_ids_P.astype(">i4"))
    assert payload_with([swapped]) == payload_with([given])


def test_log_trajectory_of_another_type_is_refused() -> None:
    wide = dataclasses.replace(trajectory(7), prompt_ids_P=np.arange(3, dtype=np.int64))
    with pytest.raises(TypeError, match="int64"):
        require_encodable(wide)
