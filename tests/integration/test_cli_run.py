"""The commands on a real, very small run: train, look, break, resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from perdure.cli.main import app
from perdure.models import weights_of
from perdure.models.huggingface import load_pretrained

RECIPE = """
deterministic: true
task: {name: sort_digits, digits: {min_digits: 2, max_digits: 2}}
model: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 2, head_dim: 8, intermediate_size: 16}
learner: {supervised: {steps: 2, batch_size: 4}}
rollout: {sessions_per_group: 2, max_new_tokens: 4, slots: 8}
trainer: {total_steps: 2, train_batch_size: 2}
validation: {every_steps: 1, prompts: 4}
checkpoint: {every_steps: 1, warm_start_every_steps: 1}
"""


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "r.yaml").write_text(RECIPE)
    code, out, err = run("train", folder / "r.yaml", "--run", folder / "run")
    assert (code, err) == (0, "")
    assert "\nstep global_step=2 " in out
    assert "\nheld-out accuracy 0." in out
    assert "(after the warm start 0." in out
    return folder / "run"


def test_a_run_whose_output_nobody_reads_goes_on(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    overrides = ["mode=separate_async", "deterministic=false", "--run", str(tmp_path / "run")]
    main = "from perdure.cli.entry import main; main()"
    read, unread = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", main, "train", str(tmp_path / "r.yaml"), *overrides],
        stdout=unread,
        stderr=unread,
        check=False,
    )
    os.close(unread)
    assert done.returncode == 0
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert "run_finished" in [json.loads(line)["event"] for line in events]


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_the_run_leaves_its_files(trained: Path) -> None:
    rows = [json.loads(x) for x in (trained / "metrics/steps.jsonl").read_text().splitlines()]
    assert [row["global_step"] for row in rows] == [1, 2]
    evaluations = (trained / "metrics/evaluations.jsonl").read_text().splitlines()
    assert [json.loads(row)["global_step"] for row in evaluations] == [0, 1, 2]
    assert (trained / "curve.png").is_file()
    assert list((trained / "tensorboard").iterdir())
    events = [json.loads(x)["event"] for x in (trained / "events.jsonl").read_text().splitlines()]
    assert {"claimed", "run_started", "step", "evaluated", "run_finished"} <= set(events)


def test_a_run_is_not_started_twice(trained: Path) -> None:
    code, _, err = run("train", trained.parent / "r.yaml", "--run", trained)
    assert code == 2
    assert f"go on with `perdure resume {trained}`" in err


def test_resuming_a_finished_run_changes_no_row(copy: Path) -> None:
    files = [copy / "metrics/steps.jsonl", copy / "metrics/evaluations.jsonl"]
    before = [file.read_text() for file in files]
    code, out, _ = run("resume", copy)
    assert code == 0
    assert "\nrun_finished " in out
    assert "the run was complete already" in out
    assert [file.read_text() for file in files] == before


def test_checkpoints_are_listed(trained: Path) -> None:
    code, out, _ = run("ckpt", "list", trained)
    assert code == 0
    header, *rows = (line.split() for line in out.splitlines())
    assert header[:3] == ["checkpoint", "phase", "step"]
    assert [row[:3] for row in rows] == [
        ["step-00000001-1", "train", "1"],
        ["step-00000002-1", "train", "2"],
    ]
    files = (trained / "checkpoints" / "step-00000002-1").rglob("*.*")
    size = sum(file.stat().st_size for file in files if file.name != "manifest.json")
    assert rows[1][5:] == [f"{size:,}", "last", "present"]
    listed = json.loads(run("ckpt", "list", trained, "--json")[1])
    assert [row["step"] for row in listed["checkpoints"]] == [1, 2]
    assert all(row["present"] for row in listed["checkpoints"])


def test_checkpoints_are_verified(copy: Path) -> None:
    code, out, _ = run("ckpt", "verify", copy)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["step-00000001-1", "ok"],
        ["step-00000002-1", "ok"],
    ]
    weights = next((copy / "checkpoints" / "step-00000002-1" / "model").iterdir())
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, out, err = run("ckpt", "verify", copy)
    assert code == 5
    assert "checksum" in out
    assert "1 of 2 checkpoints are damaged: step-00000002-1" in err
    report = json.loads(run("ckpt", "verify", copy, "step-00000001-1", "--json")[1])
    assert report["checkpoints"] == [{"checkpoint": "step-00000001-1", "ok": True, "problems": {}}]
    code, out, _ = run("ckpt", "show", copy)
    assert code == 0
    assert f"DAMAGED: model/{weights.name}: " in out


def test_a_damaged_checkpoint_is_passed_over_aloud(copy: Path, tmp_path: Path) -> None:
    weights = next((copy / "checkpoints" / "step-00000002-1" / "model").iterdir())
    weights.write_bytes(weights.read_bytes()[:-1])
    for command in (("sample", copy, "--prompts", "1"), ("export", copy, tmp_path / "exported")):
        code, out, err = run(*command)
        assert (code, "step-00000001-1" in out) == (0, True)
        assert err.startswith("warning: step-00000002-1 (model/")
        assert err.endswith(": passed over, an older one is whole\n")
    told = json.loads(run("sample", copy, "--prompts", "1", "--json")[1])
    assert told["checkpoint"] == "step-00000001-1"
    (passed_over,) = told["passed_over"]
    assert passed_over.startswith("step-00000002-1 (model/")
    asked = json.loads(run("sample", copy, "--checkpoint", "step-00000001-1", "--json")[1])
    assert asked["passed_over"] == []


def test_a_checkpoint_that_is_gone(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "step-00000002-1")
    assert "step-00000002-1" in run("ckpt", "list", copy)[1]
    assert "MISSING" in run("ckpt", "list", copy)[1]
    assert run("ckpt", "verify", copy)[0] == 5
    code, _, err = run("ckpt", "show", copy)
    assert code == 5
    assert "manifest.json: missing" in err


def test_when_every_checkpoint_is_gone_nothing_else_is_promised(copy: Path) -> None:
    weights = next((copy / "checkpoints" / "step-00000002-1" / "model").iterdir())
    weights.write_bytes(b"")
    shutil.rmtree(copy / "checkpoints" / "step-00000001-1")
    code, _, err = run("ckpt", "verify", copy)
    assert code == 5
    assert "there is no whole one to resume from" in err
    assert "restore it from a copy" in run("ckpt", "verify", copy, "step-00000002-1")[2]


def test_a_quarantined_checkpoint_fails_nothing(copy: Path) -> None:
    weights = next((copy / "checkpoints" / "step-00000002-1" / "model").iterdir())
    weights.write_bytes(b"")
    assert run("resume", copy)[0] == 0
    code, out, err = run("ckpt", "verify", copy)
    assert (code, err) == (0, "")
    line = next(x for x in out.splitlines() if x.startswith("step-00000002-1"))
    assert "quarantined (model/" in line
    assert "see quarantine/step-00000002-1" in line
    rows = json.loads(run("ckpt", "list", copy, "--json")[1])["checkpoints"]
    states = {row["checkpoint"]: row["state"] for row in rows}
    assert states["step-00000002-1"] == "quarantined"
    assert "quarantined (model/" in run("ckpt", "list", copy)[1]
    assert "quarantined" in run("ckpt", "show", copy, "step-00000002-1")[2]
    shutil.copytree(copy / "quarantine/step-00000002-1", copy / "checkpoints/step-00000002-1")
    assert run("ckpt", "verify", copy)[0] == 5


def test_a_checkpoint_is_shown(trained: Path) -> None:
    code, out, _ = run("ckpt", "show", trained)
    assert code == 0
    assert out.startswith("step-00000002-1 ")
    assert "global_step 2" in out
    assert ".safetensors" in out
    shown = json.loads(run("ckpt", "show", trained, "step-00000001-1", "--json")[1])
    assert shown["clocks"]["global_step"] == 1
    assert json.loads(run("ckpt", "show", f"{trained}:step-00000001-1", "--json")[1]) == shown
    found = json.loads(run("ckpt", "verify", f"{trained}:step-00000001-1", "--json")[1])
    assert [one["checkpoint"] for one in found["checkpoints"]] == ["step-00000001-1"]
    assert shown["ok"] is True


def test_the_trained_policy_answers_as_in_its_validation(trained: Path) -> None:
    rows = (trained / "metrics/evaluations.jsonl").read_text().splitlines()
    expected = {row["global_step"]: row["metrics"]["accuracy"] for row in map(json.loads, rows)}
    for step in (1, 2):
        name = f"step-{step:08d}-1"
        code, out, err = run("sample", trained, "--checkpoint", name, "--prompts", "4", "--json")
        assert (code, err) == (0, "")
        answer = json.loads(out)
        assert answer["checkpoint"] == name
        assert answer["accuracy"] == expected[step]
        assert len(answer["samples"]) == 4
    one = answer["samples"][0]
    assert one["prompt"].endswith("=")
    assert one["correct"] == (one["response"] == one["expected"])
    code, out, _ = run("sample", trained, "--prompts", "3")
    header, *lines, verdict = out.splitlines()
    assert header.split() == ["prompt", "answer", "expected"]
    assert len(lines) == 3
    assert all(line.split()[-1] in ("right", "wrong") for line in lines)
    assert verdict.startswith("step-00000002-1: accuracy 0.")


def test_the_trained_policy_is_exported(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out, err = run("export", trained, folder)
    assert (code, err) == (0, "")
    assert out == f"policy of step-00000002-1 written to {folder}\n"
    model = load_pretrained(folder)
    stored = load_file(trained / "checkpoints/step-00000002-1/model/policy.safetensors")
    found = {name: tensor.numpy() for name, tensor in weights_of(model).items()}
    assert found.keys() == stored.keys()
    assert all((found[name] == stored[name]).all() for name in stored)
    vocabulary = json.loads((folder / "vocabulary.json").read_text())
    assert vocabulary["characters"]["0"] == 2
    assert vocabulary["vocab_size"] == model.config.vocab_size
    code, _, err = run("export", trained, folder)
    assert code == 2
    assert "not empty" in err


def test_a_damaged_checkpoint_is_passed_over_by_default_and_refused_by_name(copy: Path) -> None:
    next((copy / "checkpoints" / "step-00000002-1" / "model").iterdir()).write_bytes(b"")
    before = sorted(copy.rglob("*"))
    code, out, _ = run("sample", copy)
    assert code == 0
    assert "step-00000001-1: accuracy" in out
    code, _, err = run("sample", copy, "--checkpoint", "step-00000002-1")
    assert code == 5
    assert "policy.safetensors: 0 bytes" in err
    assert sorted(copy.rglob("*")) == before


def test_a_mistyped_checkpoint_names_the_nearest(trained: Path) -> None:
    code, _, err = run("ckpt", "show", trained, "step-00000009-1")
    assert code == 6
    assert "did you mean 'step-0000000" in err
    code, _, err = run("ckpt", "show", trained, "newest")
    assert code == 6
    assert "name one of: step-00000001-1, step-00000002-1" in err
    # As "$RUN:$CHECKPOINT" is while the second is empty.
    for command in ("show", "verify"):
        code, _, err = run("ckpt", command, f"{trained}:")
        assert (code, "no checkpoint ''" in err) == (6, True)


def test_damage_in_the_log_is_refused(copy: Path) -> None:
    (log,) = (copy / "log").glob("control-000001-*.plog")
    data = bytearray(log.read_bytes())
    data[200] ^= 1
    log.write_bytes(data)
    for command in (["ckpt", "list"], ["resume"]):
        code, _, err = run(*command, copy)
        assert code == 5
        assert log.name in err


def test_the_audit_proves_a_run_and_compares_two(trained: Path, copy: Path) -> None:
    code, out, err = run("audit", trained)
    assert (code, err) == (0, ""), out
    assert json.loads(run("audit", trained, "--json")[1])
    assert run("audit", trained, "--diff", copy)[0] == 0
    log = next(copy.glob("log/payload-*"))
    data = bytearray(log.read_bytes())
    data[200] ^= 1
    log.write_bytes(data)
    for pair in ((copy, trained), (trained, copy)):
        code, _, err = run("audit", pair[0], "--diff", pair[1])
        assert code == 5
        assert str(copy / "log") in err or f"{copy}, log/{log.name}" in err
        assert str(trained) not in err


def test_the_audit_finds_damage_and_difference(trained: Path, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    code, _, _ = run("train", trained.parent / "r.yaml", "seed=2", "--run", other)
    assert code == 0
    code, out, err = run("audit", trained, "--diff", other)
    assert code == 10
    assert out
    assert "the runs differ" in err
    next((copy / "checkpoints" / "step-00000002-1" / "model").iterdir()).write_bytes(b"")
    assert run("audit", copy)[0] == 5
