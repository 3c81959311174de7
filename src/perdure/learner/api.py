"""The learner contract: settled groups in, one update of the policy out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from perdure.core.components import Checkpointable
from perdure.core.ids import PolicyVersion, UpdateId
from perdure.core.trajectories import RewardedGroup

Example = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the answer to be learned; 1 for each token of it that is, or all."""


@dataclass(frozen=True, slots=True)
class LocalUpdateResult:
    """What a local update did.

    Attributes:
        metrics: A function of the learner's state and the groups alone; no wall-clock values.
        skipped: Mini-batches without a step, as ``local_update/epoch/mini_batch reason``.
    """

    metrics: dict[str, float]
    skipped: tuple[str, ...] = ()


class Learner(Protocol):
    """A group of ranks that trains one policy, addressed as a whole.

    Each global step is a function of the learner's state (:meth:`components`), the arguments and
    nothing else, so that logged batches can be trained again, from the first one of their step.
    """

    @property
    def optimizer_step(self) -> int:
        """Calls of the actor's ``optimizer.step()`` since :meth:`begin_training`."""
        ...

    @property
    def local_updates(self) -> int:
        """Local updates since :meth:`begin_training`."""
        ...

    def supervised_step(self, step: int, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step of the warm start; ``step`` counts from 1. Returns its metrics.

        Raises:
            TrainingError: The loss or gradient is not finite, or there is nothing to learn.
        """
        ...

    def begin_training(self) -> None:
        """End the warm start: fresh optimizers, schedule and counters at 0, reference frozen."""
        ...

    def freeze_reference(self) -> None:
        """Make the current policy the reference of the KL penalty (nothing to do without one)."""
        ...

    def local_update(
        self,
        update: UpdateId,
        groups: Sequence[RewardedGroup],
        *,
        version: PolicyVersion | None = None,
    ) -> LocalUpdateResult:
        """Everything after sampling, from old log-probabilities to the actor's steps.

        Args:
            update: Key of every draw.
            groups: The batch.
            version: Under which the weights that the global step began with were published; None
                if they were not. Engines are judged by the tokens they sampled under it.

        Raises:
            TrainingError: A batch that cannot be trained on. If it says that a loss or gradient is
                not finite, earlier mini-batches of this update are in the weights already.
        """
        ...

    def policy_weights(self) -> Mapping[str, Tensor]:
        """The live weights by name; copy what must not change."""
        ...

    def policy_digest(self) -> str:
        """Digest of the policy's weights; what an engine answers that holds the same."""
        ...

    def reference_digest(self) -> str:
        """Digest of the reference's weights; empty without one."""
        ...

    def state_digest(self) -> str:
        """Digest of the whole state: every component's tensors and values."""
        ...

    def components(self) -> dict[str, Checkpointable]:
        """Name → what a checkpoint must store, in restore order."""
        ...
