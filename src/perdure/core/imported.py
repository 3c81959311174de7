"""Objects of the user's own modules, named ``module:Name`` in a recipe or on the command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from perdure.core.errors import ConfigError, PerdureError


def is_import_path(text: str) -> bool:
    """Whether ``text`` has the form ``module:Name``; dots are for modules in packages."""
    module, colon, name = text.partition(":")
    parts = [*module.split("."), name]
    return bool(colon) and all(part.isidentifier() for part in parts)


def imported(source: str, *, where: str) -> object:
    """What stands at ``source``; modules are looked for in the working directory first.

    Raises:
        ConfigError: It has another form, cannot be imported, or is not there.
    """
    module, _, name = source.partition(":")
    if not is_import_path(source):
        raise _refused(where, "is not MODULE:NAME")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise _refused(where, f"cannot be imported ({_said(error)})") from error


def made(source: str, *arguments: object, where: str, members: Iterable[str]) -> Any:
    """What the class or function at ``source`` gives when it is called with ``arguments``.

    Args:
        source: ``module:Name``.
        arguments: By position.
        where: What named it, for errors.
        members: What the result must have.

    Raises:
        ConfigError: It cannot be imported or called, or lacks a member.
        PerdureError: Its own, as it raised it.
    """
    maker = imported(source, where=where)
    if not callable(maker):
        raise _refused(where, "is neither a class nor a function")
    try:
        one = maker(*arguments)
    except PerdureError:
        raise
    except Exception as error:
        raise _refused(where, f"cannot be called ({_said(error)})") from error
    missing = [name for name in members if not hasattr(one, name)]
    if missing:
        raise _refused(where, f"gives a {type(one).__name__} that lacks {', '.join(missing)}")
    return one


def members_of(protocol: type) -> list[str]:
    """Names of what a protocol itself asks for."""
    return [name for name in vars(protocol) if not name.startswith("_")]


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _refused(where: str, what: str) -> ConfigError:
    return ConfigError(
        what,
        where=where,
        rule="it names something in a module of your own, for example mymodule:MyName",
        way_out=f"correct it, or run the command where the module lies (here: {os.getcwd()})",
    )
