"""Reading a file of examples, one JSON object a line, every bad line reported at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from perdure.core.errors import ConfigError
from perdure.core.names import hint

_REQUIRED = ("prompt", "answer")
_KEYS = (*_REQUIRED, "demonstration")
_SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class Example:
    """One line: a prompt, its right answer, and perhaps a text that shows how to get there."""

    line: int
    prompt: str
    answer: str
    demonstration: str | None = None

    @property
    def response(self) -> str:
        """A right response: the demonstration, or the bare answer."""
        return self.answer if self.demonstration is None else self.demonstration

    def texts(self) -> Iterable[str]:
        """Every text that must have tokens."""
        return (self.prompt, self.answer, self.response)


@dataclass(frozen=True, slots=True)
class ExampleFile:
    """A file as it was read."""

    path: Path
    content: bytes
    examples: tuple[Example, ...]


class _BadLine(Exception):
    """What is wrong with one line."""


def read_examples(
    path: Path, *, field: str, alphabet: str | None, judge: Callable[[str, str], bool]
) -> ExampleFile:
    """Read ``path``; empty lines are passed over.

    Args:
        path: The file.
        field: The setting that names it, for messages.
        alphabet: The characters that texts may have; None allows all.
        judge: The verifier, (response, answer) → right. What a line shows must be right.

    Raises:
        ConfigError: The file cannot be read, has no example, or has bad lines.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror or error})",
            where=str(path),
            rule=f"{field} starts at the recipe's directory, on the command line at the working"
            " directory",
            way_out=f"put the file back, or say where it is with {field}=FILE (to `perdure resume`"
            " too, as long as its content is the same)",
        ) from error
    examples: list[Example] = []
    problems: list[str] = []
    allowed = None if alphabet is None else frozenset(alphabet)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            examples.append(_parse(line, number, allowed))
            _check_response(examples[-1], judge)
        except _BadLine as problem:
            problems.append(f"{path}:{number}: {problem}")
    _refuse(path, problems, has_examples=bool(examples))
    return ExampleFile(path, content, tuple(examples))


def require_one_answer(file: ExampleFile, same: Callable[[str, str], bool]) -> None:
    """Refuse a prompt that has two answers: whatever is learned is judged wrong half of the time.

    Args:
        file: The file as it was read.
        same: Whether two answers count as the same.

    Raises:
        ConfigError: Naming both lines of each.
    """
    seen: dict[str, Example] = {}
    problems: list[str] = []
    for example in file.examples:
        first = seen.setdefault(example.prompt, example)
        if not same(first.answer, example.answer):
            problems.append(
                f"{file.path}:{example.line}: the prompt has another answer in"
                f" {file.path}:{first.line}"
            )
    _refuse(file.path, problems, has_examples=True)


def alphabet_of(files: Sequence[ExampleFile]) -> str:
    """The characters of all texts, sorted."""
    return "".join(
        sorted({c for file in files for e in file.examples for text in e.texts() for c in text})
    )


def require_disjoint(training: ExampleFile, held_out: ExampleFile) -> None:
    """Refuse held-out prompts that are trained or appear twice.

    Raises:
        ConfigError: Naming both lines of each.
    """
    seen = {e.prompt: f"{training.path}:{e.line}" for e in training.examples}
    problems: list[str] = []
    for example in held_out.examples:
        place = f"{held_out.path}:{example.line}"
        if example.prompt in seen:
            problems.append(f"{place}: the prompt is already in {seen[example.prompt]}")
        seen.setdefault(example.prompt, place)
    _refuse(held_out.path, problems, has_examples=True)


def _refuse(path: Path, problems: Sequence[str], *, has_examples: bool) -> None:
    if problems:
        shown = list(problems[:_SHOWN_PROBLEMS])
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise ConfigError(
            f"{len(problems)} bad line(s): " + "; ".join(shown),
            where=str(path),
            rule='every line is {"prompt": "…", "answer": "…"}, optionally with "demonstration"; '
            "held-out prompts appear once, and a prompt has one answer",
            way_out="correct or remove these lines",
        )
    if not has_examples:
        raise ConfigError(
            "the file has no example", where=str(path), way_out="add one JSON object a line"
        )


def _parse(line: bytes, number: int, allowed: frozenset[str] | None) -> Example:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _BadLine(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise _BadLine(f"not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise _BadLine("nested too deeply") from error
    if not isinstance(value, dict):
        raise _BadLine("not a JSON object")
    fields = cast("dict[str, Any]", value)
    _check_fields(fields)
    example = Example(number, fields["prompt"], fields["answer"], fields.get("demonstration"))
    _check_characters(example, allowed)
    return example


def _check_fields(fields: dict[str, Any]) -> None:
    for key in fields:
        if key not in _KEYS:
            raise _BadLine(f"unknown key {key!r}, {hint(key, _KEYS)}")
    for key in _REQUIRED:
        if key not in fields:
            raise _BadLine(f"{key!r} is missing")
    for key, text in fields.items():
        if not isinstance(text, str) or not text:
            raise _BadLine(f"{key!r} must be text that is not empty")


def _check_characters(example: Example, allowed: frozenset[str] | None) -> None:
    characters = {c for text in example.texts() for c in text}
    if any("\ud800" <= c <= "\udfff" for c in characters):
        raise _BadLine("half of a surrogate pair stands alone")
    if allowed is not None and not characters <= allowed:
        unknown = "".join(sorted(characters - allowed))
        raise _BadLine(f"characters outside the alphabet: {unknown!r}")


def _check_response(example: Example, judge: Callable[[str, str], bool]) -> None:
    if not judge(example.response, example.answer):
        shown = "the answer alone" if example.demonstration is None else "the demonstration"
        raise _BadLine(f"{shown} is not judged right (task.jsonl.match, task.jsonl.answer_marker)")
