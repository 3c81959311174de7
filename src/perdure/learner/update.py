"""Actor and critic updates of a local update. Legend as in ``batch.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.algorithms.divergences import kl_estimate
from perdure.algorithms.losses import clipped_surrogate, clipped_value_loss, entropy, token_weights
from perdure.algorithms.names import Aggregation
from perdure.core.ids import UpdateId
from perdure.learner.batch import IntArray, Piece, UpdateBatch
from perdure.learner.config import LearnerConfig
from perdure.learner.descent import MiniBatch, StepOutcome, Tally, deal, descend, no_step
from perdure.learner.optimizer import AdamW
from perdure.learner.passes import policy_logprobs, state_values
from perdure.learner.signals import Signals
from perdure.models import Transformer, ValueModel


@dataclass(frozen=True, slots=True)
class Plan:
    """What actor and critic share in one local update."""

    config: LearnerConfig
    update: UpdateId
    batch: UpdateBatch
    signals: Signals
    seed: int
    rate_factor: float


@dataclass(frozen=True, slots=True)
class Trained:
    """Steps taken, mini-batches left out, and metrics over the steps taken."""

    steps: int
    skipped: tuple[str, ...]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Trainee:
    """A model in training.

    Attributes:
        losses_of: The loss of each chosen token of a piece.
        moving_N: False for rows known to have no gradient; they are evaluated for metrics only.
    """

    name: str
    optimizer: AdamW
    lr: float
    aggregation: Aggregation
    losses_of: Callable[[Piece], Tensor]
    moving_N: np.ndarray[Any, np.dtype[np.bool_]]
    tally: Tally = field(default_factory=Tally)


def train_actor(plan: Plan, model: Transformer, optimizer: AdamW, *, temperature: float) -> Trained:
    """Epochs of the clipped surrogate, with the entropy bonus and the divergence penalty."""
    tally = Tally()

    def losses_of(piece: Piece) -> Tensor:
        logprobs_K, logprobs_KV = policy_logprobs(model, piece, temperature=temperature)
        if plan.signals.witness.waits and not tally.mini_batches:
            plan.signals.witness.see(piece, logprobs_K, logprobs_KV)
        losses_K = _surrogate_losses(plan, piece, logprobs_K, tally)
        coef = plan.config.entropy_coef
        entropies_K = entropy(logprobs_KV if coef > 0 else logprobs_KV.detach())
        tally.add("entropy", entropies_K)
        return losses_K - coef * entropies_K if coef > 0 else losses_K

    return _train(
        plan,
        _Trainee(
            name="policy",
            optimizer=optimizer,
            lr=plan.config.lr,
            aggregation=plan.config.loss_aggregation,
            losses_of=losses_of,
            moving_N=_rows_that_move(plan),
            tally=tally,
        ),
    )


def _surrogate_losses(plan: Plan, piece: Piece, logprobs_K: Tensor, tally: Tally) -> Tensor:
    config, signals, index_K = plan.config, plan.signals, piece.index_K
    if signals.old_is_current:
        signals.old_logprobs_M[index_K] = logprobs_K.detach()
    old_K = signals.old_logprobs_M[index_K]
    terms = clipped_surrogate(
        logprobs_K,
        old_K,
        signals.advantages_M[index_K],
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    tally.add("clip_fraction", terms.clipped.float())
    tally.add("approx_kl", kl_estimate(old_K, logprobs_K.detach(), "k3"))
    losses_K = terms.losses
    if signals.importance_M is not None:
        losses_K = signals.importance_M[index_K] * losses_K
    if signals.reference_M is None:
        return losses_K
    divergence_K = kl_estimate(logprobs_K, signals.reference_M[index_K], config.kl.estimator)
    tally.add("kl", divergence_K)
    if config.kl.placement == "reward":
        return losses_K
    return losses_K + config.kl.coef * divergence_K


def train_critic(plan: Plan, model: ValueModel, optimizer: AdamW) -> Trained:
    """Epochs of the clipped value loss, every token alike."""
    signals = plan.signals
    assert signals.values_M is not None
    old_values_M, returns_M = signals.values_M, signals.returns_M

    def losses_of(piece: Piece) -> Tensor:
        return clipped_value_loss(
            state_values(model, piece),
            old_values_M[piece.index_K],
            returns_M[piece.index_K],
            clip=plan.config.value.clip,
        )

    return _train(
        plan,
        _Trainee(
            name="value",
            optimizer=optimizer,
            lr=plan.config.value.lr,
            aggregation="token-mean",
            losses_of=losses_of,
            moving_N=np.ones(plan.batch.tokens.rows, dtype=np.bool_),
        ),
    )


def _train(plan: Plan, trainee: _Trainee) -> Trained:
    taken: list[StepOutcome] = []
    skipped: list[str] = []
    for mini_batch in deal(
        plan.batch.tokens.rows,
        epochs=plan.config.ppo_epochs,
        mini_batches=plan.config.mini_batches,
        seed=plan.seed,
        update=plan.update,
    ):
        outcome = _step(plan, trainee, mini_batch.rows)
        if outcome.taken:
            trainee.tally.accept()
            taken.append(outcome)
            continue
        trainee.tally.reject()
        name = _mini_batch_name(plan.update, mini_batch)
        if plan.config.nonfinite == "raise" and outcome.tokens:
            raise no_step(
                outcome,
                where=f"{trainee.name} mini-batch {name}",
                way_out="leave it out with `perdure resume RUN learner.nonfinite=skip`, or start a"
                " new run with a lower learner.lr",
            )
        skipped.append(f"{name} {trainee.name}: {outcome.reason}")
    metrics = trainee.tally.means()
    if taken:
        metrics[f"{trainee.name}_loss"] = float(np.mean([one.loss for one in taken]))
        metrics[f"{trainee.name}_grad_norm"] = float(np.mean([one.grad_norm for one in taken]))
    return Trained(len(taken), tuple(skipped), metrics)


def _step(plan: Plan, trainee: _Trainee, rows: IntArray) -> StepOutcome:
    weights_M = _loss_weights(plan.batch, rows, trainee.aggregation)
    cut = partial(
        plan.batch.tokens.pieces, limit=plan.config.micro_batch_tokens, device=weights_M.device
    )
    moving = trainee.moving_N[rows]
    pieces = [(piece, True) for piece in cut(rows[moving])]
    pieces += [(piece, False) for piece in cut(rows[~moving])]

    def loss_of(piece: Piece, moves: bool) -> Tensor:
        with torch.set_grad_enabled(moves):
            return (trainee.losses_of(piece) * weights_M[piece.index_K]).sum()

    return descend(
        trainee.optimizer,
        (partial(loss_of, piece, moves) for piece, moves in pieces),
        lr=trainee.lr * plan.rate_factor,
        adam=plan.config.adam,
    )


def _rows_that_move(plan: Plan) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Without a term of its own (entropy, divergence) a row of zero advantages has no gradient."""
    config, batch = plan.config, plan.batch
    penalised = config.kl.coef > 0 and config.kl.placement == "loss"
    if config.entropy_coef > 0 or penalised:
        return np.ones(batch.tokens.rows, dtype=np.bool_)
    return batch.spread(plan.signals.advantages_M).ne(0).any(1).cpu().numpy()


def _loss_weights(batch: UpdateBatch, rows: IntArray, aggregation: Aggregation) -> Tensor:
    """Weights of the mini-batch's tokens, (M,); 0 for those of other mini-batches."""
    mask_NR = batch.mask_NR
    member_N = torch.zeros(len(mask_NR), dtype=torch.bool, device=mask_NR.device)
    member_N[torch.from_numpy(rows).to(mask_NR.device)] = True
    return token_weights(mask_NR & member_N[:, None], aggregation)[mask_NR]


def _mini_batch_name(update: UpdateId, mini_batch: MiniBatch) -> str:
    return f"{update.local_update}/{mini_batch.epoch}/{mini_batch.index}"
