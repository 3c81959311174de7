"""``perdure``: the commands, and how an error becomes one sentence and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from perdure import __version__
from perdure.cli import audit, ckpt, config, doctor, status, train, trained
from perdure.cli.entry import INTERRUPTED
from perdure.cli.flags import Command, Group
from perdure.cli.output import begin_command, file_refusal, report_error, silence_unread
from perdure.cli.usage import UsageError, usage_refusal
from perdure.core.errors import PerdureError

READER_LEFT = 141
"""Exit code when nobody reads the output any more, as behind ``| head``: 128 + SIGPIPE."""


class _ReportingGroup(Group):
    """Prints what perdure refuses as one sentence; everything else is a bug and has a traceback."""

    def make_context(self, info_name: Any, args: list[str], **more: Any) -> Any:
        begin_command(json="--json" in args)
        try:
            return super().make_context(info_name, args, **more)
        except UsageError as error:
            _refuse(error)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _refuse(error)
        except PerdureError as error:
            report_error(error)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except OSError as error:
            if isinstance(error, BrokenPipeError) and silence_unread():
                raise typer.Exit(READER_LEFT) from error
            refused = file_refusal(error)
            report_error(refused)
            raise typer.Exit(refused.exit_code) from error


def _refuse(error: Exception) -> NoReturn:
    """Say what is wrong with the command line; or show the help, if it names no command."""
    refused = usage_refusal(error)
    if refused is None:
        raise error
    report_error(refused)
    raise typer.Exit(refused.exit_code) from error


app = typer.Typer(
    cls=_ReportingGroup,
    name="perdure",
    help="Reinforcement learning that loses nothing to a crash, and proves it.",
    epilog="Example: perdure train recipes/tiny.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perdure {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    del version


app.command("train", cls=Command, epilog=train.TRAIN_EXAMPLES)(train.train)
app.command("resume", cls=Command, epilog=train.RESUME_EXAMPLES)(train.resume)
app.command("sample", cls=Command, epilog=trained.SAMPLE_EXAMPLES)(trained.sample)
app.command("export", cls=Command, epilog=trained.EXPORT_EXAMPLES)(trained.export)
app.command("status", cls=Command, epilog=status.STATUS_EXAMPLES)(status.status)
app.command("audit", cls=Command, epilog=audit.EXAMPLES)(audit.audit)
app.command("doctor", cls=Command, epilog=doctor.DOCTOR_EXAMPLES)(doctor.doctor)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(config.app, name="config")


def main() -> None:
    """Entry point of the ``perdure`` command."""
    _open_closed_streams()
    app()


def _open_closed_streams() -> None:
    """Put the null device in place of standard streams that were closed (``>&-``).

    Else the next file that is opened, perhaps the log, is the one that output goes to.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # Python has no streams for descriptors that were closed when it started.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
