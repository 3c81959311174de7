"""Supervised warm start: maximum likelihood of given answers. Legend as in ``batch.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from perdure.learner.api import Example
from perdure.learner.batch import Piece, TokenBatch
from perdure.learner.config import LearnerConfig
from perdure.learner.descent import Tally, descend, no_step
from perdure.learner.optimizer import AdamW
from perdure.learner.passes import policy_logprobs
from perdure.learner.schedule import rate_factor
from perdure.models import Transformer


def imitate(
    model: Transformer,
    optimizer: AdamW,
    examples: Sequence[Example],
    *,
    config: LearnerConfig,
    step: int,
) -> dict[str, float]:
    """One step on the mean negative log-likelihood per answer token; ``step`` counts from 1.

    Returns:
        ``loss`` (nats per token), ``token_accuracy`` (how often the answer's token is the most
        likely one), ``grad_norm``, ``lr``.

    Raises:
        TrainingError: The loss or gradient is not finite, a prompt is empty, or every answer is.
    """
    supervised = config.supervised
    tokens = TokenBatch.build(
        [example[0] for example in examples],
        [example[1] for example in examples],
        [example[2] if len(example) == 3 else (1,) * len(example[1]) for example in examples],
    )
    tally = Tally()

    def loss_of(piece: Piece) -> Tensor:
        logprobs_K, logprobs_KV = policy_logprobs(model, piece, temperature=1.0)
        tally.add("token_accuracy", (logprobs_KV.argmax(1) == piece.targets_K).float())
        return -logprobs_K.sum() / tokens.chosen

    lr = supervised.lr * rate_factor(supervised.schedule, step - 1, supervised.steps)
    pieces = tokens.pieces(
        np.arange(tokens.rows),
        limit=config.micro_batch_tokens,
        device=next(model.parameters()).device,
    )
    outcome = descend(
        optimizer, (partial(loss_of, piece) for piece in pieces), lr=lr, adam=supervised.adam
    )
    if not outcome.taken:
        raise no_step(
            outcome,
            where=f"supervised step {step}",
            way_out="look at the task's demonstrations, and start a new run with a lower"
            " learner.supervised.lr",
        )
    tally.accept()
    return {**tally.means(), "loss": outcome.loss, "grad_norm": outcome.grad_norm, "lr": lr}
