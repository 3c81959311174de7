"""Choosing a task: its name, and the options of that task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from perdure.core.imported import is_import_path, made, members_of
from perdure.core.names import hint
from perdure.tasks.api import Task
from perdure.tasks.calculator import CalculatorOptions, calculator
from perdure.tasks.digits import (
    AddOptions,
    DigitsOptions,
    add_numbers,
    reverse_digits,
    sort_digits,
)
from perdure.tasks.jsonl import JsonlOptions, jsonl_task
from perdure.tasks.reasoning_gym import ReasoningGymOptions, reasoning_gym_task

SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "sort_digits": "digits",
        "reverse_digits": "digits",
        "add_numbers": "add",
        "calculator": "calculator",
        "jsonl": "jsonl",
        "reasoning_gym": "reasoning_gym",
    }
)
"""Task name → the section of :class:`TaskConfig` that holds its options."""
_REQUIRED: Mapping[str, str] = MappingProxyType(
    {"jsonl": "path=FILE", "reasoning_gym": "dataset=NAME"}
)
"""Section without a default → the setting in it that a task cannot do without."""


class TaskConfig(BaseModel):
    """Which task to train on. Only the section that belongs to the task may be given."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(
        default="sort_digits",
        description=f"Name of the task: one of {', '.join(SECTIONS)}, or `module:Name` for one of"
        " your own.",
    )
    digits: DigitsOptions = Field(
        default=DigitsOptions(), description="Options of sort_digits and reverse_digits."
    )
    add: AddOptions = Field(default=AddOptions(), description="Options of add_numbers.")
    calculator: CalculatorOptions = Field(
        default=CalculatorOptions(), description="Options of calculator."
    )
    jsonl: JsonlOptions | None = Field(default=None, description="Options of jsonl.")
    reasoning_gym: ReasoningGymOptions | None = Field(
        default=None, description="Options of reasoning_gym."
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in SECTIONS and not is_import_path(name):
            raise ValueError(
                f"unknown task {name!r}; {hint(name, SECTIONS)} (one of your own is module:Name)"
            )
        return name

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        problems = [*self._missing(), *self._left_over()]
        if problems:
            raise ValidationError.from_exception_data("task", problems)
        return self

    def _missing(self) -> Iterator[InitErrorDetails]:
        own = SECTIONS.get(self.name)
        if own is not None and getattr(self, own) is None:
            setting = _REQUIRED[own]
            key = setting.partition("=")[0]
            yield _problem(
                "name",
                self.name,
                f"needs task.{own}.{key}, which is missing; set task.{own}.{setting}"
                " (see docs/tasks.md)",
            )

    def _left_over(self) -> Iterator[InitErrorDetails]:
        """Sections of other tasks: their settings would do nothing."""
        own = SECTIONS.get(self.name)
        whose = f"whose section is {own!r}" if own else "which has no section"
        for section in sorted(set(SECTIONS.values()) - {own}):
            found, default = getattr(self, section), type(self).model_fields[section].default
            if found != default:
                empty = "null" if default is None else "{}"
                yield _problem(
                    section,
                    found.model_dump(mode="json", exclude_defaults=True),
                    f"section {section!r} does not belong to task {self.name!r}, {whose};"
                    f" leave task.{section} out (task.{section}={empty} does so on the command"
                    " line), or choose its task",
                )


def _problem(field: str, value: object, sentence: str) -> InitErrorDetails:
    """What is wrong with one field: the rule, and behind a semicolon the way out."""
    error = PydanticCustomError("value_error", sentence)  # pyright: ignore[reportArgumentType]
    return InitErrorDetails(type=error, loc=(field,), input=value)


def make_task(config: TaskConfig, seed: int) -> Task:
    """The task of ``config`` with the run's ``seed``.

    Raises:
        ConfigError: The data or an optional package is missing or does not fit; a task of the
            user's own cannot be imported, or lacks a member of :class:`Task`.
    """
    if config.name not in SECTIONS:
        where = f"task.name = {config.name}"
        return made(config.name, seed, where=where, members=members_of(Task))
    return _MAKERS[config.name](config, seed)


def _make_jsonl(config: TaskConfig, seed: int) -> Task:
    assert config.jsonl is not None
    return jsonl_task(config.jsonl, seed)


def _make_reasoning_gym(config: TaskConfig, seed: int) -> Task:
    assert config.reasoning_gym is not None
    return reasoning_gym_task(config.reasoning_gym, seed)


_MAKERS: Mapping[str, Callable[[TaskConfig, int], Task]] = MappingProxyType(
    {
        "sort_digits": lambda config, seed: sort_digits(config.digits, seed),
        "reverse_digits": lambda config, seed: reverse_digits(config.digits, seed),
        "add_numbers": lambda config, seed: add_numbers(config.add, seed),
        "calculator": lambda config, seed: calculator(config.calculator, seed),
        "jsonl": _make_jsonl,
        "reasoning_gym": _make_reasoning_gym,
    }
)
