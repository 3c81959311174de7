"""A learner of one rank, in this process. Legend as in ``batch.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.core.components import Checkpointable
from perdure.core.errors import ConfigError
from perdure.core.ids import GlobalStep, PolicyVersion, UpdateId
from perdure.core.trajectories import RewardedGroup
from perdure.learner.anchor import PolicyAnchor
from perdure.learner.api import Example, LocalUpdateResult
from perdure.learner.batch import Piece, UpdateBatch
from perdure.learner.components import (
    Counters,
    CountersComponent,
    OptimizerComponent,
    ScheduleComponent,
    WeightsComponent,
    copy_weights,
    digest_components,
)
from perdure.learner.config import LearnerConfig
from perdure.learner.determinism import deterministic_math
from perdure.learner.metrics import critic_metrics, only_finite
from perdure.learner.optimizer import AdamW
from perdure.learner.passes import evaluate, policy_logprobs, state_values
from perdure.learner.schedule import LearningRate
from perdure.learner.signals import Signals, set_advantages, set_importance
from perdure.learner.supervised import imitate
from perdure.learner.update import Plan, Trained, train_actor, train_critic
from perdure.learner.witness import NO_TRUNCATION, Truncation, Witness
from perdure.models import Transformer, ValueModel, digest_weights, init_weights, weights_of


@dataclass(frozen=True, slots=True)
class LearnerSetup:
    """What the run, not the learner's section, decides.

    Attributes:
        seed: Key of every shuffle and of the critic's first weights.
        total_local_updates: Horizon of the learning-rate schedule.
        local_updates_per_step: K; a step of one local update needs no policy anchor.
        temperature: Of the distribution that is trained: the one tokens are sampled from.
        truncation: What engines leave out of it.
        deterministic: Equal inputs give equal bits, on one thread.
        device: Where the models live.
    """

    seed: int
    total_local_updates: int
    local_updates_per_step: int = 1
    temperature: float = 1.0
    truncation: Truncation = NO_TRUNCATION
    deterministic: bool = False
    device: str = "cpu"


class LocalLearner:
    """Trains ``model`` in place; implements :class:`perdure.learner.api.Learner`.

    The critic (ppo) and the reference policy (``kl.coef`` above 0) are made here, in the model's
    shape; :meth:`begin_training` gives both the weights of the warm-started policy.
    """

    def __init__(self, model: Transformer, *, config: LearnerConfig, setup: LearnerSetup) -> None:
        """Take over a model with its weights.

        Raises:
            ConfigError: The temperature is not above 0 or the warm-up does not fit the horizon.
        """
        _check_setup(config, setup)
        self.config = config
        self._setup = setup
        self._device = torch.device(setup.device)
        self._policy = model.to(self._device)
        self._optimizer = AdamW(self._policy)
        self._value: ValueModel | None = None
        self._value_optimizer: AdamW | None = None
        if config.algorithm == "ppo":
            self._value = ValueModel(model.config).to(self._device)
            init_weights(self._value, setup.seed)
            self._value_optimizer = AdamW(self._value)
        self._reference: Transformer | None = None
        if config.kl.coef > 0:
            self._reference = Transformer(model.config).to(self._device)
            self.freeze_reference()
        self._anchor: PolicyAnchor | None = None
        if config.old_logprobs == "anchor" and setup.local_updates_per_step > 1:
            self._anchor = PolicyAnchor(model, device=self._device, offload=config.offload_anchor)
        self._step: GlobalStep | None = None
        self._rate = LearningRate(config.schedule, horizon=setup.total_local_updates)
        self._counters = Counters()

    @property
    def optimizer_step(self) -> int:
        return self._counters.optimizer_steps

    @property
    def local_updates(self) -> int:
        return self._rate.position

    def supervised_step(self, step: int, examples: Sequence[Example]) -> dict[str, float]:
        assert not self._counters.training, "the warm start is over"
        with deterministic_math(self._setup.deterministic):
            metrics = imitate(
                self._policy, self._optimizer, examples, config=self.config, step=step
            )
        self._counters.supervised_steps = step
        return metrics

    def begin_training(self) -> None:
        """End the warm start: fresh optimizers, schedule and counters at 0, reference frozen.

        The critic starts with the policy's trunk and a value of 0 everywhere.
        """
        self._optimizer.reset()
        if self._value is not None and self._value_optimizer is not None:
            init_weights(self._value, self._setup.seed)
            copy_weights(self._policy, self._value.trunk)
            self._value_optimizer.reset()
        self.freeze_reference()
        self._rate.position = 0
        self._counters.training = True
        self._counters.optimizer_steps = 0
        self._counters.value_optimizer_steps = 0

    def freeze_reference(self) -> None:
        if self._reference is not None:
            copy_weights(self._policy, self._reference)

    def local_update(
        self,
        update: UpdateId,
        groups: Sequence[RewardedGroup],
        *,
        version: PolicyVersion | None = None,
    ) -> LocalUpdateResult:
        batch = UpdateBatch.build(groups, self._device)
        with deterministic_math(self._setup.deterministic):
            return self._local_update(update, batch, version)

    def _local_update(
        self, update: UpdateId, batch: UpdateBatch, version: PolicyVersion | None
    ) -> LocalUpdateResult:
        begins = self._enter_step(update)
        signals = self._signals(batch, step_begins=begins)
        importance = set_importance(self.config, batch, signals)
        set_advantages(self.config, batch, signals)
        plan = Plan(
            config=self.config,
            update=update,
            batch=batch,
            signals=signals,
            seed=self._setup.seed,
            rate_factor=self._rate.factor(),
        )
        critic = self._train_critic(plan)
        actor = train_actor(
            plan, self._policy, self._optimizer, temperature=self._setup.temperature
        )
        self._rate.position += 1
        self._counters.optimizer_steps += actor.steps
        self._counters.value_optimizer_steps += critic.steps
        if not begins and self.config.old_logprobs != "anchor":
            version = None
        same_M = batch.versions_M == (-1 if version is None else version)
        metrics = {
            "trained_tokens": float(batch.tokens.chosen),
            **critic.metrics,
            **actor.metrics,
            **importance,
            **signals.witness.metrics(batch.rollout_logprobs_M, same_M),
            "lr": self.config.lr * plan.rate_factor,
        }
        skipped = critic.skipped + actor.skipped
        return LocalUpdateResult(only_finite(metrics), skipped)

    def _enter_step(self, update: UpdateId) -> bool:
        """Whether the weights are those the global step began with; the anchor keeps them.

        The first batch of a step may have been set aside, and then the second one begins it.
        """
        begins = update.local_update == 0 or update.global_step != self._step
        if begins and self._anchor is not None:
            self._anchor.take(self._policy)
        self._step = update.global_step
        return begins

    def policy_weights(self) -> Mapping[str, Tensor]:
        return weights_of(self._policy)

    def policy_digest(self) -> str:
        return digest_weights(weights_of(self._policy))

    def reference_digest(self) -> str:
        return "" if self._reference is None else digest_weights(weights_of(self._reference))

    def state_digest(self) -> str:
        return digest_components(self.components())

    def components(self) -> dict[str, Checkpointable]:
        """What a checkpoint must store, in restore order.

        ``policy``, ``value``, ``reference``, ``optimizer``, ``value_optimizer`` (as far as the
        algorithm has them), ``scheduler``, ``counters``.
        """
        parts: dict[str, Checkpointable] = {"policy": WeightsComponent("policy", self._policy)}
        if self._value is not None:
            parts["value"] = WeightsComponent("value", self._value)
        if self._reference is not None:
            parts["reference"] = WeightsComponent("reference", self._reference)
        parts["optimizer"] = OptimizerComponent("optimizer", self._optimizer)
        if self._value_optimizer is not None:
            parts["value_optimizer"] = OptimizerComponent("value_optimizer", self._value_optimizer)
        parts["scheduler"] = ScheduleComponent(self._rate)
        parts["counters"] = CountersComponent(self._counters)
        return parts

    def _signals(self, batch: UpdateBatch, *, step_begins: bool) -> Signals:
        """Old and reference log-probabilities and values, before anything is trained.

        With a single optimizer step the actor's own forward pass yields the old log-probabilities,
        unless the weights they belong to are gone or the reward or the correction needs them
        before.
        """
        config = self.config
        in_reward = config.kl.coef > 0 and config.kl.placement == "reward"
        single_step = config.ppo_epochs == 1 and config.mini_batches == 1
        needed_before = in_reward or config.importance.mode != "none"
        moved = config.old_logprobs == "anchor" and not step_begins
        bypass = config.old_logprobs == "rollout"
        old_is_current = single_step and not (needed_before or moved or bypass)
        witness = Witness(batch.tokens.chosen, self._setup.truncation, self._device)
        blank_M = torch.zeros(batch.tokens.chosen, device=self._device)
        old_M = batch.rollout_logprobs_M if bypass else blank_M
        if not (bypass or old_is_current):
            old_M = self._old_logprobs(batch, witness, from_anchor=moved)
        return Signals(
            old_logprobs_M=old_M,
            old_is_current=old_is_current,
            witness=witness,
            reference_M=None if self._reference is None else self._logprobs(self._reference, batch),
            values_M=None if self._value is None else self._values(self._value, batch),
            advantages_M=blank_M,
            returns_M=blank_M,
        )

    def _old_logprobs(self, batch: UpdateBatch, witness: Witness, *, from_anchor: bool) -> Tensor:
        witness.waits = False
        if not from_anchor:
            return self._logprobs(self._policy, batch, witness)
        assert self._anchor is not None, "the setup says that a step has one local update"
        with self._anchor.on_device() as model:
            return self._logprobs(model, batch, witness)

    def _logprobs(
        self, model: Transformer, batch: UpdateBatch, witness: Witness | None = None
    ) -> Tensor:
        def of_piece(piece: Piece) -> Tensor:
            found = policy_logprobs(model, piece, temperature=self._setup.temperature)
            if witness is not None:
                witness.see(piece, *found)
            return found[0]

        return evaluate(
            batch.tokens, of_piece, limit=self.config.micro_batch_tokens, device=self._device
        )

    def _values(self, model: ValueModel, batch: UpdateBatch) -> Tensor:
        return evaluate(
            batch.tokens,
            lambda piece: state_values(model, piece),
            limit=self.config.micro_batch_tokens,
            device=self._device,
        )

    def _train_critic(self, plan: Plan) -> Trained:
        values_M = plan.signals.values_M
        if self._value is None or self._value_optimizer is None or values_M is None:
            return Trained(0, (), {})
        trained = train_critic(plan, self._value, self._value_optimizer)
        before = critic_metrics(values_M, plan.signals.returns_M)
        return Trained(trained.steps, trained.skipped, {**trained.metrics, **before})


def _check_setup(config: LearnerConfig, setup: LearnerSetup) -> None:
    if not setup.temperature > 0:
        raise ConfigError(
            f"temperature is {setup.temperature}",
            where="sampling for training",
            rule="greedy answers have no probabilities to learn from: it must be above 0",
            way_out="set it to 1.0",
        )
    warmup = config.schedule.warmup_updates
    if warmup > setup.total_local_updates:
        raise ConfigError(
            f"warmup_updates is {warmup}",
            where="learner.schedule",
            rule=f"the run has {setup.total_local_updates} local updates",
            way_out="lower it, or train for more steps",
        )
