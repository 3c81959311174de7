"""Sealed JSON and the files of incarnations: what must be there, and what it must say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import audit_writer as w
import pytest
from audit_cases import assert_clean, assert_damage

from perdure.audit import audit_run
from perdure.core.errors import FutureFormatError


def edit_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change a sealed JSON file and seal it again."""
    value = json.loads(path.read_text())
    del value["digest"]
    change(value)
    path.write_bytes(w.sealed(value))


def test_missing_run_file_is_damage(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    (run / "run.json").unlink()
    assert_damage(run, "run.json: the file is missing")


@pytest.mark.parametrize("name", ["run.json", "incarnations/1.json", "seals/1.json"])
@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 1, "digest": "0"}', "[" * 10**5], ids=range(4)
)
def test_wrong_sealed_json_is_damage(tmp_path: Path, name: str, text: str) -> None:
    run = w.healthy(tmp_path).save()
    (run / name).write_text(text)
    assert_damage(run, name)


@pytest.mark.parametrize("name", ["run.json", "incarnations/1.json", "seals/1.json"])
def test_another_kind_of_file_in_its_place_is_damage(tmp_path: Path, name: str) -> None:
    run = w.healthy(tmp_path).save()
    other = "incarnations/1.json" if name == "seals/1.json" else "seals/1.json"
    (run / name).write_bytes((run / other).read_bytes())
    assert_damage(run, f"{name}: it has no")


def test_a_number_far_away_is_damage_and_costs_nothing(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    stray = run / "incarnations/999999999999.json"
    stray.write_bytes((run / "incarnations/1.json").read_bytes())
    assert_damage(run, "incarnations/3.json: the file is missing")


def test_white_space_in_sealed_json_is_harmless(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    path = run / "seals/1.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    assert_clean(run)


@pytest.mark.parametrize("name", ["run.json", "incarnations/1.json", "seals/1.json"])
def test_newer_sealed_json_stops_the_reader(tmp_path: Path, name: str) -> None:
    run = w.healthy(tmp_path).save()
    edit_json(run / name, lambda value: value.update(format=2))
    with pytest.raises(FutureFormatError):
        audit_run(run)


def test_unknown_old_format_is_damage(tmp_path: Path) -> None:
    run = w.healthy(tmp_path).save()
    edit_json(run / "run.json", lambda value: value.update(format=0))
    assert_damage(run, "run.json: format 0")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("incarnations/1.json", {"run_id": "f" * 32}),
        ("incarnations/2.json", {"incarnation": 3}),
        ("seals/1.json", {"run_id": "f" * 32}),
    ],
)
def test_file_of_another_run_or_incarnation(
    tmp_path: Path, name: str, change: dict[str, object]
) -> None:
    run = w.healthy(tmp_path).save()
    edit_json(run / name, lambda value: value.update(change))
    assert_damage(run, f"{name}: it belongs to another")


@pytest.mark.parametrize("name", ["incarnations/1.json", "incarnations/2.json", "seals/1.json"])
def test_missing_claim_or_seal_is_damage(tmp_path: Path, name: str) -> None:
    run = w.healthy(tmp_path).save()
    (run / name).unlink()
    assert_damage(run, f"{name}: the")


def test_claim_without_records_needs_no_seal_below_it(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.files["incarnations/3.json"] = w.sealed(w.claimed(3))
    assert assert_clean(run.save()).counts["incarnations.claimed"] == 3


@pytest.mark.parametrize("sealed_by", [0, 7])
def test_seal_by_nobody(tmp_path: Path, sealed_by: int) -> None:
    run = w.healthy(tmp_path).save()
    edit_json(run / "seals/1.json", lambda value: value.update(sealed_by=sealed_by))
    assert_damage(run, f"seals/1.json: sealed by {sealed_by}")


def test_seal_that_lists_a_foreign_file(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    segments = run.seals[1]["segments"]
    segments["control-000002-000000.plog"] = segments["control-000001-000000.plog"]
    assert_damage(run.save(), "it lists control-000002-000000.plog")
