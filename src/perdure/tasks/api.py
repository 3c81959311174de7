"""What a trainer needs of a task: prompts in a fixed order, held-out prompts, and a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from perdure.core.errors import ConfigError
from perdure.tasks.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, complete enough to be judged without the data set.

    Attributes:
        prompt_ids: Token ids; never empty.
        task: Name of the task whose verifier judges the answers.
        answer: What the verifier needs, as text (JSON for structured tasks).
        data_index: Position in the stream the prompt came from, counted from 0.
    """

    prompt_ids: tuple[int, ...]
    task: str
    answer: str
    data_index: int


class Demonstration(NamedTuple):
    """A prompt with a right response (end-of-sequence token included), for the warm start.

    Attributes:
        loss_mask: 1 for each response token that is to be imitated, 0 for what tools say.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The verdict on one response.

    Attributes:
        reward: What training maximises.
        parts: Named components. ``correct`` is always there: 1.0 or 0.0, the right-or-wrong
            verdict that accuracy is the mean of.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict[str, float])


class Task(Protocol):
    """A source of prompts and the judge of their answers.

    Every stream is a pure function of (seed, index): a position alone resumes it. No text of
    :meth:`held_out` ever appears in :meth:`prompt` or :meth:`demonstration`.
    """

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def dataset_digest(self) -> str:
        """Hex fingerprint of all that determines the data: seed, options, alphabet, files."""
        ...

    @property
    def max_prompt_tokens(self) -> int:
        """No prompt is longer."""
        ...

    @property
    def max_answer_tokens(self) -> int:
        """No right answer needs more, end-of-sequence token included."""
        ...

    @property
    def slow_verifier(self) -> bool:
        """Whether :meth:`verify` may take long: it works in a thread then, within a deadline."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The training prompt at ``index`` (from 0, without end)."""
        ...

    def held_out(self, count: int, *, or_fewer: bool = False) -> list[Prompt]:
        """The first ``count`` prompts of the fixed evaluation set, all different.

        Args:
            count: How many.
            or_fewer: Content with all there are.

        Raises:
            ConfigError: The task has fewer and that is not ``or_fewer``.
        """
        ...

    def demonstration(self, index: int) -> Demonstration:
        """The warm-start example at ``index`` (from 0, without end)."""
        ...

    def verify(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        """Judge a response. Any token ids are judged; none makes it raise."""
        ...


def judge(correct: bool) -> RewardResult:
    """The verdict of a right-or-wrong verifier."""
    value = 1.0 if correct else 0.0
    return RewardResult(reward=value, parts={"correct": value})


def require_same_data(task: Task, dataset_digest: str) -> None:
    """Refuse to go on with other data than a run was started with.

    Raises:
        ConfigError: The digests differ.
    """
    if task.dataset_digest != dataset_digest:
        raise ConfigError(
            f"the data has changed since the run was started (digest {task.dataset_digest}, "
            f"was {dataset_digest})",
            where=f"task {task.name}",
            rule="a run goes on with the data, options and seed it was started with",
            way_out="restore the data file and options, or start a new run",
        )
