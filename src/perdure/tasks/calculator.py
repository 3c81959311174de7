"""Sums of long numbers: hard to add in the head, easy with a calculator and a good copy."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from perdure.core.agent_api import CALL_CLOSING, CALL_OPENING, RESULT_CLOSING, RESULT_OPENING
from perdure.tasks.api import RewardResult
from perdure.tasks.generated import Draw, GeneratedTask, Problem
from perdure.tasks.tokenizer import PieceTokenizer, finished_text

_NAME = "calculator"
_TAGS = (CALL_OPENING, CALL_CLOSING, RESULT_OPENING, RESULT_CLOSING)
_PIECES = (*_TAGS, "calculator", *string.digits, *"+-*/()=.,:'_ ", *string.ascii_letters)
_CALL_TOKENS = 5
"""Of a call besides its expression: two tags, the name, two parentheses."""


class CalculatorOptions(BaseModel):
    """Operands and demonstrations of ``calculator``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_digits: int = Field(default=3, ge=1, le=15, description="Fewest digits of an operand.")
    max_digits: int = Field(default=5, ge=1, le=15, description="Most digits of an operand.")
    tool_demonstrations: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Fraction of the demonstrations that call the calculator; the others answer"
        " at once.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_digits > self.max_digits:
            raise ValueError(
                f"min_digits ({self.min_digits}) must not exceed max_digits ({self.max_digits})"
            )
        return self


def calculator(options: CalculatorOptions, seed: int) -> GeneratedTask:
    """``417+58=`` → ``475``, at once or after ``<tool>calculator(417+58)</tool>``.

    The answer is what stands behind the last result. A verdict has the part ``tool_used``: whether
    the response has a call.
    """
    tokenizer = PieceTokenizer(_PIECES, where=f"task {_NAME}")
    (closing,) = tokenizer.encode(CALL_CLOSING)
    width = options.max_digits

    def draw(random: np.random.Generator) -> Draw:
        left, right = (_operand(random, options) for _ in range(2))
        expression, total = f"{left}+{right}", str(left + right)
        if random.random() >= options.tool_demonstrations:
            return Draw(f"{expression}=", total, total)
        call = f"{CALL_OPENING}{_NAME}({expression}){CALL_CLOSING}"
        result = f"{RESULT_OPENING}{total}{RESULT_CLOSING}"
        return Draw(f"{expression}=", call, total, (result, total))

    def verify(answer: str, response_ids: Sequence[int]) -> RewardResult:
        text = finished_text(tokenizer, response_ids)
        used = closing in response_ids
        right = text is not None and text.rpartition(RESULT_CLOSING)[2] == answer
        return RewardResult(
            reward=float(right), parts={"correct": float(right), "tool_used": float(used)}
        )

    problem = Problem(
        name=_NAME,
        options=options.model_dump(),
        draw=draw,
        verify=verify,
        max_prompt_tokens=2 * width + 2,
        max_answer_tokens=(2 * width + 1) + _CALL_TOKENS + 2 * (width + 1) + 2 + 1,
    )
    return GeneratedTask(problem, tokenizer=tokenizer, seed=seed)


def _operand(random: np.random.Generator, options: CalculatorOptions) -> int:
    digits = int(random.integers(options.min_digits, options.max_digits + 1))
    return int(random.integers(10 ** (digits - 1), 10**digits))
