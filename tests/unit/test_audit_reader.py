"""The audit's reader: what counts, what is a tail, what is damage."""

from __future__ import annotations

from pathlib import Path

import audit_writer as w
import pytest
from audit_cases import assert_clean, assert_damage

from perdure.audit import audit_run, checks, reader
from perdure.audit.history import Event
from perdure.audit.report import Findings
from perdure.core.errors import FutureFormatError, NothingToResumeError, RunBusyError


def test_healthy_run_is_clean_and_counted(tmp_path: Path) -> None:
    report = assert_clean(w.healthy(tmp_path).save())
    expected = {
        "incarnations.claimed": 2,
        "incarnations.sealed": 1,
        "log.segments": 4,
        "log.tail_bytes_cut": 0,
        "groups.submitted": 4,
        "groups.trained": 4,
        "training.global_steps": 2,
        "training.local_updates": 4,
        "training.sessions": 8,
        "training.tokens": 28,
        "checkpoints.committed": 3,
        "metrics.rows": 4,
    }
    assert {name: report.counts[name] for name in expected} == expected


def test_audit_changes_no_file(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    audit_run(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(NothingToResumeError):
        audit_run(tmp_path)


@pytest.mark.parametrize("stream", ["control", "payload"])
def test_sealed_bytes_must_stay(tmp_path: Path, stream: str) -> None:
    run = w.healthy(tmp_path).save()
    path = run / f"log/{stream}-000001-000000.plog"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert_damage(run, f"{path.name}: the first")


def test_sealed_segment_must_not_shrink_or_vanish(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    path = run / "log/control-000001-000000.plog"
    path.write_bytes(path.read_bytes()[:-64])
    assert_damage(run, f"{path.name}: the first")
    path.unlink()
    assert_damage(run, f"{path.name}: the segment is missing")


def test_seal_counts_records(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.seals[1]["segments"]["control-000001-000000.plog"]["records"] += 1
    assert_damage(run.save(), "the seal says")


def test_bytes_beyond_the_seal_are_fenced(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    zombie = run.incarnations[1]
    end = len(zombie.control.segments[0])
    # One batch was under way when the seal was made: its payload lies beyond the seal as well.
    zombie.write(w.session_done(0, 0))
    zombie.payload.open()
    report = assert_clean(run.save())
    sizes = [len(data) for data in zombie.payload.segments]
    fenced = sum(sizes) - run.seals[1]["segments"]["payload-000001-000000.plog"]["valid_end"]
    assert report.counts["log.fenced_bytes"] == fenced + len(zombie.control.segments[0]) - end


def test_seal_that_cuts_acknowledged_bytes_is_damage(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    zombie = run.incarnations[1]
    zombie.write(w.evaluated(1, digest="a"))
    zombie.write(w.evaluated(1, digest="b"))  # says that the one before was durable
    assert_damage(run.save(), "bytes were durable")


def test_unlisted_segment_with_acknowledged_bytes_is_damage(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.incarnations[1].control.open()
    run.incarnations[1].write(w.evaluated(1, digest="a"))
    assert_damage(run.save(), "control-000001-000001.plog", "bytes were durable")


def test_torn_record_at_the_head_is_a_tail(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    control = run.incarnations[2].control
    end = len(control.segments[0])
    run.incarnations[2].write(w.evaluated(2))
    del control.segments[0][-10:]
    report = assert_clean(run.save())
    assert report.counts["log.tail_bytes_cut"] == len(control.segments[0]) - end


def test_batch_without_its_last_record_is_a_tail(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    end = len(run.incarnations[2].control.segments[0])
    run.incarnations[2].write(w.evaluated(2), flags=0)
    # Its second record says that the batch before was durable, as does the first.
    run.incarnations[2].write(w.evaluated(2, digest="x"), flags=0, durable_upto=end)
    assert assert_clean(run.save()).counts["log.tail_bytes_cut"] > 0


def test_bad_bytes_below_the_watermark_are_damage(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    path = run / "log/control-000002-000000.plog"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert_damage(run, path.name, "bytes were durable")


def test_watermark_is_found_behind_a_magic_that_means_nothing(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    path = run / "log/control-000002-000000.plog"
    data = bytearray(path.read_bytes())
    data[70:74] = data[128:132] = b"PLOG"
    path.write_bytes(data)
    assert_damage(run, path.name, "bytes were durable")


def test_segments_above_the_head(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    control = run.incarnations[2].control
    control.segments.append(bytearray(b"\0" * 128))
    run.save()
    assert assert_clean(run.path).counts["log.tail_bytes_cut"] == 128
    control.lsn += 1  # a first record was lost, and a second one says that it was durable
    control.append(19, key="closed/2", fields=w.closed(2).fields, durable_upto=64)
    assert_damage(run.save(), "control-000002-000001.plog", "bytes were durable")


def test_chain_of_segments(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    records = w.first_step(run)
    for record in records:
        one.write(record)
        one.control.open()
        one.payload.open()
    run.incarnation(2)
    report = assert_clean(run.save())
    assert report.counts["log.segments"] == 2 * (len(records) + 1) + 2


@pytest.mark.parametrize("newest", [True, False])
def test_earlier_segment_must_keep_what_the_chain_says(tmp_path: Path, newest: bool) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.write(w.phase_step(1))
    one.control.open()
    one.write(w.phase_step(2))
    if not newest:
        run.incarnation(2)
    path = run.save() / "log/control-000001-000000.plog"
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    assert_damage(tmp_path, f"{path.name}: shorter than the {len(whole)} bytes")
    path.write_bytes(whole[:-1] + b"\1")
    assert_damage(tmp_path, path.name)
    path.unlink()
    assert_damage(tmp_path, f"{path.name}: the segment is missing")


def test_earlier_segment_of_another_history_is_damage(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = w.Run(tmp_path / name)
        one = run.incarnation(1)
        one.write(w.phase_step(1, digest=name))
        one.control.open()
        run.save()
    name = "log/control-000001-000000.plog"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    assert_damage(tmp_path / "a", "are not those that a later segment continues from")


def test_abandoned_end_of_an_earlier_segment_does_not_count(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.write(w.phase_step(1))
    end, lsn = len(one.control.segments[0]), one.control.lsn
    one.write(w.phase_step(2, digest="failed"))
    one.control.lsn = lsn
    one.control.open(length=end)
    one.write(w.phase_step(2))
    report = assert_clean(run.save())
    assert report.counts["log.control_records"] == lsn + 2
    run.incarnation(2)
    assert_clean(run.save())


def test_segment_abandoned_before_its_first_commit_does_not_count(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    lsn = one.control.lsn
    one.control.open()  # its write failed, and what reached the disk is whole all the same
    one.control.lsn = lsn
    one.control.open(previous=0)
    one.write(w.phase_step(1))
    assert assert_clean(run.save()).counts["log.segments"] == 3
    del one.control.segments[1][:]
    assert_clean(run.save())
    (tmp_path / "log/control-000001-000001.plog").unlink()
    assert_damage(tmp_path, "control-000001-000001.plog: the segment is missing")


def test_chain_may_not_leave_out_acknowledged_bytes(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    lsn = one.control.lsn
    one.control.open()
    one.write(w.phase_step(1))
    one.control.lsn = lsn
    one.control.open(previous=0)
    assert_damage(run.save(), "control-000001-000001.plog", "bytes were durable, 0 count")


def test_chain_that_ends_inside_a_batch_is_damage(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.write(w.phase_step(1), flags=0)
    middle = len(one.control.segments[0])
    one.write(w.phase_step(2), durable_upto=0)
    one.control.open(length=middle)
    assert_damage(run.save(), f"byte {middle} is not the end of a complete batch")


def test_chain_that_does_not_go_back_is_damage(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    control = run.incarnation(1).control
    control.segments.append(bytearray())
    fields = {"run_id": w.RUN_ID, "incarnation": 1, "stream": "control", "segment": 1}
    previous = {"previous_segment": 1, "previous_length": 0, "previous_checksum": 0}
    control.append(1, key="segment/1/control/1", fields=fields | previous)
    assert_damage(run.save(), "continues from segment 1")


def test_sealed_chain_stays_inside_the_seal(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.control.open()
    run.incarnation(2)
    del run.seals[1]["segments"]["control-000001-000000.plog"]
    assert_damage(run.save(), "continues from segment 0")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run_id", "f" * 32),
        ("incarnation", 2),
        ("stream", "payload"),
        ("segment", 1),
        ("previous_length", None),
    ],
)
def test_segment_must_say_what_it_is(tmp_path: Path, name: str, value: object) -> None:
    run = w.Run(tmp_path)
    control = run.incarnation(1).control
    control.segments, control.lsn = [bytearray()], 0
    fields = {
        "run_id": w.RUN_ID,
        "incarnation": 1,
        "stream": "control",
        "segment": 0,
        "previous_segment": -1,
        "previous_length": 0,
        "previous_checksum": 0,
    }
    control.append(1, key="segment/1/control/0", fields=fields | {name: value})
    assert_damage(run.save(), "does not say that it is this segment")


def test_first_record_must_open_the_segment(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.control.segments, one.control.lsn = [bytearray()], 0
    one.write(w.phase_step(1))
    assert_damage(run.save(), "does not say that it is this segment")


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"lsn": 9}, "record 9 where record 2 belongs"),
        ({"incarnation": 2}, "a record of incarnation 2"),
    ],
)
def test_sequence_of_records(tmp_path: Path, header: dict[str, int], text: str) -> None:
    run = w.Run(tmp_path)
    run.incarnation(1).write(w.phase_step(1), **header)
    assert_damage(run.save(), text)


def test_payload_record_in_the_control_stream(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    run.incarnation(1).control.append(101, key="trajectories/g0.s0", fields={})
    assert_damage(run.save(), "type 101 in the control stream")


def test_second_opening_inside_a_segment(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    run.incarnation(1).control.append(1, key="segment/1/control/0", fields={})
    assert_damage(run.save(), "type 1 at this place")


@pytest.mark.parametrize("stream", ["control", "payload"])
def test_stream_shorter_than_the_other_says(tmp_path: Path, stream: str) -> None:
    run = w.healthy(tmp_path)
    incarnation = run.incarnations[2]
    other = incarnation.payload if stream == "control" else incarnation.control
    lost = incarnation.control if stream == "control" else incarnation.payload
    data = lost.segments[0]
    last = max(data.rfind(b"PLOG"), 64)
    if other.name == "control":
        run.incarnations[2].write(w.evaluated(2))
    else:
        other.append(103, key="transitions/a/0", fields={})
    del data[last:]
    assert_damage(run.save(), f"log/{stream}-000002:", "durable ones")


def test_record_of_a_torn_batch_is_believed_about_the_other_stream(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.incarnations[2].write(w.evaluated(2), flags=0, other=99)
    assert_damage(run.save(), "log/payload-000002:", "of 99 durable ones")


def test_lost_control_stream_of_the_newest_incarnation(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    (run / "log/control-000002-000000.plog").unlink()
    assert_damage(run, "log/control-000002: 0 records")


@pytest.mark.parametrize("header", [{"version": 2}, {"flags": 3}])
def test_newer_records_stop_the_reader(tmp_path: Path, header: dict[str, int]) -> None:
    run = w.Run(tmp_path)
    run.incarnation(1).write(w.phase_step(1), **header)
    with pytest.raises(FutureFormatError):
        audit_run(run.save())


def test_unknown_type_stops_the_reader(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    run.incarnation(1).control.append(21, key="x", fields={})
    with pytest.raises(FutureFormatError):
        audit_run(run.save())


def test_record_of_no_version_does_not_count(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    run.incarnation(1).write(w.phase_step(1), version=0)
    assert assert_clean(run.save()).counts["log.tail_bytes_cut"] > 0


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"GOLP"), (12, b"\xff\xff\0\0"), (8, b"\0\0\0\0")],
    ids=["magic", "fields longer than the record", "no length"],
)
def test_header_that_cannot_be_does_not_count(tmp_path: Path, offset: int, value: bytes) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    start = len(one.control.segments[0])
    one.write(w.phase_step(1))
    record = one.control.segments[0][start:]
    record[offset : offset + len(value)] = value
    record[56:64] = bytes(8)
    record[56:64] = w.xxhash.xxh3_64_intdigest(bytes(record)).to_bytes(8, "little")
    one.control.segments[0][start:] = record
    assert assert_clean(run.save()).counts["log.tail_bytes_cut"] == len(record)


def test_files_of_other_names_are_ignored(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    for name in ("incarnations/.tmp-3.json", "seals/x.json", "log/control-1-0.plog", "log/x"):
        run.files[name] = b"?"
    assert_clean(run.save())


def test_record_larger_than_the_hashing_threshold(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.write(w.phase_step(1, digest="x" * 10_000))
    assert_clean(run.save())
    one.control.segments[0][-100] ^= 1
    one.control.append(19, key="closed/1", fields=w.closed(1).fields)
    assert_damage(run.save(), "bytes were durable")


def test_large_segments_are_mapped(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.write(w.phase_step(1, digest="x" * (1 << 20)))
    one.write(w.phase_step(2))
    assert_clean(run.save())


def test_reader_beside_a_writer_reads_again_when_a_claim_comes_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = w.healthy(tmp_path)
    run.save()
    original = reader.read_segment
    claims = iter([3])

    def reading(path: Path, *args: str, **kwargs: int) -> object:
        for number in claims:
            run.incarnation(number)
            run.save()
        return original(path, *args, **kwargs)

    monkeypatch.setattr(reader, "read_segment", reading)
    assert assert_clean(tmp_path).counts["incarnations.claimed"] == 3


def test_reader_gives_up_when_claims_never_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = w.healthy(tmp_path)
    run.save()
    original = reader.read_segment

    def reading(path: Path, *args: str, **kwargs: int) -> object:
        if path.name == "control-000001-000000.plog":
            run.incarnation(max(run.incarnations) + 1)
            run.save()
        return original(path, *args, **kwargs)

    monkeypatch.setattr(reader, "read_segment", reading)
    with pytest.raises(RunBusyError):
        audit_run(tmp_path)


def test_reader_beside_a_writer_does_not_call_a_growing_control_log_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = w.healthy(tmp_path)
    run.save()
    original = reader.read_segment

    def reading(path: Path, stream: str, **kwargs: int) -> object:
        if path.name == "payload-000002-000000.plog":
            run.incarnations[2].write(w.evaluated(2))
            run.incarnations[2].payload.append(103, key="transitions/a/0", fields={})
            run.save()
        return original(path, stream, **kwargs)

    monkeypatch.setattr(reader, "read_segment", reading)
    assert_clean(tmp_path)


def test_damage_hides_the_experience_and_says_so(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    (run / "seals/1.json").unlink()
    report = audit_run(run)
    assert any("were not judged" in finding.what for finding in report.findings)
    assert "groups.submitted" not in report.counts


def test_checkpoints_collected_while_the_audit_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = w.healthy(tmp_path)
    run.save()
    original = checks.check_checkpoint

    def checking(path: Path, commit: Event, findings: Findings) -> int:
        directory = commit.fields["directory"]
        if directory != "step-00000001-1":
            run.incarnations[2].write(w.collect(directory))
            run.files = {k: v for k, v in run.files.items() if directory not in k}
            run.save()
            (path / "checkpoints" / directory / "manifest.json").unlink()
        return original(path, commit, findings)

    monkeypatch.setattr(checks, "check_checkpoint", checking)
    assert_clean(tmp_path)
