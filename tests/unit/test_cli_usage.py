"""Command lines that cannot be read: one sentence, or one JSON object, like every other error."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from perdure.cli import main as cli

WRONG = [
    (["train", "r.yaml", "--rum", "x"], "no such option: --rum", "did you mean --run?"),
    (["trian", "r.yaml"], "no such command 'trian'", "did you mean 'train'?"),
    (["ckpt", "shwo", "x"], "no such command 'shwo'", "did you mean 'show'?"),
    (["resume"], "missing argument 'RUN'", "perdure resume --help`"),
    (["train", "--run"], "option '--run' requires an argument", "--help`"),
    (["ckpt", "gc", "x", "--keep", "many"], "invalid value for '--keep'", "ckpt gc --help`"),
    (["audit", "a", "b"], "unexpected extra argument", "perdure audit --help`"),
    (["--nope"], "no such option: --nope", "perdure --help`"),
]


def run(arguments: list[str]) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, arguments, prog_name="perdure")
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(("arguments", "what", "way_out"), WRONG, ids=" ".join)
def test_a_wrong_command_line_is_told_in_one_sentence(
    arguments: list[str], what: str, way_out: str
) -> None:
    code, out, err = run(arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("perdure: command line: ")
    assert what in err
    assert way_out in err


@pytest.mark.parametrize(("arguments", "what", "way_out"), WRONG, ids=" ".join)
def test_a_wrong_command_line_is_one_object_for_programs(
    arguments: list[str], what: str, way_out: str
) -> None:
    # Behind an option that takes a value it would be that value.
    given = [*arguments, "--json"] if arguments[-1] != "--run" else ["train", "--json", "--run"]
    code, out, err = run(given)
    assert (code, out) == (2, "")
    error = json.loads(err)["error"]
    assert error["where"] == "command line"
    assert error["code"] == 2
    assert what in error["what"]
    assert way_out in error["way_out"]


@pytest.mark.parametrize("arguments", [[], ["ckpt"], ["config"]], ids=" ".join)
def test_a_command_line_without_a_command_shows_the_help(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, arguments, prog_name="perdure")
    assert result.exit_code == 2
    assert "Usage: perdure" in result.output
    assert "Example" in result.output
    assert "perdure: " not in result.output
