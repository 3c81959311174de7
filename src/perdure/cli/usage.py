"""Command lines that cannot be read, told as every other error is."""

from __future__ import annotations

from typing import Any

import typer

from perdure.core.errors import ConfigError

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The library's error about a command line; it is not exported under a name of its own."""


def usage_refusal(error: Any) -> ConfigError | None:
    """The four parts of a :data:`UsageError`; None where the library shows the help instead.

    Args:
        error: The library's error.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    option = getattr(error, "option_name", None)
    context = error.ctx
    path = context.command_path if context is not None else "perdure"
    if option is not None and context is not None and _takes_settings(context):
        name = str(option).lstrip("-").replace("-", "_")
        if not getattr(error, "possibilities", None):
            return ConfigError(
                f"no option {option}",
                where="command line",
                rule="settings are written key=value, without dashes",
                way_out=f"write {name}=VALUE, or see `{path} --help`",
            )
    message = str(error.format_message()).rstrip(".")
    what, hint = message, ""
    for mark in (". Did you mean ", " Did you mean ", " (Possible options: "):
        before, found, names = message.partition(mark)
        if found:
            what, hint = before, f"did you mean {names.rstrip('?)')}? Or "
            break
    return ConfigError(
        what[:1].lower() + what[1:], where="command line", way_out=f"{hint}see `{path} --help`"
    )


def _takes_settings(context: Any) -> bool:
    return any(parameter.name == "overrides" for parameter in context.command.params)
