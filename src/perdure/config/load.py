"""From a recipe and overrides to a checked configuration; every problem is reported at once."""

from __future__ import annotations

import copy
import json
import os
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from perdure.config import yaml_text
from perdure.config.explain import problem_of
from perdure.config.overrides import apply_overrides, override_key
from perdure.config.section import Problem, Section, parent_of
from perdure.core.errors import ConfigError, NothingToResumeError
from perdure.core.names import nearest

M = TypeVar("M", bound=Section)

_KEY_TO_SET = re.compile(r"\b(set )([a-z_.]+=)")
"""A section advises with the names of its own settings, which are keys below its place."""


def load_config(model_cls: type[M], recipe_path: Path, overrides: Sequence[str] = ()) -> M:
    """Read a recipe, apply ``key.sub=value`` overrides and check everything.

    Paths of files (``model_cls.file_fields``) become absolute: those of the recipe start at its
    directory, those of the overrides at the working directory.

    Raises:
        NothingToResumeError: The recipe does not exist; names the nearest one.
        ConfigError: The recipe cannot be read or honoured; names every problem.
    """
    try:
        text = recipe_path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _missing_recipe(recipe_path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot be read ({error})",
            where=str(recipe_path),
            rule="a recipe is a UTF-8 text file",
            way_out="name a readable YAML file",
        ) from error
    return config_from_text(
        model_cls, text, where=str(recipe_path), overrides=overrides, folder=recipe_path.parent
    )


def config_from_text(
    model_cls: type[M],
    text: str,
    *,
    where: str,
    overrides: Sequence[str] = (),
    folder: Path = Path(),
) -> M:
    """:func:`load_config` for text that was read elsewhere.

    Args:
        where: Names the text in messages.
        folder: Where paths in the text start.

    Raises:
        ConfigError: The text cannot be read or honoured; names every problem.
    """
    data: Any = yaml_text.parse(text, where=where)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"holds a {type(data).__name__}",
            where=where,
            rule="a recipe is a mapping of sections",
            way_out="write it as key: value lines",
        )
    settings = typing.cast("dict[str, Any]", data)
    _make_absolute(settings, model_cls.file_fields, folder)
    problems = apply_overrides(settings, overrides)
    _make_absolute(settings, model_cls.file_fields, Path())
    config, found = _validate(model_cls, settings)
    problems += found
    if config is None or problems:
        keys = {override_key(override) for override in overrides}
        raise _error(problems, where=where, override_keys=keys)
    return config


def _make_absolute(settings: dict[str, Any], files: Sequence[str], folder: Path) -> None:
    for field in files:
        section, name = parent_of(settings, field)
        if section is not None and isinstance(path := section.get(name), str) and path:
            section[name] = os.path.abspath(folder / path)


def _validate(model_cls: type[M], data: dict[str, Any]) -> tuple[M | None, list[Problem]]:
    config, problems = _parse_fields(model_cls, data)
    if config is not None:
        return config, list(_broken_rules(config))
    # The rules over several fields are checked too, with defaults in place of the wrong values,
    # so that the user sees everything in one go.
    rest = copy.deepcopy(data)
    wrong = {problem.field for problem in problems}
    for field in wrong:
        _remove(rest, field.split("."))
    salvaged, _ = _parse_fields(model_cls, rest)
    if salvaged is not None:
        for problem in _broken_rules(salvaged):
            if not any(_overlaps(a, b) for a in (problem.field, *problem.reads) for b in wrong):
                problems.append(problem)
    return None, problems


def _parse_fields(model_cls: type[M], data: dict[str, Any]) -> tuple[M | None, list[Problem]]:
    try:
        # JSON mode is strict about types, yet takes lists for tuples and text for paths and enums.
        return model_cls.model_validate_json(json.dumps(data)), []
    except ValidationError as error:
        details = error.errors(include_url=False)
        found = (problem_of(model_cls, data, dict(detail)) for detail in details)
        return None, list({problem.field: problem for problem in found}.values())


def _broken_rules(section: Section, prefix: str = "") -> Iterator[Problem]:
    for name in type(section).model_fields:
        yield from _rules_below(getattr(section, name), f"{prefix}{name}")
    for found in section.problems():
        yield Problem(
            f"{prefix}{found.field}",
            found.value,
            found.rule,
            _KEY_TO_SET.sub(rf"\1{prefix}\2", found.way_out),
            tuple(f"{prefix}{field}" for field in found.reads),
        )


def _rules_below(value: Any, path: str) -> Iterator[Problem]:
    if isinstance(value, Section):
        yield from _broken_rules(value, f"{path}.")
    elif isinstance(value, tuple):
        for index, item in enumerate(typing.cast("tuple[Any, ...]", value)):
            yield from _rules_below(item, f"{path}.{index}")


def _remove(data: dict[str, Any], path: list[str]) -> None:
    node: Any = data
    for part in path[:-1]:
        node = _child(node, part)
    if isinstance(node, dict):
        typing.cast("dict[str, Any]", node).pop(path[-1], None)


def _child(node: Any, part: str) -> Any:
    if isinstance(node, dict):
        return typing.cast("dict[str, Any]", node).get(part)
    if isinstance(node, list) and part.isdigit():
        items = typing.cast("list[Any]", node)
        return items[int(part)] if int(part) < len(items) else None
    return None


def _overlaps(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _error(problems: Sequence[Problem], *, where: str, override_keys: set[str]) -> ConfigError:
    def origin(problem: Problem) -> str:
        given = any(_overlaps(problem.field, key) for key in override_keys)
        return "command line" if given else where

    if len(problems) == 1:
        (one,) = problems
        return ConfigError(
            f"{one.field} = {one.value}", where=origin(one), rule=one.rule, way_out=one.way_out
        )
    lines = [f"\n  {origin(problem)}: {problem.sentence()}" for problem in problems]
    return ConfigError(f"{len(problems)} problems:{''.join(lines)}", where=where)


def _missing_recipe(path: Path) -> NothingToResumeError:
    folders = dict.fromkeys((path.parent, Path("recipes")))
    recipes = sorted(
        str(file)
        for folder in folders
        if folder.is_dir()
        for file in folder.iterdir()
        if file.suffix in (".yaml", ".yml")
    )
    by_stem = {Path(recipe).stem: recipe for recipe in reversed(recipes)}
    close = nearest(path.stem, by_stem)
    if close is not None:
        way_out = f"did you mean {by_stem[close]!r}?"
    else:
        way_out = f"use one of: {', '.join(recipes)}" if recipes else "name an existing YAML file"
    return NothingToResumeError(
        "no such recipe", where=str(path), rule="a recipe is a YAML file", way_out=way_out
    )
