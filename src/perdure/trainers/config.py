"""The configuration of a run: sections composed from what they set, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from perdure.config import OPERATIONAL, DigestedAs, Problem, Section
from perdure.core.rollout_api import MIN_TEMPERATURE
from perdure.learner.config import LearnerConfig
from perdure.tasks.config import SECTIONS, TaskConfig
from perdure.trainers.agent_config import AgentConfig
from perdure.trainers.checkpoint_config import CheckpointConfig
from perdure.trainers.ray_config import RayConfig

if TYPE_CHECKING:
    from perdure.models import ModelConfig


class ModelShape(Section):
    """Shape of the transformer; vocabulary and longest sequence follow from task and rollout."""

    hidden_size: Annotated[int, Field(ge=8, multiple_of=2)] = 96
    """Width of the residual stream."""
    layers: Annotated[int, Field(ge=1)] = 4
    """Number of blocks."""
    heads: Annotated[int, Field(ge=1)] = 4
    """Query heads."""
    kv_heads: Annotated[int, Field(ge=1)] = 4
    """Key-value heads; must divide ``heads``."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 24
    """Size of one head."""
    intermediate_size: Annotated[int, Field(ge=8)] = 256
    """Width of the SwiGLU layer."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary frequencies."""
    tie_embeddings: bool = False
    """One matrix for input and output. Small models learn badly with it under GRPO."""
    qk_norm: bool = True
    """RMSNorm of each query and key head, as in Qwen3."""
    qkv_bias: bool = False
    """Bias of the query, key and value projections, as in Qwen2."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the mean square in every RMSNorm."""
    from_pretrained: str | None = None
    """Directory in Hugging Face format whose weights training begins with; of the same shape."""

    def model_config_for(self, *, vocab_size: int, max_positions: int) -> ModelConfig:
        """The full model configuration."""
        # Everything else here can be read without loading a tensor library, which takes a second.
        from perdure.models import ModelConfig

        return ModelConfig(
            vocab_size=vocab_size,
            max_positions=max_positions,
            **self.model_dump(mode="python", exclude={"from_pretrained"}),
        )

    def problems(self) -> Iterable[Problem]:
        if self.heads % self.kv_heads:
            yield Problem(
                "kv_heads",
                str(self.kv_heads),
                f"must divide heads ({self.heads})",
                f"set kv_heads={self.heads}",
                reads=("heads",),
            )


class EngineProcessConfig(Section):
    """Engines outside the learner's process: when one counts as lost, and how often it is
    replaced.
    """

    start_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest time until a process answers for the first time."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    """Seconds between two signs of life. The end of a process is noticed at once."""
    silence_timeout_s: Annotated[float, Field(gt=0)] = 8.0
    """A process without a sign of life for so long (and a tenth more) is killed. Loading weights
    may not take longer."""
    token_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """An engine that owes tokens and gives none for so long (and a tenth more) is killed."""
    acknowledge_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """An engine that has not acknowledged new weights by then gets no traffic until it has."""
    max_replacements: Annotated[int, Field(ge=0)] = 5
    """How often one engine is replaced within an hour; then it stays lost."""

    def problems(self) -> Iterable[Problem]:
        if self.silence_timeout_s < 2 * self.heartbeat_s:
            yield Problem(
                "silence_timeout_s",
                f"{self.silence_timeout_s:g}",
                f"must be at least twice heartbeat_s ({self.heartbeat_s:g}), or healthy engines"
                " are killed",
                f"set silence_timeout_s={2 * self.heartbeat_s:g} or more",
                reads=("heartbeat_s",),
            )


class RolloutConfig(Section):
    """How answers are generated."""

    engines: Annotated[int, Field(ge=0, le=1024), OPERATIONAL] = 1
    """Engines outside the learner's process: those of ``separate_async``, and of every mode with
    ``runtime: ray``. Elsewhere there is one, in the learner's process."""
    spillover: Annotated[bool, OPERATIONAL] = False
    """In ``separate_async``, let a waiting learner generate when that shortens the wait by more
    than it costs."""
    process: Annotated[EngineProcessConfig, OPERATIONAL] = EngineProcessConfig()

    sessions_per_group: Annotated[int, Field(ge=1)] = 8
    """Sessions (answers) per prompt."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 16
    """Token budget of an answer, stop token included."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE)] = 1.0
    """Scores are divided by it before a token is drawn. Validation is greedy whatever it says."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from the k most likely tokens; 0 draws from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of tokens whose probability reaches p; 1 draws from all."""
    slots: Annotated[int, Field(ge=1)] = 128
    """Requests that one engine decodes at once."""
    session_retries: Annotated[int, Field(ge=0), OPERATIONAL] = 2
    """How often a session is tried again whose engine, tool or connection failed."""
    partial_tokens: Annotated[int | None, Field(ge=1), OPERATIONAL] = 128
    """So many new tokens of an unfinished session are logged: a crash costs it fewer. null: none
    but those in front of a tool call."""
    continue_partials: Annotated[bool, OPERATIONAL] = True
    """Sessions that were interrupted go on from their last durable token, not from the prompt.
    A deterministic run starts them again."""
    verifier_timeout_s: Annotated[float, Field(gt=0), OPERATIONAL] = 60.0
    """Longest wait for a verdict; a session without one has failed. Verifiers that are known to be
    quick are not interrupted."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k > 0 or self.top_p < 1


class TrainerConfig(Section):
    """The controller's loop."""

    total_steps: Annotated[int, Field(ge=1)] = 100
    """Global steps of the whole run."""
    train_batch_size: Annotated[int, Field(ge=1)] = 64
    """Prompt groups per global step."""
    local_updates_per_step: Annotated[int, Field(ge=1)] = 1
    """Local updates per global step (K); one publication at the end."""
    warm_start_log_every: Annotated[int, Field(ge=1), OPERATIONAL] = 50
    """Warm-start steps between two log records."""

    def problems(self) -> Iterable[Problem]:
        if self.train_batch_size % self.local_updates_per_step:
            yield Problem(
                "train_batch_size",
                str(self.train_batch_size),
                f"must be a multiple of local_updates_per_step ({self.local_updates_per_step})",
                f"set train_batch_size={_next_multiple(self)}",
                reads=("local_updates_per_step",),
            )


class SamplerConfig(Section):
    """Which groups the asynchronous modes train on; ``sync`` is on-policy and has no limits."""

    num_warmup_batches: Annotated[int, Field(ge=0)] = 1
    """Batches of prompts submitted ahead of the one that is trained."""
    age_policy: Literal["drop", "wait"] = "drop"
    """Old prompts: drop finished groups above ``max_prompt_age`` and submit a new prompt for each,
    or wait with sampling until no group in progress has reached it."""
    max_prompt_age: Annotated[int, Field(ge=1)] = 8
    """In global steps; a prompt is 1 step old in the step of its submission."""
    max_version_span: Annotated[int | None, Field(ge=1)] = None
    """Most policy versions that may have generated one session; null does not limit them."""
    max_version_lag: Annotated[int | None, Field(ge=0)] = None
    """Most publications since the newest token of a session; null does not limit them."""
    dynamic_filter: bool = False
    """Replace finished groups whose rewards are all equal (DAPO); in every mode."""
    stall_warning_s: Annotated[float, Field(gt=0), OPERATIONAL] = 60.0
    """Seconds without a token or a settled group before the culprit is named."""
    stall_timeout_s: Annotated[float, Field(gt=0), OPERATIONAL] = 1800.0
    """Seconds after which the run gives up instead; a resume goes on from there."""

    def problems(self) -> Iterable[Problem]:
        if self.stall_timeout_s < self.stall_warning_s:
            yield Problem(
                "stall_timeout_s",
                f"{self.stall_timeout_s:g}",
                f"must not be below stall_warning_s ({self.stall_warning_s:g})",
                f"set stall_timeout_s={self.stall_warning_s:g} or more",
                reads=("stall_warning_s",),
            )


class ValidationConfig(Section):
    """Greedy validation on held-out prompts, before training, every N steps and at the end."""

    every_steps: Annotated[int, Field(ge=0)] = 20
    """Global steps between two validations; 0 validates only before training and at the end."""
    prompts: Annotated[int | None, Field(ge=0)] = None
    """How many held-out prompts; null means 512, or all the task has if they are fewer. 0 turns
    validation off."""


class LogConfig(Section):
    """How the experience log is written."""

    segment_bytes: Annotated[int, Field(ge=4096)] = 64 * 2**20
    """A segment of this size is closed and never changes again."""
    linger_s: Annotated[float, Field(ge=0, le=10)] = 0.02
    """How long a group commit waits for more records when nobody waits for it."""


def sections_of_other_tasks(config: RunConfig) -> frozenset[str]:
    """Dotted names of the sections that say nothing about this run."""
    own = SECTIONS.get(config.task.name)
    return frozenset(f"task.{section}" for section in SECTIONS.values() if section != own)


class RunConfig(Section):
    """One run. ``perdure config show RECIPE`` prints it resolved."""

    file_fields: ClassVar[tuple[str, ...]] = (
        "task.jsonl.path",
        "task.jsonl.held_out_path",
        "model.from_pretrained",
    )

    seed: Annotated[int, Field(ge=0)] = 1
    """Initial weights, order of the data and every draw follow from it."""
    mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """Trainer mode: generate a batch, then train it; or generate ahead on the same devices; or on
    devices of their own."""
    runtime: Annotated[Literal["local", "ray"], DigestedAs("local")] = "local"
    """What the engines run on: this machine, or a Ray cluster. A resume may change it."""
    deterministic: bool = False
    """Bit-identical results and redo; refuses to go on when a redone step differs."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of the process. Part of the arithmetic: one and two threads differ."""
    task: TaskConfig
    """What is trained on."""
    model: ModelShape = ModelShape()
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    trainer: TrainerConfig = TrainerConfig()
    sampler: SamplerConfig = SamplerConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: Annotated[CheckpointConfig, OPERATIONAL] = CheckpointConfig()
    log: Annotated[LogConfig, OPERATIONAL] = LogConfig()
    ray: Annotated[RayConfig, OPERATIONAL] = RayConfig()

    def problems(self) -> Iterable[Problem]:
        groups = self.trainer.train_batch_size // self.trainer.local_updates_per_step
        trajectories = groups * self.rollout.sessions_per_group
        if trajectories % self.learner.mini_batches:
            yield Problem(
                "learner.mini_batches",
                str(self.learner.mini_batches),
                f"must divide the {trajectories} trajectories of a local update"
                " (train_batch_size / local_updates_per_step * sessions_per_group)",
                "set learner.mini_batches=1 or change trainer.train_batch_size",
                reads=("trainer", "rollout.sessions_per_group"),
            )
        best = self.checkpoint.keep_best or ""
        if best.startswith("held_out/") and self.validation.prompts == 0:
            yield Problem(
                "checkpoint.keep_best",
                best,
                "there is no validation with validation.prompts = 0",
                "set checkpoint.keep_best=train/reward or leave validation.prompts out",
                reads=("checkpoint", "validation.prompts"),
            )
        algorithm = self.learner.algorithm
        if algorithm in ("grpo", "rloo") and self.rollout.sessions_per_group < 2:
            yield Problem(
                "rollout.sessions_per_group",
                str(self.rollout.sessions_per_group),
                f"{algorithm} compares the sessions of a group, so it needs at least 2",
                "set rollout.sessions_per_group=8 or learner.algorithm=ppo",
                reads=("learner.algorithm",),
            )
        yield from self._mode_problems()
        if self.learner.old_logprobs == "rollout" and self.rollout.is_truncated:
            yield Problem(
                "learner.old_logprobs",
                "rollout",
                "with top_k or top_p the engine's log-probabilities are those of a truncated"
                " distribution, which is not the policy that is trained",
                "set learner.old_logprobs=recompute, or rollout.top_k=0 and rollout.top_p=1",
                reads=("rollout.top_k", "rollout.top_p"),
            )

    @property
    def has_outer_engines(self) -> bool:
        """Whether engines run outside the learner's process."""
        return self.mode == "separate_async" or self.runtime == "ray"

    def _mode_problems(self) -> Iterable[Problem]:
        """What the trainer mode makes impossible."""
        rollout, sampler = self.rollout, self.sampler
        if self.has_outer_engines and rollout.engines == 0:
            who = "separate_async" if self.runtime == "local" else "runtime: ray"
            yield Problem(
                "rollout.engines",
                "0",
                f"{who} generates on engines of their own",
                "set rollout.engines=1 or more, or mode=colocate_async with runtime=local",
                reads=("mode", "runtime"),
            )
        if self.mode != "separate_async" and rollout.spillover:
            yield Problem(
                "rollout.spillover",
                "true",
                f"the learner's devices generate anyway in {self.mode}",
                "set rollout.spillover=false or mode=separate_async",
                reads=("mode",),
            )
        ahead = sampler.num_warmup_batches
        if self.mode == "sync" or sampler.age_policy == "wait":
            return
        if sampler.max_prompt_age <= ahead:
            yield Problem(
                "sampler.max_prompt_age",
                str(sampler.max_prompt_age),
                f"prompts that are submitted num_warmup_batches ({ahead}) ahead are trained when"
                f" they are {ahead + 1} steps old, so all of them would be dropped",
                f"set sampler.max_prompt_age={ahead + 1} or more, sampler.num_warmup_batches="
                f"{sampler.max_prompt_age - 1} or fewer, or sampler.age_policy=wait",
                reads=("mode", "sampler.num_warmup_batches", "sampler.age_policy"),
            )


def _next_multiple(trainer: TrainerConfig) -> int:
    k = trainer.local_updates_per_step
    return -(-trainer.train_batch_size // k) * k
