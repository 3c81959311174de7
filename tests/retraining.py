"""The weights of every step, from the logged batches of a run alone."""

from __future__ import annotations

from pathlib import Path

from logged_batches import logged_group, settled_rows

from perdure.config import config_from_text
from perdure.core.ids import GlobalStep, UpdateId
from perdure.experience import read_experience
from perdure.experience.payloads import PayloadReader
from perdure.storage import PosixStorage
from perdure.tasks.config import make_task
from perdure.trainers.assembly import build_machinery
from perdure.trainers.config import RunConfig
from perdure.trainers.environment import fix_arithmetic


def retrained(run: Path) -> dict[GlobalStep, str]:
    """Digests of all steps when the logged batches are trained once, without any crash."""
    storage = PosixStorage(run)
    config = config_from_text(RunConfig, (run / "config.yaml").read_text(), where="config.yaml")
    fix_arithmetic(config)
    learner = build_machinery(config, make_task(config.task, config.seed)).learner
    learner.begin_training()
    state, _ = read_experience(storage)
    rows, reader = settled_rows(storage), PayloadReader(storage)
    digests: dict[GlobalStep, str] = {}
    for step in state.step_done:
        version = state.version_of(learner.policy_digest())
        for index, taken in enumerate(state.updates_of(step)):
            groups = [logged_group(reader, rows[group], group) for group in taken.groups]
            update = UpdateId(step, taken.update.local_update)
            assert update.local_update == index
            learner.local_update(update, groups, version=version)
        digests[step] = learner.state_digest()
    return digests
