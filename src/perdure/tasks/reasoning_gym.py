"""Tasks of the ``reasoning-gym`` package (optional extra), judged by their own verifiers."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from perdure.core.errors import ConfigError, TrainingError
from perdure.core.names import hint
from perdure.tasks.api import RewardResult
from perdure.tasks.generated import Draw, GeneratedTask, Problem
from perdure.tasks.tokenizer import CharTokenizer, finished_text

_NAME = "reasoning_gym"
_WHERE = "task.reasoning_gym"
_ITEMS = 2**31
_PROBED = (_ITEMS - 1, 7, 1_000_003, 0)
_ALPHABET = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))

_OF_THE_MACHINE = (MemoryError, OSError, ImportError)
"""What a verifier raises for reasons that no response can be blamed for."""

RUNS_ANSWERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets whose verifier evaluates the response as an expression: it can run any Python code."""


class ReasoningGymOptions(BaseModel):
    """Which data set, with which of its own options, and how long its texts may be."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dataset: str = Field(
        default="basic_arithmetic", min_length=1, description="Name of the data set."
    )
    config: dict[str, bool | int | float | str | list[Any]] = Field(
        default_factory=dict[str, Any],
        description="Options of the data set itself; seed and size are perdure's.",
    )
    max_prompt_tokens: int = Field(
        default=128, ge=1, le=65536, description="Items with longer questions are passed over."
    )
    max_answer_tokens: int = Field(
        default=32, ge=2, le=65536, description="Items with longer answers are passed over."
    )
    allow_running_answers: bool = Field(
        default=False,
        description="Allow data sets whose verifier runs what the model wrote as Python code.",
    )


class _Source:
    """One data set of the package, asked by item number."""

    def __init__(self, options: ReasoningGymOptions, tokenizer: CharTokenizer) -> None:
        self._dataset = _create(options)
        self._characters = frozenset(tokenizer.alphabet)
        self._options = options
        self._tokenizer = tokenizer

    def draw(self, random: np.random.Generator) -> Draw | None:
        """A random item as a problem, or None if it does not fit the token limits or alphabet."""
        number = int(random.integers(_ITEMS))
        item = self._dataset[number]
        question, answer = item["question"], item["answer"]
        if not isinstance(answer, str) or not self._fits(question, answer):
            return None
        needed = json.dumps({"item": number, "answer": answer})
        return Draw(prompt=question, response=answer, answer=needed)

    def verify(self, needed: str, response_ids: Sequence[int]) -> RewardResult:
        """The data set's own score.

        ``verifier_failed`` is 1.0 where the verifier raised on the response and judges the right
        answer to the same item: then it is the response that cannot be read, and scores 0.

        Raises:
            TrainingError: The verifier raises on the right answer too.
            MemoryError, OSError, ImportError: As the verifier said; they tell of the machine.
        """
        text = finished_text(self._tokenizer, response_ids)
        if text is None:
            return _verdict(0.0)
        expected = json.loads(needed)
        item = self._dataset[expected["item"]]
        if item["answer"] != expected["answer"]:
            raise ConfigError(
                f"item {expected['item']} now has another answer than when it was drawn",
                where=f"{_WHERE}.dataset {self._options.dataset}",
                rule="a run goes on with the version of reasoning-gym it was started with",
                way_out="install that version, or start a new run",
            )
        try:
            return _verdict(float(self._dataset.score_answer(text, item)))
        except _OF_THE_MACHINE:
            raise
        except Exception as error:  # noqa: BLE001 - foreign parsers raise anything on an answer
            self._require_working(item, cause=error)
            return _verdict(0.0, failed=True)

    def _require_working(self, item: dict[str, Any], *, cause: Exception) -> None:
        try:
            self._dataset.score_answer(item["answer"], item)
        except Exception as error:
            raise TrainingError(
                f"the verifier raised {type(cause).__name__}: {cause}, and {type(error).__name__}"
                " on the right answer",
                where=f"{_WHERE}.dataset {self._options.dataset}",
                rule="a verifier that does not work judges nothing",
                way_out="mend the installation of reasoning-gym, then resume the run",
            ) from error

    def _fits(self, question: str, answer: str) -> bool:
        return (
            0 < len(question) <= self._options.max_prompt_tokens
            and 0 < len(answer) < self._options.max_answer_tokens
            and self._characters.issuperset(question)
            and self._characters.issuperset(answer)
        )


def reasoning_gym_task(options: ReasoningGymOptions, seed: int) -> GeneratedTask:
    """Make the task.

    Raises:
        ConfigError: The package is missing, the data set or one of its options is unknown or out
            of bounds, its verifier runs code, or its items depend on more than their number.
    """
    tokenizer = CharTokenizer(_ALPHABET, where=f"{_WHERE}.dataset {options.dataset}")
    source = _Source(options, tokenizer)
    version = importlib.metadata.version("reasoning-gym")
    problem = Problem(
        name=_NAME,
        options={"version": version, **options.model_dump()},
        draw=source.draw,
        verify=source.verify,
        max_prompt_tokens=options.max_prompt_tokens,
        max_answer_tokens=options.max_answer_tokens,
        slow_verifier=True,
    )
    return GeneratedTask(problem, tokenizer=tokenizer, seed=seed)


def _verdict(score: float, *, failed: bool = False) -> RewardResult:
    parts = {"correct": 1.0 if score >= 1.0 else 0.0, "verifier_failed": 1.0 if failed else 0.0}
    return RewardResult(reward=score, parts=parts)


def _create(options: ReasoningGymOptions) -> Any:
    """The data set, seed 0; items are told apart by their number."""
    factory = _package()
    name = options.dataset
    where = f"{_WHERE}.dataset"
    if name not in factory.DATASETS:
        raise ConfigError(
            f"unknown data set {name!r}",
            where=where,
            rule="it must be one of reasoning-gym's",
            way_out=hint(name, factory.DATASETS),
        )
    if name in RUNS_ANSWERS and not options.allow_running_answers:
        raise ConfigError(
            f"the verifier of {name!r} runs what the model wrote as Python code",
            where=where,
            rule="running answers must be allowed on purpose",
            way_out=f"choose another data set or set {_WHERE}.allow_running_answers=true",
        )
    _check_options(options, factory.DATASETS[name][1])
    datasets = [_instance(factory, options) for _ in range(2)]
    _check_repeatable(datasets[0], datasets[1], where=f"{where} {name}")
    return datasets[0]


def _package() -> Any:
    try:
        importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package reasoning-gym is not installed ({error})",
            where=_WHERE,
            rule="these tasks are an optional extra",
            way_out='pip install "perdure[reasoning-gym]"',
        ) from error
    return importlib.import_module("reasoning_gym.factory")


def _check_options(options: ReasoningGymOptions, config_class: Any) -> None:
    known = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
    unknown = sorted(set(options.config) - known)
    if unknown:
        raise ConfigError(
            f"unknown option(s) {', '.join(unknown)} of data set {options.dataset!r}",
            where=f"{_WHERE}.config",
            rule="seed and size are perdure's, the others the data set's",
            way_out=hint(unknown[0], known),
        )


def _instance(factory: Any, options: ReasoningGymOptions) -> Any:
    try:
        return factory.create_dataset(options.dataset, seed=0, **options.config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the data set refuses its options ({error})",
            where=f"{_WHERE}.config",
            rule=f"they must suit reasoning-gym's {options.dataset!r}",
            way_out="correct the option it names",
        ) from error


def _check_repeatable(first: Any, second: Any, *, where: str) -> None:
    try:
        forward = [first[number]["answer"] for number in _PROBED]
        backward = [second[number]["answer"] for number in reversed(_PROBED)]
    except (IndexError, KeyError) as error:
        raise ConfigError(
            f"the data set has no item of any number ({error})",
            where=where,
            rule="a training stream has no end",
            way_out="choose another data set",
        ) from error
    if forward != backward[::-1]:
        raise ConfigError(
            "its items depend on the order in which they are read",
            where=where,
            rule="a position alone must resume the training stream",
            way_out="choose another data set",
        )
