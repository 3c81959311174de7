"""Where runs of the asynchronous modes are struck, and what has to hold of them afterwards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from logged_batches import Acknowledged
from retraining import retrained

from perdure.audit import audit_run
from perdure.experience import read_experience
from perdure.storage import PosixStorage

MODES = ("colocate_async", "separate_async")
POINTS = {
    "log_control_written": 40,
    "log_fsynced": 40,
    "log_acknowledged": 40,
    "log_payload_written": 5,
    "log_payload_fsynced": 5,
    "log_segment_opened": 3,
    "checkpoint_staged": 4,
    "checkpoint_files_durable": 4,
    "manifest_renamed": 4,
    "checkpoint_logged": 4,
    "collect_logged": 2,
    "groups_submitted": 5,
    "session_finished": 96,
    "batch_taken": 12,
    "local_update_done": 12,
    "step_done": 6,
    "weights_published": 7,
    "restore_done": 1,
    "redo_step": 1,
    "redo_done": 1,
}
"""And about how often a run that nothing happens to passes them; a recovery, the last ones."""
BUSY = ("session_finished", "log_acknowledged", "batch_taken", "weights_published")
"""Where engines are killed."""
ONLY_RESUMED = frozenset({"restore_done", "redo_step", "redo_done"})
"""Points that a recovery alone passes."""


def strike(rng: random.Random, points: Sequence[str]) -> dict[str, object]:
    point = rng.choice(points)
    return {"point": point, "hit": rng.randint(1, POINTS[point])}


def overrides(mode: str, seed: int) -> tuple[str, ...]:
    warmup, drop = seed % 4, seed % 2 == 0
    return (
        f"mode={mode}",
        "learner.supervised.steps=0",
        "learner.entropy_coef=0.01",
        "rollout.partial_tokens=2",
        f"trainer.local_updates_per_step={(1, 2, 4)[seed % 3]}",
        f"sampler.age_policy={'drop' if drop else 'wait'}",
        f"sampler.max_prompt_age={seed % 3 + 1 + drop * warmup}",
        f"sampler.num_warmup_batches={warmup}",
    )


def note_durable(run: Path, durable: Acknowledged) -> None:
    """Assert that nothing noted before is missing, and note what is there now."""
    if (run / "log").exists():
        state, _ = read_experience(PosixStorage(run))
        state.check()
        durable.check(state)
        durable.note(state)


def prove(run: Path, durable: Acknowledged) -> None:
    """Nothing durable is missing, the audit finds nothing, and the batches give the weights."""
    state, _ = read_experience(PosixStorage(run))
    durable.check(state)
    assert state.last_step == 6
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())
    assert retrained(run) == {step: done.digest for step, done in state.step_done.items()}
