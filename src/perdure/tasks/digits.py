"""Built-in tasks over digits: sort them, reverse them, add two numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from perdure.tasks.api import RewardResult, judge
from perdure.tasks.generated import Draw, GeneratedTask, Problem
from perdure.tasks.tokenizer import CharTokenizer, finished_text

DIGIT_ALPHABET = "0123456789=+"


class DigitsOptions(BaseModel):
    """Lengths of ``sort_digits`` and ``reverse_digits`` prompts, uniform between the bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_digits: int = Field(default=3, ge=1, le=256, description="Fewest digits of a prompt.")
    max_digits: int = Field(default=12, ge=1, le=256, description="Most digits of a prompt.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _require_order(self.min_digits, self.max_digits)
        return self


class AddOptions(BaseModel):
    """Operands of ``add_numbers``; their lengths are uniform between the bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_digits: int = Field(default=1, ge=1, le=18, description="Fewest digits of an operand.")
    max_digits: int = Field(default=2, ge=1, le=18, description="Most digits of an operand.")
    reversed_padded: bool = Field(
        default=False,
        description="Write numbers lowest digit first and padded with zeros to one width.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _require_order(self.min_digits, self.max_digits)
        return self


def _require_order(min_digits: int, max_digits: int) -> None:
    if min_digits > max_digits:
        raise ValueError(f"min_digits ({min_digits}) must not exceed max_digits ({max_digits})")


def sort_digits(options: DigitsOptions, seed: int) -> GeneratedTask:
    """Sort digits that may repeat, ``3132=`` → ``1233``."""
    return _rearrange("sort_digits", options, seed=seed, solve=lambda text: "".join(sorted(text)))


def reverse_digits(options: DigitsOptions, seed: int) -> GeneratedTask:
    """Reverse digits, ``3132=`` → ``2313``."""
    return _rearrange("reverse_digits", options, seed=seed, solve=lambda text: text[::-1])


def add_numbers(options: AddOptions, seed: int) -> GeneratedTask:
    """Add two numbers: ``58+7=`` → ``65``, or reversed and padded ``85+70=`` → ``560``."""
    width = options.max_digits

    def draw(random: np.random.Generator) -> Draw:
        left, right = (_number(random, options) for _ in range(2))
        if options.reversed_padded:
            texts = [f"{left:0{width}}", f"{right:0{width}}", f"{left + right:0{width + 1}}"]
            left_text, right_text, total = (text[::-1] for text in texts)
        else:
            left_text, right_text, total = str(left), str(right), str(left + right)
        return Draw(f"{left_text}+{right_text}=", total, total)

    return _digit_task(
        "add_numbers",
        options,
        seed=seed,
        draw=draw,
        limits=(2 * width + 2, width + 2),
    )


def _number(random: np.random.Generator, options: AddOptions) -> int:
    digits = int(random.integers(options.min_digits, options.max_digits + 1))
    lowest = 0 if digits == 1 else 10 ** (digits - 1)
    return int(random.integers(lowest, 10**digits))


def _rearrange(
    name: str, options: DigitsOptions, *, seed: int, solve: Callable[[str], str]
) -> GeneratedTask:
    def draw(random: np.random.Generator) -> Draw:
        length = int(random.integers(options.min_digits, options.max_digits + 1))
        digits = random.integers(0, 10, size=length, dtype=np.uint8)
        text = (digits + ord("0")).tobytes().decode()
        answer = solve(text)
        return Draw(f"{text}=", answer, answer)

    longest = options.max_digits + 1
    return _digit_task(name, options, seed=seed, draw=draw, limits=(longest, longest))


def _digit_task(
    name: str,
    options: BaseModel,
    *,
    seed: int,
    draw: Callable[[np.random.Generator], Draw],
    limits: tuple[int, int],
) -> GeneratedTask:
    tokenizer = CharTokenizer(DIGIT_ALPHABET, where=f"task {name}")

    def verify(answer: str, response_ids: Sequence[int]) -> RewardResult:
        return judge(finished_text(tokenizer, response_ids) == answer)

    problem = Problem(
        name=name,
        options=options.model_dump(),
        draw=draw,
        verify=verify,
        max_prompt_tokens=limits[0],
        max_answer_tokens=limits[1],
    )
    return GeneratedTask(problem, tokenizer=tokenizer, seed=seed)
