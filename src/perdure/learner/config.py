"""Settings of the learner. Names and defaults are part of the recipe format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from perdure.algorithms.names import (
    Aggregation,
    ImportanceLevel,
    ImportanceMode,
    KlEstimator,
    OldLogprobs,
)
from perdure.config import OPERATIONAL, Problem, Section

# The arithmetic is float32, where larger numbers are infinite.
Positive = Annotated[float, Field(gt=0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0, le=1e30)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class ScheduleConfig(Section):
    """How the learning rate changes over the horizon."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape behind the warm-up: flat, a straight line or half a cosine down to the final value."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the rate rises in a straight line; part of the horizon."""
    final_fraction: Fraction = 0.0
    """Rate at the end of the horizon, as a fraction of the base rate (not for ``constant``)."""


class AdamConfig(Section):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) and gradient clipping."""

    beta1: BelowOne = 0.9
    """Decay of the mean of gradients."""
    beta2: BelowOne = 0.95
    """Decay of the mean of squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the mean of squares."""
    weight_decay: NotNegative = 0.0
    """Decoupled decay of matrices; vectors (norms, biases) do not decay."""
    max_grad_norm: Positive = 1.0
    """Gradients of a larger global norm are scaled down to it."""


class SupervisedConfig(Section):
    """The supervised warm start before reinforcement learning."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps; 0 means no warm start."""
    batch_size: Count = 256
    """Examples per step."""
    lr: Positive = 1e-3
    """Base learning rate."""
    schedule: ScheduleConfig = ScheduleConfig(kind="cosine", final_fraction=0.1)
    """Learning rate over ``steps``."""
    adam: AdamConfig = AdamConfig()
    """Optimizer of the warm start; training begins with a fresh one."""


class KlConfig(Section):
    """Penalty for moving away from the reference policy."""

    coef: NotNegative = 0.0
    """Weight of the penalty; 0 means no reference model."""
    estimator: KlEstimator = "k3"
    """Estimator of the divergence per token."""
    placement: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken off the reward of each token."""


class ValueConfig(Section):
    """The critic of PPO."""

    lr: Positive = 1e-3
    """Base learning rate of the critic; follows the actor's schedule."""
    clip: Positive | None = 0.2
    """How far an estimate may move in one update; null does not limit it."""


class ImportanceConfig(Section):
    """Correction for tokens that other weights (or another engine's arithmetic) have sampled."""

    mode: ImportanceMode = "none"
    """No correction, weights cut at ``upper``, or weights outside the bounds made 0."""
    level: ImportanceLevel = "token"
    """A weight per token, or the product of a trajectory's at each of its tokens."""
    lower: BelowOne = 0.0
    """Smallest weight that counts (``mask``)."""
    upper: Annotated[float, Field(ge=1, le=1e30)] = 2.0
    """Largest weight that counts (``mask``), or that a weight is cut to (``truncate``)."""

    def problems(self) -> Iterable[Problem]:
        """Only a mask has a lower bound."""
        if self.lower > 0 and self.mode != "mask":
            yield Problem(
                field="lower",
                value=str(self.lower),
                rule=f"mode {self.mode} has no lower bound",
                way_out="set mode=mask, or lower=0",
                reads=("mode",),
            )


class LearnerConfig(Section):
    """How a local update turns settled groups into weights."""

    algorithm: Literal["grpo", "rloo", "reinforce++", "ppo"] = "grpo"
    """Where advantages come from: groups, the rest of the group, the batch, or a critic."""
    lr: Positive = 1e-4
    """Base learning rate of the actor."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over the run; its horizon counts local updates."""
    adam: AdamConfig = AdamConfig()
    """Optimizer of actor and critic."""
    ppo_epochs: Count = 1
    """Passes over the batch of a local update."""
    mini_batches: Count = 1
    """Optimizer steps per pass; trajectories are dealt to them at random."""
    micro_batch_tokens: Count = 2048
    """Padded tokens of one forward pass; bounds memory, does not change the loss."""
    clip_low: BelowOne = 0.2
    """How far the probability ratio may fall below 1."""
    clip_high: NotNegative = 0.2
    """How far the probability ratio may rise above 1."""
    old_logprobs: OldLogprobs = "recompute"
    """Policy that the ratio refers to: the one at the start of the local update, the one at the
    start of the global step (``anchor``: decoupled PPO), or the engine's own log-probabilities
    (``rollout``: bypass)."""
    offload_anchor: Annotated[bool, OPERATIONAL] = True
    """Keep the policy anchor in host memory rather than beside the model."""
    importance: ImportanceConfig = ImportanceConfig()
    """Correction for off-policy tokens."""
    normalise_advantages: bool = True
    """grpo: divide by the group's standard deviation; ppo, reinforce++: whiten over the batch."""
    gamma: Fraction = 1.0
    """Discount per token (ppo, reinforce++)."""
    lam: Fraction = 1.0
    """GAE's λ (ppo)."""
    loss_aggregation: Aggregation = "token-mean"
    """How token losses add up to the loss of a mini-batch."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    kl: KlConfig = KlConfig()
    """Penalty towards the reference policy."""
    value: ValueConfig = ValueConfig()
    """The critic (ppo)."""
    nonfinite: Literal["skip", "raise"] = "skip"
    """A mini-batch whose loss or gradient is not finite: leave it out and say so, or stop."""
    mismatch_alarm: Annotated[Positive | None, OPERATIONAL] = 0.05
    """Warn when an engine's log-probabilities are this far (mean, nats) from the learner's for the
    same weights; null never warns."""
    supervised: SupervisedConfig = SupervisedConfig()
    """Supervised warm start."""

    def problems(self) -> Iterable[Problem]:
        """A warm-up must fit into the warm start's steps; a correction needs two policies."""
        if self.old_logprobs == "rollout" and self.importance.mode != "none":
            yield Problem(
                field="importance.mode",
                value=self.importance.mode,
                rule="with old_logprobs=rollout the old policy is the one that sampled, and every"
                " importance weight is 1",
                way_out="set importance.mode=none, or old_logprobs=anchor",
                reads=("old_logprobs",),
            )
        supervised = self.supervised
        warmup = supervised.schedule.warmup_updates
        if supervised.steps and warmup >= supervised.steps:
            yield Problem(
                field="supervised.schedule.warmup_updates",
                value=str(warmup),
                rule=f"must be below supervised.steps ({supervised.steps})",
                way_out=f"set supervised.schedule.warmup_updates={supervised.steps - 1}"
                " or less, or more steps",
                reads=("supervised.steps",),
            )
