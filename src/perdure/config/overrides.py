"""``key.sub=value`` overrides of a recipe; values are YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from perdure.config import yaml_text
from perdure.config.section import Problem
from perdure.core.errors import ConfigError

_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_EXAMPLE = "write it as section.key=value, e.g. seed=7"


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Set each override in ``data``, in order; the last one of a key wins.

    Returns:
        What could not be applied.
    """
    found = [_apply(data, override) for override in overrides]
    return [problem for problem in found if problem is not None]


def override_key(override: str) -> str:
    """The dotted key of an override; the whole of one that has none."""
    return override.partition("=")[0].strip() or override


def _apply(data: dict[str, Any], override: str) -> Problem | None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        return Problem(override, "(no value)", "an override is key=value", _EXAMPLE)
    if not key:
        return Problem(override, "(no key)", "an override is key=value", _EXAMPLE)
    if not _PATH.fullmatch(key):
        return Problem(key, text, "a key is names joined by dots", _EXAMPLE)
    try:
        value = yaml_text.parse(text, where=key)
    except ConfigError as error:
        return Problem(key, text, error.what, "quote the value for YAML and for the shell")
    *sections, name = key.split(".")
    node = data
    for depth, section in enumerate(sections):
        child: Any = node.get(section)
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            at = ".".join(sections[: depth + 1])
            return Problem(key, text, f"{at} is a value, not a section", f"set {at} itself")
        node = cast("dict[str, Any]", child)
    node[name] = value
    return None
