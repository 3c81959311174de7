"""What a run has trained, read from its files: to be asked and to be taken elsewhere.

Nothing of the run is claimed or changed, so it may go on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.checkpoint import CheckpointReader, Manifest, verify
from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError, DamagedError, NothingToResumeError
from perdure.core.ids import PolicyVersion
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage
from perdure.experience import read_run
from perdure.learner.components import WeightsComponent
from perdure.models import Transformer, weights_of
from perdure.models.huggingface import save_pretrained
from perdure.rollout import EmbeddedEngine
from perdure.runtime.answers import AnswerRules, answer
from perdure.runtime.verdicts import Judge
from perdure.storage import PosixStorage
from perdure.tasks.api import Prompt, Task, require_same_data
from perdure.tasks.config import make_task
from perdure.tasks.tokenizer import VOCABULARY_FILE, vocabulary_of
from perdure.trainers.assembly import engine_options, model_shape
from perdure.trainers.config import RunConfig
from perdure.trainers.environment import fix_arithmetic
from perdure.trainers.recorded_config import recorded_config
from perdure.trainers.validation import greedy, held_out_prompts, judge_answer

_POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Trained:
    """The policy of one checkpoint, and what its run is made of."""

    checkpoint: str
    config: RunConfig
    task: Task
    model: Transformer
    passed_over: tuple[str, ...]
    """What is wrong with newer checkpoints, newest first."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A held-out prompt, the greedy answer to it, what is expected, and the verdict."""

    prompt: str
    response: str
    expected: str
    correct: bool


def read_trained(run_dir: Path, committed: Sequence[Checkpointed]) -> Trained:
    """The policy of the newest whole checkpoint among ``committed`` (oldest first).

    Raises:
        NothingToResumeError: None is committed.
        DamagedError: None of them is whole, or ``config.yaml`` is damaged.
        ConfigError: The data were changed.
    """
    storage = PosixStorage(run_dir)
    info = read_run(storage)
    config = recorded_config(storage, run_dir, info=info)
    task = make_task(config.task, config.seed)
    require_same_data(task, info.dataset_digest)
    fix_arithmetic(config)
    manifest, passed_over = _newest_whole(storage, committed, where=str(run_dir))
    model = Transformer(model_shape(config, task))
    tensors = CheckpointReader(storage, manifest).tensors(_POLICY)
    schema = manifest.components[_POLICY].schema_version
    WeightsComponent(_POLICY, model).load(ComponentState(tensors=tensors), schema)
    return Trained(manifest.name.directory, config, task, model, passed_over)


def _newest_whole(
    storage: Storage, committed: Sequence[Checkpointed], *, where: str
) -> tuple[Manifest, tuple[str, ...]]:
    """Its manifest, and what is wrong with the newer ones."""
    if not committed:
        raise NothingToResumeError(
            "no checkpoint was committed yet", where=where, way_out="let the run go on"
        )
    reasons: list[str] = []
    for record in reversed(committed):
        report = verify(storage, record.directory, manifest_digest=record.manifest_digest)
        if report.ok and report.manifest is not None:
            return report.manifest, tuple(reasons)
        reasons.append(f"{record.directory} ({report.reason})")
    raise DamagedError(
        f"no whole checkpoint: {', '.join(reasons)}",
        where=where,
        rule="weights are read from a checkpoint whose every checksum holds",
        way_out="name another one of `perdure ckpt list`, or restore it from a copy",
    )


def sample(trained: Trained, prompts: int | None = None) -> list[Sample]:
    """Greedy answers to the first held-out prompts.

    Args:
        trained: The policy.
        prompts: How many; None means those of the run's own validation.

    Raises:
        ConfigError: The task has fewer.
    """
    task = trained.task
    if prompts is None:
        asked = held_out_prompts(trained.config, task)
    else:
        asked = task.held_out(prompts, or_fewer=True)
    if not asked:
        raise ConfigError(
            "there are no held-out prompts to ask",
            where=f"task {task.name}",
            way_out="say how many: --prompts 20",
        )
    return asyncio.run(_sample(trained, asked))


async def _sample(trained: Trained, asked: Sequence[Prompt]) -> list[Sample]:
    config, task = trained.config, trained.task
    engine = EmbeddedEngine(model_shape(config, task), engine_options(config, task))
    try:
        await engine.load_weights(PolicyVersion(1), weights_of(trained.model))
        loop, tools = config.agent.build()
        rules = AnswerRules(greedy(config, task), config.seed, loop, tools)
        trajectories = await answer(engine, asked, tokenizer=task.tokenizer, rules=rules)
    finally:
        await engine.close()
    judge = Judge(task, timeout_s=config.rollout.verifier_timeout_s)
    samples: list[Sample] = []
    for prompt, trajectory in zip(asked, trajectories, strict=True):
        verdict = await judge_answer(judge, prompt, trajectory)
        samples.append(
            Sample(
                task.tokenizer.decode(prompt.prompt_ids),
                task.tokenizer.decode(trajectory.response_ids_T.tolist()),
                _expected(prompt.answer),
                verdict.parts["correct"] == 1.0,
            )
        )
    return samples


def _expected(answer_text: str) -> str:
    """The right answer as people write it; some verifiers keep more beside it, as JSON."""
    try:
        value = json.loads(answer_text)
    except ValueError:
        return answer_text
    return str(value["answer"]) if isinstance(value, dict) and "answer" in value else answer_text


def export(trained: Trained, directory: Path) -> None:
    """Write the policy in Hugging Face format into a new or empty directory.

    Beside it ``vocabulary.json`` says what the token ids stand for.

    Raises:
        ConfigError: The directory holds something, or no family of models there has this shape.
        StorageError: It cannot be written.
    """
    storage = PosixStorage(directory)
    if storage.list(""):
        raise ConfigError(
            "the directory is not empty",
            where=str(directory),
            rule="an export does not overwrite anything",
            way_out="name a new directory",
        )
    save_pretrained(trained.model, storage, ".")
    vocabulary = vocabulary_of(trained.task.tokenizer)
    text = json.dumps(vocabulary, indent=2, ensure_ascii=False)
    storage.write_atomic(VOCABULARY_FILE, text.encode() + b"\n")
