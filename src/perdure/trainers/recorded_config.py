"""The configuration a run was started with, and what may be changed when it is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perdure.config import config_digest, config_from_text
from perdure.core.errors import ConfigError, DamagedError
from perdure.core.storage_api import Storage
from perdure.experience import RunInfo
from perdure.trainers.config import RunConfig

CONFIG_FILE = "config.yaml"

CHANGEABLE = (
    "checkpoint.*, log.*, trainer.warm_start_log_every, task.jsonl.*path, learner.mismatch_alarm,"
    " learner.offload_anchor, learner.nonfinite, model.from_pretrained, runtime, ray.*,"
    " rollout.engines, rollout.spillover, rollout.process.*"
)
"""What an override of a resume may set. None of them changes the bits of a step: one that was
trained under either value of ``nonfinite`` gave the same, or stops the redo with a sentence."""


def recorded_config(
    storage: Storage, run_dir: Path, *, info: RunInfo, overrides: Sequence[str] = ()
) -> RunConfig:
    """Read ``config.yaml`` of a run and apply the overrides of this resume, which are not kept.

    Raises:
        DamagedError: The file is missing or is not the one ``run.json`` has the digest of.
        ConfigError: An override cannot be honoured or would change what was trained, or the run
            was made by a script.
        StorageError: The file cannot be read.
    """
    where = run_dir / CONFIG_FILE
    if not info.config_digest:
        raise ConfigError(
            "is the run of a script with its own loop",
            where=str(run_dir),
            rule="it has no recipe that could be resumed",
            way_out="start the script again, it goes on by itself;"
            f" `perdure ckpt export {run_dir} DIR` writes what it has saved",
        )
    try:
        text = storage.read(CONFIG_FILE).decode()
        recorded = config_from_text(RunConfig, text, where=CONFIG_FILE)
    except FileNotFoundError as error:
        raise _damaged(where, "is missing") from error
    except UnicodeDecodeError as error:
        raise _damaged(where, f"is damaged ({error})") from error
    except ConfigError as error:
        # What the loader advises is meant for whoever writes a recipe.
        raise _damaged(where, f"is damaged ({error.what.splitlines()[0].rstrip(':')})") from error
    if config_digest(recorded) != info.config_digest:
        raise _damaged(where, "is damaged or was edited: its digest is not the one in run.json")
    if not overrides:
        return recorded
    config = config_from_text(RunConfig, text, where=str(where), overrides=overrides)
    if _trained_digest(config, like=recorded) != info.config_digest:
        raise ConfigError(
            f"{' '.join(overrides)} would change what the run computes",
            where="command line",
            rule=f"a run goes on as it was started; a resume may set {CHANGEABLE}",
            way_out="leave it out, or start a new run with it",
        )
    return config


def _trained_digest(config: RunConfig, *, like: RunConfig) -> str:
    """Digest of ``config`` with the settings of ``like`` that matter from the frontier on only."""
    learner = config.learner.model_copy(update={"nonfinite": like.learner.nonfinite})
    return config_digest(config.model_copy(update={"learner": learner}))


def _damaged(path: Path, what: str) -> DamagedError:
    return DamagedError(
        what,
        where=str(path),
        rule="a run is resumed with the configuration it was started with, checked by its digest",
        way_out="restore the file from a copy, or write it again with `perdure config show RECIPE"
        f" [KEY=VALUE ...] > {path}`, which resume checks in the same way",
    )
