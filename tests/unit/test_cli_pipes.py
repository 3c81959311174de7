"""Output that nobody reads, and output that cannot be written: quiet ends, in real processes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import audit_writer as w
import pytest
from typer.testing import CliRunner

from perdure.cli import main as cli

BUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
"""What is left in a buffer fails once more, when the interpreter ends."""


def shell(command: str, *, unbuffered: str) -> tuple[int, str]:
    """Exit code of a pipeline's last failure, and what it wrote to standard error."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    return done.returncode, done.stderr


def perdure(*arguments: object) -> str:
    """A command line of a shell."""
    main = "from perdure.cli.main import main; main()"
    return shlex.join([sys.executable, "-c", main, *map(str, arguments)])


@BUFFERED
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_left_ends_a_command_quietly(
    tmp_path: Path, options: list[str], unbuffered: str
) -> None:
    command = perdure("audit", w.healthy(tmp_path).save(), *options)
    assert shell(f"{command} | cat", unbuffered=unbuffered) == (0, "")
    assert shell(f"{command} | true", unbuffered=unbuffered) == (cli.READER_LEFT, "")


@BUFFERED
def test_an_error_that_nobody_reads_has_its_exit_code(tmp_path: Path, unbuffered: str) -> None:
    command = perdure("audit", tmp_path / "none")
    assert shell(f"{command} 2>&1 | true", unbuffered=unbuffered) == (6, "")


def test_a_pipe_that_is_not_the_output_is_no_quiet_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe", "a verifier")

    monkeypatch.setattr("perdure.cli.audit.open_run", fail)
    result = CliRunner().invoke(cli.app, ["audit", "x"])
    assert result.exit_code == 7
    assert "a verifier: cannot open, read or write: Broken pipe" in result.stderr


def unread_pipe() -> int:
    """The end of a pipe that is written, after its reader has left."""
    read, write = os.pipe()
    os.close(read)
    return write


def full_device() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@BUFFERED
@pytest.mark.parametrize("open_output", [unread_pipe, full_device])
def test_output_that_cannot_be_written_does_not_fail_a_run(
    open_output: Callable[[], int], unbuffered: str
) -> None:
    script = (
        "from perdure.cli.display import make_display\n"
        "with make_display(json=False) as display:\n"
        "    display.note('one')\n"
        "    display.note('two')\n"
    )
    output = open_output()
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=output,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(output)
    assert (done.returncode, done.stderr) == (0, b"")


def test_behind_a_reader_that_left_standard_error_fails_nobody_else() -> None:
    script = (
        "import sys\n"
        "from perdure.cli.display import make_display\n"
        "with make_display(json=False) as display:\n"
        "    display.note('one')\n"
        "    print('a library says something', file=sys.stderr, flush=True)\n"
    )
    output = unread_pipe()
    done = subprocess.run([sys.executable, "-c", script], stdout=output, stderr=output, check=False)
    os.close(output)
    assert done.returncode == 0
