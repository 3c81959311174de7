"""Old policies, corrections and the engine's log-probabilities in whole runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from drill_tools import ANCHORED, RECIPE, Events, assert_same_training

from perdure.config import load_config
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.experience import ExperienceState, read_experience
from perdure.rollout.decoder import Decoder
from perdure.storage import PosixStorage
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected

FLOAT_ERROR = 1e-5


def train(run: Path, *overrides: str, display: Events | None = None) -> ExperienceState:
    config = load_config(RunConfig, RECIPE, overrides)
    launch.train(config, run, display=display or Events())
    return state_of(run)


def state_of(run: Path) -> ExperienceState:
    state, _ = read_experience(PosixStorage(run))
    state.check()
    return state


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("learner.old_logprobs=rollout",),
        ("learner.old_logprobs=anchor", "rollout.top_p=0.8", "rollout.temperature=1.3"),
        ("rollout.top_k=4", "learner.importance.mode=mask", "learner.importance.level=sequence"),
    ],
)
def test_in_sync_engine_and_learner_differ_by_float_error(
    tmp_path: Path, overrides: Sequence[str]
) -> None:
    """Every step measures it, on tokens that its weights have sampled, and no alarm is heard."""
    events = Events()
    state = train(tmp_path / "run", *overrides, display=events)
    for record in state.step_done.values():
        metrics = record.metrics
        assert metrics["mismatch_tokens"] > 0
        assert metrics["mismatch_max"] < FLOAT_ERROR
        assert metrics["version_lag_max"] == metrics["version_lag_worst_max"] == 0
        first_update_only = metrics.get("off_policy_tokens", 0) > 0
        assert first_update_only is ("learner.old_logprobs=anchor" not in overrides)
    assert not [e for e in events.of("warning") if "mismatch" in str(e["message"])]


def test_an_engine_that_computes_with_other_weights_raises_an_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It acknowledges the digest of what it was given, and then spoils it."""
    original = Decoder.load_weights

    def spoiled(self: Decoder, weights: Mapping[str, torch.Tensor]) -> str:
        digest = original(self, weights)
        original(self, {**weights, "norm.weight": weights["norm.weight"] * 3.0})
        return digest

    monkeypatch.setattr(Decoder, "load_weights", spoiled)
    events = Events()
    state = train(tmp_path / "run", display=events)
    heard = [str(e["message"]) for e in events.of("warning") if "mismatch" in str(e["message"])]
    assert len(heard) == 1
    assert "learner.mismatch_alarm is 0.05" in heard[0]
    assert all(record.metrics["mismatch_mean"] > 0.05 for record in state.step_done.values())


def test_an_anchored_step_cut_off_in_the_middle_is_redone_exactly(tmp_path: Path) -> None:
    """All local updates of its step are trained again, from an anchor that is taken again."""
    reference = tmp_path / "reference"
    whole = train(reference, *ANCHORED)
    for hit in (10, 12):
        run = tmp_path / f"run-{hit}"
        plan = FaultPlan([FaultRule(FaultPoint.LOCAL_UPDATE_DONE, hit, FaultAction.RAISE)])
        with pytest.raises(InjectedFault):
            launch.train(
                load_config(RunConfig, RECIPE, ANCHORED), run, injected=Injected(faults=plan)
            )
        launch.resume(run)
        assert_same_training(run, reference)
        assert state_of(run).step_done[3].metrics == whole.step_done[3].metrics


def test_the_anchored_run_is_another_than_the_plain_one(tmp_path: Path) -> None:
    """The comparisons above would not notice an anchor that nobody looks at."""
    last = [
        train(tmp_path / name, *ANCHORED, *more, "trainer.total_steps=2").step_done[2].digest
        for name, more in (
            ("anchor", ()),
            ("device", ("learner.offload_anchor=false",)),
            ("recompute", ("learner.old_logprobs=recompute",)),
            ("plain", ("learner.importance.mode=none",)),
        )
    ]
    assert last[0] == last[1]
    assert len(set(last)) == 3
