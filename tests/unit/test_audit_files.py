"""Checkpoints and metrics beside the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import audit_writer as w
import pytest
from audit_cases import add, assert_violation, change, find

from perdure.audit import Finding, audit_run
from perdure.core.errors import FutureFormatError


@pytest.mark.parametrize("change", ["flip", "grow", "unlink"])
@pytest.mark.parametrize("name", ["model/policy.safetensors", "state.msgpack", "manifest.json"])
def test_wrong_checkpoint_file_is_damage(tmp_path: Path, name: str, change: str) -> None:
    run = w.healthy(tmp_path).save()
    path = run / "checkpoints/step-00000001-1" / name
    if change == "unlink":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data + b" " if change == "grow" else bytes([data[0] ^ 1]) + data[1:])
    report = audit_run(run)
    assert [(f.severity, f.where) for f in report.findings] == [
        ("damage", f"checkpoints/step-00000001-1/{name}")
    ]
    if change == "grow" and name != "manifest.json":
        assert "bytes, the manifest says" in report.findings[0].what


def test_empty_checkpoint_file(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    entry = {"bytes": 0, "xxh3_128": w.xxhash.xxh3_128_hexdigest(b"")}
    commit = run.checkpoint("step-00000000-1", manifest={"files": {"empty": entry}})
    run.incarnation(1).write(commit)
    run.files["checkpoints/step-00000000-1/empty"] = b""
    assert not audit_run(run.save()).findings


@pytest.mark.parametrize("whole", [b"", b"many bytes", b"other bytes"])
@pytest.mark.parametrize("content", [b"many bytes", b"many bytez", b"mbny bytes", b"many byte"])
def test_a_file_is_checked_chunk_by_chunk(tmp_path: Path, content: bytes, whole: bytes) -> None:
    """Older manifests have a checksum of the file as well."""
    run = w.Run(tmp_path)
    sums = [w.xxhash.xxh3_128_hexdigest(part) for part in (b"many", b" byt", b"es")]
    entry = {"bytes": 10, "chunks": {"bytes": 4, "xxh3_128": sums}}
    if whole:
        entry["xxh3_128"] = w.xxhash.xxh3_128_hexdigest(whole)
    manifest = {"features": ["chunks"], "files": {"big": entry}}
    run.incarnation(1).write(run.checkpoint("step-00000000-1", manifest=manifest))
    run.files["checkpoints/step-00000000-1/big"] = content
    found = [(f.severity, f.where) for f in audit_run(run.save()).findings]
    right = content == b"many bytes" and whole != b"other bytes"
    assert found == ([] if right else [("damage", "checkpoints/step-00000000-1/big")])


@pytest.mark.parametrize("content", [b"rows", b"row", b"rowz", None])
def test_segments_are_checked_where_the_manifest_says_they_are(
    tmp_path: Path, content: bytes | None
) -> None:
    run = w.Run(tmp_path)
    path = "segments/replay/000000000000-1-1-0.seg"
    entry = {"path": path, "bytes": 4, "xxh3_128": w.xxhash.xxh3_128_hexdigest(b"rows")}
    manifest = {"features": ["segments"], "segments": {"replay": [entry]}}
    run.incarnation(1).write(run.checkpoint("step-00000000-1", manifest=manifest))
    if content is not None:
        run.files[path] = content
    found = [(f.severity, f.where) for f in audit_run(run.save()).findings]
    assert found == ([] if content == b"rows" else [("damage", path)])


def test_manifest_that_is_no_sealed_json_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    with monkeypatch.context() as patched:
        patched.setattr(w, "sealed", lambda _: b"{}")
        one.write(run.checkpoint("step-00000000-1"))
    assert [finding.what for finding in audit_run(run.save()).findings] == [
        "the digest does not match"
    ]


@pytest.mark.parametrize("manifest", [{"format": 2}, {"features": ["sharded"]}])
def test_manifest_of_a_newer_version_stops_the_audit(
    tmp_path: Path, manifest: dict[str, object]
) -> None:
    run = w.plain(tmp_path, lambda r: [r.checkpoint("step-00000000-1", manifest=manifest)])
    with pytest.raises(FutureFormatError):
        audit_run(run)


@pytest.mark.parametrize(
    "manifest",
    [
        {"name": {"phase": "warm", "step": 0, "incarnation": 1}},
        {"name": {"phase": "train", "step": 1, "incarnation": 1}},
        {"position": [1, 0, 64]},
    ],
)
def test_manifest_and_commit_must_agree(tmp_path: Path, manifest: dict[str, object]) -> None:
    run = w.plain(tmp_path, lambda r: [r.checkpoint("step-00000000-1", manifest=manifest)])
    assert_violation(run, "a commit and its manifest")


WHOLE = [[0, [0, 0], [3, 2]], [1, [3, 0], [2, 2]], [2, [0, 2], [5, 1]], [3, [5, 3], [0, 0]]]


@pytest.mark.parametrize(
    ("shape", "parts", "what"),
    [
        ([5, 3], WHOLE, ""),
        ([], [[0, [], []]], ""),
        ([0, 2], [], ""),
        ([5, 3], WHOLE[1:], "no part holds some"),
        ([5, 3], WHOLE[:2], "no part holds some"),
        ([], [], "no part holds some"),
        ([5, 3], [*WHOLE, [3, [4, 2], [1, 1]]], "two parts hold the same"),
        # As many elements as there should be, at the wrong places.
        ([4], [[0, [0], [2]], [1, [1], [2]]], "no part holds some"),
        ([5, 3], [*WHOLE[:2], [2, [0, 2], [5, 2]]], "the part of rank 2 reaches out"),
        ([5, 3], [[0, [0], [5]]], "cannot be read"),
        ([5, 3], [[0, [0, 0]]], "cannot be read"),
    ],
)
def test_parts_of_ranks_are_the_whole_tensor(
    tmp_path: Path, shape: list[int], parts: list[object], what: str
) -> None:
    run = w.Run(tmp_path)
    tensor = {"dtype": "F32", "shape": shape, "parts": parts}
    manifest = {"features": ["ranks"], "components": {"policy": {"shards": {"w": tensor}}}}
    run.incarnation(1).write(run.checkpoint("step-00000000-1", manifest=manifest))
    findings = audit_run(run.save()).findings
    assert len(findings) == bool(what)
    for finding in findings:
        assert (finding.severity, finding.where) == (
            "damage",
            "checkpoints/step-00000000-1/manifest.json",
        )
        assert finding.what.startswith("tensor w of policy: ")
        assert what in finding.what


def test_parts_that_the_engine_has_stored_are_the_whole() -> None:
    golden = Path(__file__).parents[1] / "golden" / "ranks-v1"
    assert not audit_run(golden).findings


def test_quarantined_checkpoint_is_noted(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    directory = "checkpoints/step-00000001-1/"
    run.files = {k: v for k, v in run.files.items() if not k.startswith(directory)}
    run.files["quarantine/step-00000001-1.reason.json"] = b"{}"
    report = audit_run(run.save())
    assert report.ok
    assert [finding.severity for finding in report.findings] == ["note"]


def test_collected_checkpoint_needs_no_files(tmp_path: Path) -> None:
    run = w.healthy(tmp_path, add(w.collect("step-00000001-1", "never-committed")))
    run.files = {k: v for k, v in run.files.items() if "step-00000001-1" not in k}
    assert not audit_run(run.save()).findings


def test_collecting_the_last_checkpoint(tmp_path: Path) -> None:
    directories = ("warm-00000008-1", "step-00000000-1", "step-00000001-1")
    run = w.healthy(tmp_path, add(w.collect(*directories)))
    assert_violation(run.save(), "the last committed checkpoint is never collected")


def test_rewind_keeps_the_checkpoint_that_it_goes_back_to(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    two = run.incarnations[2]
    base = two.end
    two.write_all(w.finished_group(4, version=2))
    two.write(run.checkpoint("step-00000002-2", position=base))
    run.incarnation(3, base_position=base)
    report = audit_run(run.save())
    assert not report.findings
    assert report.counts["checkpoints.committed"] == 4


def test_void_checkpoint_needs_no_files(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    two = run.incarnations[2]
    two.write(run.checkpoint("step-00000002-2"))
    run.files = {k: v for k, v in run.files.items() if "step-00000002-2" not in k}
    run.incarnation(3, base_position=run.incarnations[1].end)
    assert not audit_run(run.save()).findings


@pytest.mark.parametrize(
    ("directory", "shift", "text"),
    [
        ("step-00000002-2", -1, "is not the end of an earlier kept record"),
        ("step-00000002-2", 10_000_000, "is not the end of an earlier kept record"),
        ("step-00000003-2", 0, "step 3 is not done"),
        ("step-00000001-2", 0, "step 2 has begun"),
        ("warm-00000009-2", -1, "is not the end of an earlier kept record"),
    ],
)
def test_position_of_a_checkpoint(tmp_path: Path, directory: str, shift: int, text: str) -> None:
    run = w.healthy(tmp_path)
    two = run.incarnations[2]
    incarnation, segment, offset = two.end
    two.write(run.checkpoint(directory, position=[incarnation, segment, offset + shift]))
    assert_violation(run.save(), text)


def test_position_of_a_checkpoint_before_its_step_was_done(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    records = w.first_step(run)
    middle = find(records, "step_done")
    one.write_all(records[:middle])
    position = one.end
    one.write(records[middle])
    one.write(run.checkpoint("step-00000001-1", position=position))
    assert_violation(run.save(), "step 1 is not done at its position")


def test_position_after_the_commit_itself(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    incarnation, segment, offset = one.end
    one.write(run.checkpoint("warm-00000001-1", position=[incarnation, segment, offset + 1344]))
    while one.end[2] < offset + 1344:
        one.write(w.closed(1))
    assert one.end[2] == offset + 1344
    assert_violation(run.save(), "is not the end of an earlier kept record")


def test_metrics_beyond_the_log_are_damage(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.metrics([(1, "state-1"), (2, "state-2"), (3, "state-3")])
    report = audit_run(run.save())
    assert [(f.severity, f.where) for f in report.findings] == [
        ("damage", "metrics/steps.jsonl line 3")
    ]
    assert "the log is shorter than its metrics" in report.findings[0].what


def test_metrics_of_other_weights_are_damage(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.metrics([(1, "other")], "evaluations.jsonl")
    assert [f.severity for f in audit_run(run.save()).findings] == ["damage"]


def test_metrics_of_void_and_redone_steps_are_known(tmp_path: Path) -> None:
    run = w.healthy(
        tmp_path, change("redone", to=w.redone(1, incarnation=2, digest="d", equal=False))
    )
    run.incarnation(3, base_position=run.incarnations[1].end)
    run.metrics([(1, "state-1"), (1, "d"), (2, "state-2")])
    assert audit_run(run.save()).ok


def test_torn_and_unreadable_rows(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.files["metrics/steps.jsonl"] += b'{"global_step": 3, "dig'
    assert not audit_run(run.save()).findings
    run.files["metrics/steps.jsonl"] += b'\n[]\n{"global_step": "x", "digest": "y"}\n'
    findings: Sequence[Finding] = audit_run(run.save()).findings
    assert [finding.severity for finding in findings] == ["note"] * 3
