"""Command lines that cannot be read, in perdure's own words where the library's lead nowhere."""

from __future__ import annotations

from typing import Any

import typer

from perdure.cli.output import errors_are_json
from perdure.core.errors import ConfigError

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The library's error about a command line; it is not exported under a name of its own."""


def usage_refusal(error: Any) -> ConfigError | None:
    """The four parts of a :data:`UsageError`; None where the library's own message is better.

    Args:
        error: The library's error.
    """
    option = getattr(error, "option_name", None)
    context = error.ctx
    if option is not None and context is not None and _takes_settings(context):
        name = str(option).lstrip("-").replace("-", "_")
        if not getattr(error, "possibilities", None):
            return ConfigError(
                f"no option {option}",
                where="command line",
                rule="settings are written key=value, without dashes",
                way_out=f"write {name}=VALUE, or see `{context.command_path} --help`",
            )
    if not errors_are_json():
        return None
    path = context.command_path if context is not None else "perdure"
    return ConfigError(error.format_message(), where="command line", way_out=f"see `{path} --help`")


def _takes_settings(context: Any) -> bool:
    return any(parameter.name == "overrides" for parameter in context.command.params)
