"""Prompts and answers from a JSONL file, judged by exact match."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field

from perdure.core import keyed_random
from perdure.core.digests import digest_values
from perdure.core.errors import ConfigError
from perdure.tasks.api import Demonstration, Prompt, RewardResult, judge
from perdure.tasks.jsonl_file import (
    Example,
    ExampleFile,
    alphabet_of,
    read_examples,
    require_disjoint,
    require_one_answer,
)
from perdure.tasks.partition import is_held_out
from perdure.tasks.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, finished_text

_NAME = "jsonl"
_STREAM_FORMAT = 1


class JsonlOptions(BaseModel):
    """Where the examples are, how they are cut into tokens, split and compared."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str = Field(min_length=1, description="The file; relative to the recipe's.")
    held_out_path: str | None = Field(
        default=None,
        min_length=1,
        description="File of evaluation examples; without it a share of `path` is held out.",
    )
    held_out_fraction: float = Field(
        default=0.1, gt=0, lt=1, description="Share of prompts held out when there is one file."
    )
    tokenizer: Literal["characters", "bytes"] = Field(
        default="characters", description="One token a character or one a byte of UTF-8."
    )
    alphabet: str | None = Field(
        default=None,
        min_length=1,
        description="Characters that have tokens; without it those that occur in the files.",
    )
    match: Literal["exact", "spaces", "spaces_and_case"] = Field(
        default="spaces",
        description="Compare answers as they are, or without regard to the amount of white space, "
        "or to that and to upper and lower case.",
    )
    answer_marker: str | None = Field(
        default=None,
        min_length=1,
        description="Compare only what follows the last of these in a response; for "
        "demonstrations that lead to the answer.",
    )


class JsonlTask:
    """A :class:`~perdure.tasks.api.Task` over a file. Use :func:`jsonl_task` to make one.

    Each epoch is a keyed permutation of the training examples, so index ``n * epochs + i`` is known
    without going through what came before.
    """

    def __init__(
        self,
        training: Sequence[Example],
        held_out: Sequence[Example],
        *,
        tokenizer: Tokenizer,
        options: JsonlOptions,
        seed: int,
        dataset_digest: str,
    ) -> None:
        self.name = _NAME
        self.tokenizer = tokenizer
        self.dataset_digest = dataset_digest
        self._training = training
        self._held_out = held_out
        self._options = options
        self._seed = seed
        examples = [*training, *held_out]
        self.max_prompt_tokens = max(len(tokenizer.encode(e.prompt)) for e in examples)
        self.slow_verifier = False
        self.max_answer_tokens = 1 + max(len(tokenizer.encode(e.response)) for e in examples)
        self._order = lru_cache(maxsize=4)(self._permutation)

    def prompt(self, index: int) -> Prompt:
        """The training prompt at ``index``."""
        return self._prompt(self._pick("train", index), index)

    def demonstration(self, index: int) -> Demonstration:
        """The warm-start example at ``index``; without a demonstration its answer is shown."""
        example = self._pick("demonstration", index)
        response_ids = (*self.tokenizer.encode(example.response), self.tokenizer.eos_id)
        return Demonstration(
            self.tokenizer.encode(example.prompt), response_ids, (1,) * len(response_ids)
        )

    def held_out(self, count: int, *, or_fewer: bool = False) -> list[Prompt]:
        """The first ``count`` evaluation prompts, in file order."""
        if count > len(self._held_out) and not or_fewer:
            raise ConfigError(
                f"{count} held-out prompts are asked for, the data has {len(self._held_out)}",
                where=f"task {self.name}",
                rule="no held-out prompt is used twice or trained",
                way_out=f"set validation.prompts={len(self._held_out)}, a larger"
                " task.jsonl.held_out_fraction, or a task.jsonl.held_out_path",
            )
        return [self._prompt(example, i) for i, example in enumerate(self._held_out[:count])]

    def verify(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        """Right if the finished response matches the answer."""
        text = finished_text(self.tokenizer, response_ids)
        return judge(text is not None and matches(text, prompt.answer, self._options))

    def _prompt(self, example: Example, index: int) -> Prompt:
        return Prompt(self.tokenizer.encode(example.prompt), self.name, example.answer, index)

    def _pick(self, stream: str, index: int) -> Example:
        epoch, place = divmod(index, len(self._training))
        return self._training[int(self._order(stream, epoch)[place])]

    def _permutation(self, stream: str, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        random = keyed_random.generator(self._seed, f"task/{self.name}/{stream}", epoch)
        return random.permutation(len(self._training))


def jsonl_task(options: JsonlOptions, seed: int) -> JsonlTask:
    """Read the file or files and make the task.

    Raises:
        ConfigError: A file is missing or has bad lines (all named at once), an example lies on
            both sides of the split, or a side is empty.
    """
    main = _read(options.path, options, field="path")
    files = [main]
    if options.held_out_path is None:
        training, held_out = _split(main, options.held_out_fraction)
    else:
        files.append(_read(options.held_out_path, options, field="held_out_path"))
        require_disjoint(main, files[1])
        training, held_out = main.examples, files[1].examples
    tokenizer = _tokenizer(options, files)
    settings = options.model_dump(exclude={"path", "held_out_path"})
    contents = [xxhash.xxh3_128_hexdigest(file.content) for file in files]
    return JsonlTask(
        training,
        held_out,
        tokenizer=tokenizer,
        options=options,
        seed=seed,
        dataset_digest=digest_values(
            [_STREAM_FORMAT, _NAME, settings, contents, tokenizer.digest, seed]
        ),
    )


def matches(text: str, answer: str, options: JsonlOptions) -> bool:
    """Whether a response's ``text`` is right."""
    if options.answer_marker is not None:
        _, marker, text = text.rpartition(options.answer_marker)
        if not marker:
            return False
    return _normalized(text, options.match) == _normalized(answer, options.match)


def _normalized(text: str, match: str) -> str:
    if match == "exact":
        return text
    spaced = " ".join(text.split())
    return spaced if match == "spaces" else spaced.casefold()


def _read(path: str, options: JsonlOptions, *, field: str) -> ExampleFile:
    file = read_examples(
        Path(path),
        field=f"task.{_NAME}.{field}",
        alphabet=options.alphabet if options.tokenizer == "characters" else None,
        judge=lambda text, answer: matches(text, answer, options),
    )
    require_one_answer(
        file, same=lambda a, b: _normalized(a, options.match) == _normalized(b, options.match)
    )
    return file


def _tokenizer(options: JsonlOptions, files: Sequence[ExampleFile]) -> Tokenizer:
    if options.tokenizer == "bytes":
        return ByteTokenizer()
    alphabet = options.alphabet or alphabet_of(files)
    return CharTokenizer(alphabet, where=f"task {_NAME}: {options.path}")


def _split(file: ExampleFile, fraction: float) -> tuple[Sequence[Example], Sequence[Example]]:
    training: list[Example] = []
    held_out: dict[str, Example] = {}
    for example in file.examples:
        if is_held_out(example.prompt, fraction=fraction):
            held_out.setdefault(example.prompt, example)
        else:
            training.append(example)
    if not training or not held_out:
        empty = "training" if not training else "held-out"
        raise ConfigError(
            f"the {empty} side of {len(file.examples)} examples is empty",
            where=str(file.path),
            rule=f"{fraction:.1%} of all prompts are held out, the others are trained",
            way_out="add examples, change held_out_fraction or give a held_out_path",
        )
    return training, list(held_out.values())
