"""Starting from a model that was trained elsewhere, in Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perdure.core.errors import ConfigError, DamagedError
from perdure.models import ModelConfig
from perdure.models.huggingface import copy_pretrained, load_pretrained, read_config
from perdure.tasks.api import Task
from perdure.tasks.tokenizer import VOCABULARY_FILE, vocabulary_of
from perdure.trainers.assembly import model_shape
from perdure.trainers.config import RunConfig


def require_pretrained_fits(config: RunConfig, task: Task) -> None:
    """Refuse a directory whose model is not the one of the recipe; does nothing without one.

    Raises:
        ConfigError: Not such a directory, or it differs: all fields that do are named.
        DamagedError: A file is unreadable; tensors are missing, left over or of wrong shape.
    """
    if config.model.from_pretrained is None:
        return
    directory = Path(config.model.from_pretrained)
    _require_same_vocabulary(directory, task)
    differing = list(_differing(model_shape(config, task), read_config(directory)))
    if differing:
        raise ConfigError(
            f"the recipe builds another model: {', '.join(differing)}",
            where=str(directory / "config.json"),
            rule="a model goes on being trained in the shape that it has",
            way_out="set the fields of the recipe to what the directory has",
        )
    # Every tensor is looked at now, before there is a run that could not start.
    load_pretrained(directory)


def load_initial_weights(config: RunConfig, weights: Mapping[str, Any]) -> None:
    """Copy the weights of ``model.from_pretrained``, if there is one, over the first ones.

    Args:
        config: Of the run.
        weights: Name → parameter of the policy; written to.

    Raises:
        ConfigError: Not such a directory any more.
        DamagedError: Tensors are unreadable, missing, left over or of wrong shape.
    """
    if config.model.from_pretrained is not None:
        copy_pretrained(config.model.from_pretrained, weights)


def _differing(ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
    for field in ModelConfig.model_fields:
        mine, found = getattr(ours, field), getattr(theirs, field)
        if field == "max_positions":
            if mine > found:
                yield f"prompt and answer take {mine} tokens, and it is made for {found}"
        elif field == "vocab_size":
            if mine != found:
                yield f"the task has {mine} tokens, the directory {found}"
        elif mine != found:
            yield f"model.{field} is {mine}, and there {found}"


def _require_same_vocabulary(directory: Path, task: Task) -> None:
    """Compare what token ids stand for, where the directory says it."""
    path = directory / VOCABULARY_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError as error:
        way_out = "export it again"
        raise DamagedError(f"not JSON ({error})", where=str(path), way_out=way_out) from error
    if found != vocabulary_of(task.tokenizer):
        raise ConfigError(
            f"its token ids do not stand for what those of task {task.name} do",
            where=str(path),
            rule="a model knows the tokens that it was trained with",
            way_out="train it on a task with the same characters, or start without it",
        )
