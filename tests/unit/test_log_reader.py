"""The kept lineage: parents, voids, repeated keys, and every kind of missing or foreign file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import xxhash
from log_cases import (
    FLUSH_S,
    kept_keys,
    make_claim,
    make_run,
    open_writer,
    partials,
    payload_of,
    read_head,
    session_done,
    started,
    submitted,
)

from perdure.core import sealed_json
from perdure.core.errors import DamagedError, FutureFormatError
from perdure.core.ids import GlobalStep, IncarnationNumber, LocalUpdate, LogPosition, UpdateId
from perdure.core.record_types import RecordType
from perdure.core.records import IncarnationStarted, Taken
from perdure.experience.claims import RunInfo, create_run
from perdure.experience.entries import Entry
from perdure.experience.format import Stamp, prepare_record, stamp_record
from perdure.experience.reader import kept_records, read_lineage
from perdure.experience.writer import LogWriter
from perdure.storage import MemoryStorage


def _taken(step: int) -> Entry:
    return Entry(Taken(UpdateId(GlobalStep(step), LocalUpdate(0)), (step,), "config"))


def _live(
    storage: MemoryStorage,
    *batches: list[Entry],
    base: LogPosition | None = None,
    close: bool = False,
    segment_bytes: int = 2**20,
) -> LogWriter:
    """One incarnation: claim, start, write the batches, die (or close)."""
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed, segment_bytes=segment_bytes)
    writer.append([started(claimed, base)])
    writer.flush(FLUSH_S)
    for batch in batches:
        writer.append(batch)
        writer.flush(FLUSH_S)
    if close:
        writer.close("done")
    claimed.release()
    return writer


def _run() -> MemoryStorage:
    storage = MemoryStorage()
    make_run(storage)
    return storage


def test_log_empty_lineage() -> None:
    log = read_lineage(_run(), IncarnationNumber(0))
    assert (log.records, log.lineage, log.end, log.report.records) == ((), (), None, 0)


def test_log_lineage_goes_through_all_parents_in_order() -> None:
    storage = _run()
    _live(storage, [submitted(0)])
    _live(storage, [submitted(1)], close=True)
    make_claim(storage).release()
    writer = _live(storage, [submitted(2), session_done(2)])
    log = read_head(storage)
    assert log.lineage == (1, 2, 4)
    assert kept_keys(log) == [
        "incarnation/1",
        "submitted/0",
        "incarnation/2",
        "submitted/1",
        "incarnation/4",
        "submitted/2",
        "session_done/g2.s0",
    ]
    assert log.end == writer.position == log.records[-1][0]
    assert [position for position, _ in log.records] == sorted(p for p, _ in log.records)


def test_log_older_incarnation_can_still_be_read() -> None:
    storage = _run()
    _live(storage, [submitted(0)])
    _live(storage, [submitted(1)])
    log = read_lineage(storage, IncarnationNumber(1))
    assert kept_keys(log) == ["incarnation/1", "submitted/0"]


def test_log_first_record_of_a_key_counts() -> None:
    storage = _run()
    _live(storage, [submitted(0)], [_taken(1)])
    _live(storage, [submitted(0), submitted(1)], [_taken(1)])
    log = read_head(storage)
    assert kept_keys(log) == [
        "incarnation/1",
        "submitted/0",
        "taken/u1.0",
        "incarnation/2",
        "submitted/1",
    ]
    assert log.report.duplicates == 2
    assert log.records[2][0].incarnation == 1


def test_log_rewind_voids_decisions_beyond_it_and_keeps_experience() -> None:
    storage = _run()
    base = _live(storage, [submitted(0), _taken(1)]).position
    _live(storage, [_taken(2), session_done(0)])
    _live(storage, [_taken(2), _taken(3)], base=base)
    log = read_head(storage)
    assert kept_keys(log) == [
        "incarnation/1",
        "submitted/0",
        "taken/u1.0",
        "incarnation/2",
        "session_done/g0.s0",
        "incarnation/3",
        "taken/u2.0",
        "taken/u3.0",
    ]
    assert (log.report.void, log.report.duplicates) == (1, 0)
    assert [p.incarnation for p, record in log.records if isinstance(record, Taken)] == [1, 3, 3]


def test_log_earlier_rewind_stays_in_force_and_a_deeper_one_wins() -> None:
    def position(incarnation: int, offset: int) -> LogPosition:
        return LogPosition(IncarnationNumber(incarnation), 0, offset)

    def start(incarnation: int, base: LogPosition | None) -> IncarnationStarted:
        number = IncarnationNumber(incarnation)
        return IncarnationStarted(number, IncarnationNumber(incarnation - 1), base_position=base)

    starts = [start(1, None), start(2, position(1, 200)), start(3, position(2, 100))]
    placed = [
        (position(1, 100), _taken(1).control),
        (position(1, 200), _taken(2).control),
        (position(1, 300), _taken(3).control),
        (position(2, 100), _taken(4).control),
        (position(2, 200), _taken(5).control),
        (position(3, 100), _taken(6).control),
    ]
    records = [(where, record) for where, record in placed if record is not None]
    kept, void, _ = kept_records(records, starts)
    assert [where for where, _ in kept] == [p for p, _ in (placed[i] for i in (0, 1, 3, 5))]
    assert void == 2
    deeper = [*starts[:2], start(3, position(1, 100))]
    kept, void, _ = kept_records(records, deeper)
    assert [where for where, _ in kept] == [position(1, 100), position(3, 100)]
    assert void == 4


def test_log_torn_tail_is_cut_and_counted() -> None:
    storage = _run()
    _live(storage, [submitted(0)], [submitted(1), submitted(2)])
    path = "log/control-000001-000000.plog"
    data = storage.files()[path]
    whole = kept_keys(read_head(storage))
    for cut in (1, 63, 64, 191, 192, 193, 383):
        storage.damage(path, data[:-cut])
        log = read_head(storage)
        assert kept_keys(log) == whole[:2]
        assert [(tail.name.path, tail.size) for tail in log.report.tails] == [(path, 384 - cut)]
    storage.damage(path, data + b"PLOG" + bytes(100))
    log = read_head(storage)
    assert kept_keys(log) == whole
    assert [tail.size for tail in log.report.tails] == [104]
    claimed = make_claim(storage)
    assert read_lineage(storage, claimed.parent).report.tails == log.report.tails


def test_log_batch_without_its_last_record_does_not_count() -> None:
    storage = _run()
    _live(storage, [submitted(0)], [submitted(1), submitted(2), submitted(3)])
    path = "log/control-000001-000000.plog"
    storage.damage(path, storage.files()[path][:-192])
    log = read_head(storage)
    assert kept_keys(log) == ["incarnation/1", "submitted/0"]
    assert log.report.tails[0].size == 2 * 192


CONTROL_0 = "log/control-000001-000000.plog"
CONTROL_1 = "log/control-000001-000001.plog"
PAYLOAD_0 = "log/payload-000001-000000.plog"
PAYLOAD_1 = "log/payload-000001-000001.plog"


def _segmented(*, close: bool = False, successor: bool = False) -> MemoryStorage:
    """Incarnation 1 with several segments in each stream."""
    storage = _run()
    batches = [[session_done(group, tokens=100), submitted(group)] for group in range(6)]
    _live(storage, *batches, close=close, segment_bytes=700)
    if successor:
        _live(storage, [submitted(9)])
    assert storage.exists(CONTROL_1)
    assert storage.exists(PAYLOAD_1)
    return storage


def _remove(path: str) -> Callable[[MemoryStorage], None]:
    return lambda storage: storage.remove(path)


def _cut(path: str, size: int) -> Callable[[MemoryStorage], None]:
    return lambda storage: storage.damage(path, storage.files()[path][:-size])


def _swap(first: str, second: str) -> Callable[[MemoryStorage], None]:
    def swap(storage: MemoryStorage) -> None:
        files = storage.files()
        storage.damage(first, files[second])
        storage.damage(second, files[first])

    return swap


def _copy(source: str, target: str) -> Callable[[MemoryStorage], None]:
    return lambda storage: storage.damage(target, storage.files()[source])


_HARM = {
    "first control segment gone": _remove(CONTROL_0),
    "second control segment gone": _remove(CONTROL_1),
    "first payload segment gone": _remove(PAYLOAD_0),
    "second payload segment gone": _remove(PAYLOAD_1),
    "first control segment shorter": _cut(CONTROL_0, 64),
    "first payload segment shorter": _cut(PAYLOAD_0, 64),
    "first control segment empty": _cut(CONTROL_0, 10**6),
    "control segments swapped": _swap(CONTROL_0, CONTROL_1),
    "payload segments swapped": _swap(PAYLOAD_0, PAYLOAD_1),
    "streams swapped": _swap(CONTROL_0, PAYLOAD_0),
    "stale copy of a control segment": _copy(CONTROL_0, CONTROL_1),
    "stale copy of a payload segment": _copy(PAYLOAD_0, PAYLOAD_1),
}


@pytest.mark.parametrize("end", ["live", "closed", "succeeded"])
@pytest.mark.parametrize("harm", _HARM)
def test_log_harmed_segment_is_damage(harm: str, end: str) -> None:
    storage = _segmented(close=end == "closed", successor=end == "succeeded")
    read_head(storage)
    _HARM[harm](storage)
    with pytest.raises(DamagedError) as raised:
        read_head(storage)
    text = str(raised.value)
    assert "log/" in text or "seals/" in text
    assert "way out: " in text
    with pytest.raises(DamagedError):
        read_lineage(storage, make_claim(storage).parent)


@pytest.mark.parametrize("path", [CONTROL_0, PAYLOAD_0])
def test_log_flip_in_an_earlier_segment_is_damage(path: str) -> None:
    storage = _segmented()
    data = storage.files()[path]
    for bit in range(0, 8 * len(data), 37):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        storage.damage(path, bytes(flipped))
        with pytest.raises(DamagedError, match=path):
            read_head(storage)


def test_log_gap_in_segment_numbers_is_damage_even_where_nothing_counts() -> None:
    storage = _run()
    _live(storage, [submitted(0)])
    storage.write_atomic("log/control-000001-000002.plog", b"")
    with pytest.raises(
        DamagedError, match="control-000001-000001.plog at byte 0: the file is miss"
    ):
        read_head(storage)


def test_log_repeated_batch_is_damage() -> None:
    storage = _run()
    _live(storage, [submitted(0)], [submitted(1)])
    data = storage.files()[CONTROL_0]
    storage.damage(CONTROL_0, data + data[-192:])
    with pytest.raises(DamagedError, match="record number 3 follows number 3"):
        read_head(storage)


@pytest.mark.parametrize(
    ("record_type", "incarnation", "message"),
    [
        (RecordType.CLOSED, 2, "belongs to incarnation 2"),
        (RecordType.SEGMENT_OPENED, 1, "a record of type 1 does not belong here"),
        (RecordType.TAKEN, 1, "not a valid record of type 8"),
    ],
)
def test_log_valid_record_in_a_wrong_place_is_damage(
    record_type: RecordType, incarnation: int, message: str
) -> None:
    storage = _run()
    _live(storage, [submitted(0)])
    data = storage.files()[CONTROL_0]
    record = prepare_record(record_type, key="k", fields={"incarnation": 1, "reason": ""})
    stamp_record(record, Stamp(incarnation, True, 3, len(data), 0))
    storage.damage(CONTROL_0, data + bytes(record))
    with pytest.raises(DamagedError, match=message):
        read_head(storage)


@pytest.mark.parametrize(
    ("other", "key"),
    [(session_done(1), "sessions_done/g1.s0"), (partials([1], 0, 5), "partials/g1.s0/0/0")],
    ids=["sessions", "partials"],
)
def test_log_reference_to_no_record_is_damage(other: Entry, key: str) -> None:
    storage = _run()
    good = session_done(0)
    writer = _live(storage, [good])
    assert good.ref is not None
    for ref in (
        dataclasses.replace(good.ref, checksum=1),
        dataclasses.replace(good.ref, offset=good.ref.offset + 64),
        dataclasses.replace(good.ref, offset=10**6),
        dataclasses.replace(good.ref, segment=1),
    ):
        copy = MemoryStorage()
        make_run(copy)
        record = dataclasses.replace(other.control, payload=ref)
        _live(copy, [good], [Entry(record)])
        with pytest.raises(DamagedError, match=f"the payload of {key} is not at"):
            read_head(copy)
    assert writer.position == read_head(storage).end


def test_log_payload_that_only_a_count_vouches_for_may_not_be_missing() -> None:
    storage = _run()
    _live(storage, [session_done(0)], [Entry(None, payload_of(1))], [submitted(0)])
    data = storage.files()[PAYLOAD_0]
    last = data.rindex(b"PLOG")
    storage.damage(PAYLOAD_0, data[:last])
    with pytest.raises(
        DamagedError, match="the payload stream ends after 2 records; 3 were durable"
    ):
        read_head(storage)


def test_log_wrong_count_in_a_seal_is_damage() -> None:
    storage = _segmented(successor=True)
    path = "seals/1.json"
    seal = sealed_json.decode(storage.files()[path], where=path, newest_format=1)
    seal["segments"]["control-000001-000000.plog"]["records"] += 1
    storage.damage(path, sealed_json.encode(seal))
    with pytest.raises(DamagedError, match="records count in this segment"):
        read_head(storage)


def test_log_missing_end_is_damage_if_the_other_stream_vouches_for_it() -> None:
    for number, stream in enumerate(("control", "payload")):
        storage = _run()
        _live(storage, [session_done(0)], [session_done(1)], [session_done(2)])
        path = f"log/{stream}-000001-000000.plog"
        data = storage.files()[path]
        ends = [index for index in range(0, len(data), 64) if data[index : index + 4] == b"PLOG"]
        # Payload of a batch vouches for the control records of the batches before it.
        storage.damage(path, data[: ends[-2 + number]])
        with pytest.raises(DamagedError, match=r"were durable|payload of session_done"):
            read_head(storage)


def test_log_missing_seal_is_damage_once_somebody_went_on() -> None:
    storage = _segmented(successor=True)
    storage.remove("seals/1.json")
    with pytest.raises(DamagedError, match="an incarnation below one that has segments is sealed"):
        read_head(storage)
    with pytest.raises(DamagedError, match="an incarnation below one that has segments is sealed"):
        make_claim(storage)


def test_log_seal_of_another_incarnation_is_damage() -> None:
    storage = _segmented(successor=True)
    make_claim(storage)
    _copy("seals/2.json", "seals/1.json")(storage)
    with pytest.raises(DamagedError, match="seals incarnation 2"):
        read_head(storage)


def test_log_segments_of_another_run_are_damage() -> None:
    storage = _segmented()
    other = MemoryStorage()
    create_run(other, RunInfo("f" * 32, 1.0))
    storage.damage("run.json", other.files()["run.json"])
    with pytest.raises(DamagedError, match="of run 0123"):
        read_lineage(storage, IncarnationNumber(1))


def test_log_bytes_beyond_a_seal_are_fenced_and_counted() -> None:
    storage = _segmented(successor=True)
    whole = kept_keys(read_head(storage))
    last = max(name for name in storage.list("log") if name.startswith("control-000001"))
    storage.damage(f"log/{last}", storage.files()[f"log/{last}"] + bytes(70))
    storage.write_atomic("log/control-000001-000099.plog", bytes(10))
    log = read_head(storage)
    assert kept_keys(log) == whole
    assert sorted(tail.size for tail in log.report.tails) == [10, 70]


def test_log_files_that_are_no_segments_are_left_alone() -> None:
    storage = _segmented()
    whole = kept_keys(read_head(storage))
    for name in ("notes.txt", "control-1-0.plog", "control-000001-0000001.plog"):
        storage.write_atomic(f"log/{name}", b"x")
    assert kept_keys(read_head(storage)) == whole


def test_log_record_of_a_newer_format_stops_the_reader() -> None:
    storage = _run()
    _live(storage, [submitted(0)])
    data = bytearray(storage.files()[CONTROL_0])
    last = len(data) - 192
    data[last + 4] = 2
    data[last + 56 : last + 64] = bytes(8)
    data[last + 56 : last + 64] = xxhash.xxh3_64_intdigest(bytes(data[last:])).to_bytes(8, "little")
    storage.damage(CONTROL_0, bytes(data))
    with pytest.raises(FutureFormatError, match="version 2"):
        read_head(storage)


def test_log_reading_beside_a_live_writer_follows_it() -> None:
    storage = _run()
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed, segment_bytes=700)
    writer.append([started(claimed)])
    for group in range(12):
        writer.append([session_done(group)])
        writer.flush(FLUSH_S)
        log = read_head(storage.open_as_new_process())
        assert log.end == writer.position
        assert len(log.records) == group + 2
