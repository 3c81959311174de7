"""Optimizer steps over mini-batches, for actor and critic alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perdure.core import keyed_random
from perdure.core.errors import TrainingError
from perdure.core.ids import UpdateId
from perdure.learner.batch import IntArray
from perdure.learner.config import AdamConfig
from perdure.learner.optimizer import AdamW


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Rows of one optimizer step."""

    epoch: int
    index: int
    rows: IntArray


def deal(
    rows: int, *, epochs: int, mini_batches: int, seed: int, update: UpdateId
) -> Iterator[MiniBatch]:
    """Deal the rows of a batch to mini-batches, anew in every epoch.

    The order is keyed by (seed, global step, local update, epoch) alone.
    """
    for epoch in range(epochs):
        draws = keyed_random.generator(
            seed, "shuffle", update.global_step, update.local_update, epoch
        )
        for index, part in enumerate(np.array_split(draws.permutation(rows), mini_batches)):
            yield MiniBatch(epoch, index, part)


class Tally:
    """Means of per-token quantities over every token of the mini-batches that were stepped on."""

    def __init__(self) -> None:
        self.mini_batches = 0
        """Mini-batches accepted so far."""
        self._totals: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._pending: dict[str, list[Tensor]] = {}
        self._pending_counts: dict[str, int] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add a piece's values; they count once :meth:`accept` is called."""
        self._pending.setdefault(name, []).append(values.detach().sum())
        self._pending_counts[name] = self._pending_counts.get(name, 0) + values.numel()

    def accept(self) -> None:
        self.mini_batches += 1
        for name, sums in self._pending.items():
            total = float(torch.stack(sums).double().sum())
            self._totals[name] = self._totals.get(name, 0.0) + total
            self._counts[name] = self._counts.get(name, 0) + self._pending_counts[name]
        self.reject()

    def reject(self) -> None:
        self._pending.clear()
        self._pending_counts.clear()

    def means(self) -> dict[str, float]:
        return {name: total / self._counts[name] for name, total in self._totals.items()}


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of a mini-batch.

    Attributes:
        tokens: Whether there was anything to train on.
        reason: Why no step was taken; empty if one was.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    tokens: bool = True
    reason: str = ""

    @property
    def taken(self) -> bool:
        return not self.reason


def descend(
    optimizer: AdamW,
    losses_of_pieces: Iterable[Callable[[], Tensor]],
    *,
    lr: float,
    adam: AdamConfig,
) -> StepOutcome:
    """Add up the gradient over the pieces, clip it and step, unless something is not finite.

    Then neither parameters nor moments have changed. A loss that was computed without gradient
    counts for the value only.
    """
    optimizer.clear_gradients()
    losses: list[Tensor] = []
    for loss_of_piece in losses_of_pieces:
        loss = loss_of_piece()
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach())
    if not losses:
        return StepOutcome(tokens=False, reason="no token that the policy chose")
    total = float(torch.stack(losses).sum())
    norm = float(optimizer.clip_gradients(adam.max_grad_norm))
    if not math.isfinite(total):
        return StepOutcome(total, norm, reason="loss is not finite")
    if not math.isfinite(norm):
        return StepOutcome(total, norm, reason="gradient is not finite")
    optimizer.step(lr=lr, adam=adam)
    return StepOutcome(total, norm)


def no_step(outcome: StepOutcome, *, where: str, way_out: str) -> TrainingError:
    """The error of a mini-batch that must not be left out."""
    return TrainingError(
        f"{outcome.reason} (loss {outcome.loss}, gradient norm {outcome.grad_norm})",
        where=where,
        rule="no step is taken on such a mini-batch",
        way_out=way_out,
    )
