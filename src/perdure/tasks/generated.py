"""Base of tasks that make their prompts: keyed streams, held-out split, demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perdure.core import keyed_random
from perdure.core.digests import digest_values
from perdure.core.errors import ConfigError
from perdure.tasks.api import Demonstration, Prompt, RewardResult
from perdure.tasks.partition import HELD_OUT_FRACTION, is_held_out
from perdure.tasks.tokenizer import Tokenizer

_STREAM_FORMAT = 1
"""Raised whenever the same options and seed would give other data."""
_HELD_OUT_SEED = 0
"""The evaluation set does not depend on the run's seed, so that runs compare."""
_MAX_DRAWS = 2_000
"""Draws for one prompt. A task of ten prompts misses its side with probability below 1e-100."""
_HELD_OUT_REPEATS = 8
"""Repeated prompts in a row, for each one found, after which there are taken to be no more."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn problem.

    Attributes:
        prompt: Its text.
        response: A right response as text, without end of sequence.
        answer: What the verifier needs (:attr:`Prompt.answer`).
        turns: What follows the response: in turn, what a tool says and what the policy goes on
            with.
    """

    prompt: str
    response: str
    answer: str
    turns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """How a generated task draws and judges.

    Attributes:
        name: Name of the task.
        options: Everything besides the seed that determines the draws, msgpack-able.
        draw: One problem from a random generator, or None if this draw gives none.
        verify: The judge: (:attr:`Prompt.answer`, response token ids) → verdict.
        max_prompt_tokens: Bound on prompts.
        max_answer_tokens: Bound on right answers, end of sequence included.
        slow_verifier: Whether ``verify`` may take long.
    """

    name: str
    options: dict[str, Any]
    draw: Callable[[np.random.Generator], Draw | None]
    verify: Callable[[str, Sequence[int]], RewardResult]
    max_prompt_tokens: int
    max_answer_tokens: int
    slow_verifier: bool = False


class GeneratedTask:
    """A :class:`~perdure.tasks.api.Task` over an endless supply of drawn problems.

    Every index has a random stream of its own. A draw on the wrong side of the held-out split is
    thrown away and the next one of the same stream is taken, so that a prompt depends on
    (seed, index) only.
    """

    def __init__(self, problem: Problem, *, tokenizer: Tokenizer, seed: int) -> None:
        self.name = problem.name
        self.tokenizer = tokenizer
        self.max_prompt_tokens = problem.max_prompt_tokens
        self.max_answer_tokens = problem.max_answer_tokens
        self.slow_verifier = problem.slow_verifier
        self.dataset_digest = digest_values(
            [_STREAM_FORMAT, problem.name, problem.options, tokenizer.digest, seed]
        )
        self._problem = problem
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        """The training prompt at ``index``."""
        return self._prompt(self._training_draw("train", index), index)

    def demonstration(self, index: int) -> Demonstration:
        """The warm-start example at ``index``."""
        draw = self._training_draw("demonstration", index)
        parts = [self.tokenizer.encode(text) for text in (draw.response, *draw.turns)]
        mask = [(index + 1) % 2 for index, part in enumerate(parts) for _ in part]
        return Demonstration(
            self.tokenizer.encode(draw.prompt),
            (*(token for part in parts for token in part), self.tokenizer.eos_id),
            (*mask, 1),
        )

    def held_out(self, count: int, *, or_fewer: bool = False) -> list[Prompt]:
        """The first ``count`` evaluation prompts; the same for every seed."""
        found: dict[str, Draw] = {}
        index = repeats = 0
        while len(found) < count and repeats < _HELD_OUT_REPEATS * (10 + len(found)):
            draws = self._draws(_HELD_OUT_SEED, "held_out", index)
            draw = next((d for d in draws if is_held_out(d.prompt)), None)
            if draw is None:
                break
            repeats = repeats + 1 if draw.prompt in found else 0
            found.setdefault(draw.prompt, draw)
            index += 1
        if len(found) < count and not or_fewer:
            raise ConfigError(
                f"only {len(found)} different held-out prompts were found, {count} are asked for",
                where=f"task {self.name}",
                rule=f"{HELD_OUT_FRACTION:.1%} of all prompts are held out, none is used twice",
                way_out=f"set validation.prompts={len(found)} or let the task make longer ones",
            )
        return [self._prompt(draw, index) for index, draw in enumerate(found.values())]

    def verify(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        """Judge a response."""
        return self._problem.verify(prompt.answer, response_ids)

    def _prompt(self, draw: Draw, index: int) -> Prompt:
        return Prompt(self.tokenizer.encode(draw.prompt), self.name, draw.answer, index)

    def _training_draw(self, stream: str, index: int) -> Draw:
        for draw in self._draws(self._seed, stream, index):
            if not is_held_out(draw.prompt):
                return draw
        raise ConfigError(
            f"no training prompt in {_MAX_DRAWS} draws",
            where=f"task {self.name}",
            rule="the task's options must leave prompts to train on",
            way_out="widen the task's options (more digits, higher token limits)",
        )

    def _draws(self, seed: int, stream: str, index: int) -> Iterator[Draw]:
        random = keyed_random.generator(seed, f"task/{self.name}/{stream}", index)
        for _ in range(_MAX_DRAWS):
            draw = self._problem.draw(random)
            if draw is not None:
                yield draw
