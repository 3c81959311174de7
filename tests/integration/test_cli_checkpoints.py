"""``perdure ckpt verify|diff`` over runs of a script, through the command line."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from ckpt_cases import CHUNK, WEIGHTS, flip, names, perdure, script

FILE = "tensors/model.safetensors"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("large") / "run"
    script(run, steps=2, weights=WEIGHTS)
    return run


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("small") / "run"
    script(run, steps=2)
    return run


@pytest.mark.parametrize("threads", [0, 1])
def test_verify_says_which_file_and_which_chunk(large: Path, tmp_path: Path, threads: int) -> None:
    run = tmp_path / "run"
    shutil.copytree(large, run)
    assert perdure("ckpt", "verify", run, "--threads", threads)[0] == 0
    first, second = names(run)[-2:]
    flip(run / "checkpoints" / second / FILE, CHUNK + 5)
    flip(run / "checkpoints" / second / FILE, 2 * CHUNK + 5)
    flip(run / "checkpoints" / second / "state.msgpack", 9)
    code, out, err = perdure("ckpt", "verify", run, "--threads", threads)
    assert code == 5
    assert f"{FILE}: checksum does not match in chunks 1, 2" in out
    assert f"1 of {len(names(run))} checkpoints are damaged: {second}" in err
    rows = json.loads(perdure("ckpt", "verify", run, "--json")[1])["checkpoints"]
    reports = {row["checkpoint"]: row for row in rows}
    assert reports[first]["ok"] is True
    assert reports[second]["chunks"] == {FILE: [1, 2]}
    assert sorted(reports[second]["problems"]) == ["state.msgpack", FILE]


def test_show_says_what_is_stored(large: Path) -> None:
    name = names(large)[-1]
    stored = json.loads((large / "checkpoints" / name / "manifest.json").read_bytes())
    shown = json.loads(perdure("ckpt", "show", large, name, "--json")[1])
    assert shown == {**stored, "ok": True}
    assert "chunks" in stored["features"]
    lines = perdure("ckpt", "show", large, name)[1].splitlines()
    (line,) = [line for line in lines if FILE in line]
    assert line.endswith(f"{len(stored['files'][FILE]['chunks']['xxh3_128'])} chunks")
    (line,) = [line for line in lines if "state.msgpack" in line]
    assert line.endswith(stored["files"]["state.msgpack"]["xxh3_128"])


def test_diff_measures_every_tensor_and_value(small: Path) -> None:
    first, second = names(small)[-2:]
    code, out, err = perdure("ckpt", "diff", f"{small}:{first}", small)
    assert code == 10
    assert "the checkpoints differ" in err
    assert f"B {small} {second}" in out
    assert "max abs difference 1, 8 of 8 elements" in out
    report = json.loads(perdure("ckpt", "diff", f"{small}:{first}", small, "--json")[1])
    parts = {(part["component"], part["part"]): part for part in report["parts"]}
    seen = parts["counter", "value data.seen"]
    assert (seen["a"], seen["b"], seen["max_abs"]) == ("1", "2", 1.0)
    assert ("counter", "value data.name") not in parts
    assert report["equal"] is False
    assert report["counts"]["different"] == len(parts)
    everything = json.loads(
        perdure("ckpt", "diff", f"{small}:{first}", small, "--all", "--json")[1]
    )
    named = {(part["component"], part["part"]): part for part in everything["parts"]}
    assert named["counter", "value data.name"]["verdict"] == "equal"


def test_diff_of_the_same_state_is_empty(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "a:b"
    script(other, steps=2)
    code, out, _ = perdure("ckpt", "diff", small, other)
    assert code == 0, out
    assert ", 0 different, 0 only in A, 0 only in B" in out


def test_diff_names_what_only_one_has_and_other_shapes(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    script(other, steps=2, weights=9, more=np.zeros(3))
    report = json.loads(perdure("ckpt", "diff", small, other, "--json")[1])
    verdicts = {(part["component"], part["part"].split()[0]): part for part in report["parts"]}
    assert verdicts["more", "component"]["verdict"] == "only in B"
    tensor = verdicts["model", "tensor"]
    assert (tensor["verdict"], tensor["max_abs"]) == ("different", None)
    assert (tensor["a"], tensor["b"]) == ("F32 [8]", "F32 [9]")


@pytest.mark.parametrize(
    ("left", "right", "elements", "largest"),
    [
        (np.array([1.0, math.nan]), np.array([1.0, math.nan]), 0, 0.0),
        (np.array([1.0, 2.0]), np.array([1.0, math.nan]), 1, math.nan),
        (np.array([0.0, 3.0]), np.array([-0.0, 3.0]), 1, 0.0),
        (np.array([math.inf, 1.0]), np.array([-math.inf, 1.0]), 1, math.inf),
        (np.array([2**63 - 1, 0]), np.array([-(2**63), 0]), 1, float(2**64 - 1)),
        (np.array([True, False]), np.array([False, False]), 1, 1.0),
        (np.array([1 + 1j], "c8"), np.array([1 - 2j], "c8"), 1, 3.0),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0, 0.0),
        (torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 2.5]).bfloat16(), 1, 0.5),
    ],
)
def test_diff_of_numbers_that_are_hard_to_subtract(
    tmp_path: Path, left: Any, right: Any, elements: int, largest: float
) -> None:
    for name, array in (("a", left), ("b", right)):
        script(tmp_path / name, steps=1, extra=array)
    report = json.loads(
        perdure("ckpt", "diff", tmp_path / "a", tmp_path / "b", "--all", "--json")[1]
    )
    part = next(
        p for p in report["parts"] if (p["component"], p["part"][:6]) == ("extra", "tensor")
    )
    assert part["elements"] == elements
    assert float(part["max_abs"]) == pytest.approx(largest, nan_ok=True)


def test_diff_refuses_damage_and_unknown_names(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small, run)
    newest = names(run)[-1]
    code, _, err = perdure("ckpt", "diff", f"{run}:{newest[:-1]}", small)
    assert (code, "did you mean" in err) == (6, True)
    flip(run / "checkpoints" / newest / "state.msgpack", 9)
    code, _, err = perdure("ckpt", "diff", run, small)
    assert (code, "checksum does not match" in err) == (5, True)
    flip(run / "checkpoints" / newest / "manifest.json", 9)
    code, _, err = perdure("ckpt", "diff", run, small)
    assert (code, "digest differs from the committed one" in err) == (5, True)


def test_exported_files_are_what_was_saved(small: Path, tmp_path: Path) -> None:
    first = names(small)[0]
    code, out, err = perdure("ckpt", "export", f"{small}:{first}", tmp_path / "all")
    assert code == 0, err
    with safetensors.safe_open(tmp_path / "all" / "model.safetensors", framework="np") as file:
        (name,) = file.keys()
        np.testing.assert_array_equal(file.get_tensor(name), np.ones(8, np.float32))
    values = json.loads((tmp_path / "all" / "counter.json").read_text())
    assert values["data"] == {"seen": 1, "name": "x"}
    assert str(tmp_path / "all" / "model.safetensors") in out
    code, _, err = perdure("ckpt", "export", small, tmp_path / "all")
    assert (code, "not an empty directory" in err) == (2, True)
    only = ("--component", "model", "--json")
    report = json.loads(perdure("ckpt", "export", small, tmp_path / "one", *only)[1])
    assert report["files"] == ["model.safetensors", "model.json"]
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == sorted(report["files"])
    code, _, err = perdure("ckpt", "export", small, tmp_path / "no", "--component", "modle")
    assert (code, "model" in err, (tmp_path / "no").exists()) == (2, True, False)


def test_nothing_damaged_is_exported(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small, run)
    flip(run / "checkpoints" / names(run)[-1] / FILE, 4100)
    code, _, err = perdure("ckpt", "export", run, tmp_path / "out")
    assert (code, f"{FILE}: checksum does not match" in err) == (5, True)
    assert not (tmp_path / "out" / "model.safetensors").exists()
