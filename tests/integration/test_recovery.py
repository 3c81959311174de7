"""Recovery beyond the bit-identical case: drift, rewind, poison, SIGTERM, the critic."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drill_tools import RECIPE, Events, assert_same_training

from perdure.audit import audit_run
from perdure.checkpoint import CheckpointReader, decode_manifest
from perdure.config import load_config
from perdure.core.errors import DamagedError, RedoDivergedError, StoppedError, TrainingError
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.core.ids import GlobalStep, GroupId, LocalUpdate, UpdateId
from perdure.experience import ExperienceState, GroupState, read_experience
from perdure.learner.local import LocalLearner
from perdure.storage import PosixStorage
from perdure.tasks.api import RewardResult
from perdure.tasks.config import make_task
from perdure.tasks.generated import GeneratedTask
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected

POISON = UpdateId(GlobalStep(3), LocalUpdate(1))


def cut_off(run: Path, *overrides: str, point: FaultPoint, hit: int) -> None:
    """Start a run that ends at a fault point."""
    with pytest.raises(InjectedFault):
        launch.train(load_config(RunConfig, RECIPE, overrides), run, injected=ends_at(point, hit))


def ends_at(point: FaultPoint, hit: int) -> Injected:
    return Injected(faults=FaultPlan([FaultRule(point, hit, FaultAction.RAISE)]))


def state_of(run: Path) -> ExperienceState:
    state, _ = read_experience(PosixStorage(run))
    state.check()
    return state


def assert_audited(run: Path) -> None:
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())


@pytest.mark.parametrize(
    "overrides",
    [
        ("learner.algorithm=ppo", "learner.kl.coef=0", "learner.ppo_epochs=2"),
        ("learner.algorithm=rloo", "trainer.local_updates_per_step=4"),
        ("learner.algorithm=reinforce++", "learner.kl.placement=reward"),
        ("learner.schedule.kind=linear", "trainer.local_updates_per_step=1"),
    ],
)
def test_every_algorithm_is_redone_exactly(tmp_path: Path, overrides: Sequence[str]) -> None:
    launch.train(load_config(RunConfig, RECIPE, overrides), tmp_path / "reference")
    cut_off(tmp_path / "run", *overrides, point=FaultPoint.STEP_DONE, hit=4)
    launch.resume(tmp_path / "run")
    assert_same_training(tmp_path / "run", tmp_path / "reference")


def test_a_checkpoint_behind_the_crash_is_redone_to_the_frontier(tmp_path: Path) -> None:
    run = tmp_path / "run"
    cut_off(run, "checkpoint.every_steps=100", point=FaultPoint.STEP_DONE, hit=5)
    events = Events()
    launch.resume(run, display=events)
    assert [fields["global_step"] for fields in events.of("redone")] == [1, 2, 3, 4, 5]
    assert all(fields["equal"] for fields in events.of("redone"))
    assert [fields["global_step"] for fields in events.of("step")] == [6]


def test_other_bits_stop_a_deterministic_redo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    cut_off(run, "checkpoint.every_steps=100", point=FaultPoint.STEP_DONE, hit=2)
    monkeypatch.setattr(LocalLearner, "local_update", _drifting(LocalLearner.local_update))
    with pytest.raises(RedoDivergedError, match="global step 1"):
        launch.resume(run)


def test_drift_of_other_runs_is_reported_under_a_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    overrides = ("checkpoint.every_steps=100", "deterministic=false")
    cut_off(run, *overrides, point=FaultPoint.EVALUATED, hit=2)
    before = state_of(run).newest_version
    monkeypatch.setattr(LocalLearner, "local_update", _drifting(LocalLearner.local_update))
    events = Events()
    launch.resume(run, display=events)
    assert [fields["equal"] for fields in events.of("redone")] == [False, False]
    assert events.of("published")[0]["version"] == before + 1
    state = state_of(run)
    digests = [record.digest for record in state.published.values()]
    assert len(digests) == len(set(digests))
    _check_drifted_curve(run, state)


def _check_drifted_curve(run: Path, state: ExperienceState) -> None:
    """The curve shows the steps as they came out last, each once, also where it is drawn."""
    kept = [record.digest for record in state.redone.values()]
    logged = [state.step_done[GlobalStep(step)].digest for step in (1, 2)]
    assert kept != logged
    lines = (run / "metrics/steps.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["global_step"] for row in rows] == list(state.step_done)
    assert [row["digest"] for row in rows][:2] == kept
    assert [row["metrics"] for row in rows][:2] == [
        dict(sorted(record.metrics.items())) for record in state.redone.values()
    ]
    assert rows[0]["metrics"]


def _drifting(update: Callable[..., Any]) -> Callable[..., Any]:
    """What another machine's arithmetic would do: the same update with other last bits."""

    def drifting(self: LocalLearner, *arguments: Any, **named: Any) -> Any:
        result = update(self, *arguments, **named)
        with torch.no_grad():
            next(iter(self.policy_weights().values())).mul_(1.0 + 1e-6)
        return result

    return drifting


@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_what_a_left_branch_has_generated_is_trained_under_importance_correction_alone(
    tmp_path: Path, correction: str
) -> None:
    run = tmp_path / "run"
    settings = (
        "mode=colocate_async",
        "sampler.num_warmup_batches=0",
        "checkpoint.keep=9",
        # Every batch moves the weights, so that each publication is a version of its own.
        "learner.algorithm=reinforce++",
        "learner.entropy_coef=0.01",
        "learner.lr=0.01",
        f"learner.importance.mode={correction}",
    )
    cut_off(run, *settings, point=FaultPoint.LOCAL_UPDATE_DONE, hit=9)
    events = Events()
    launch.resume(run, redo=False, display=events)
    after = state_of(run)
    assert after.last_step == 6
    used = {
        version
        for record in after.taken.values()
        for group in record.groups
        for done in after.groups[GroupId(group)].done.values()
        for version in (done.first_version, done.last_version)
    }
    assert bool(events.of("groups_abandoned")) is (correction == "none")
    assert (used <= after.published.keys()) is (correction == "none")


def test_a_rewind_voids_what_was_trained_beyond_the_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    cut_off(run, "learner.lr=0.01", point=FaultPoint.LOCAL_UPDATE_DONE, hit=9)
    before = state_of(run)
    assert before.last_step == 4
    events = Events()
    launch.resume(run, redo=False, display=events)
    void = {"name": "step-00000004-1", "step": 4, "void_to_step": 5, "groups": 2}
    assert events.of("rewound") == [void]
    assert events.of("groups_abandoned")[0]["groups"] >= 2
    after = state_of(run)
    assert after.incarnations[-1].base_position is not None
    assert after.last_step == 6
    assert not after.redone
    # The batch of the fifth step was taken and is void; its groups are evicted and replaced.
    assert after.counts[GroupState.TRAINED] == 24
    assert after.counts[GroupState.EVICTED] >= 4
    assert_audited(run)


def test_a_rewind_lets_no_group_mix_weights_that_no_longer_exist(tmp_path: Path) -> None:
    """The sixth step is being generated when the run goes back to the weights of the fourth."""
    run = tmp_path / "run"
    cut_off(run, "learner.lr=0.01", point=FaultPoint.SESSION_FINISHED, hit=5 * 16 + 6)
    before = state_of(run)
    begun = [g.submitted.group for g in before.table.open() if g.done]
    assert begun, "the crash has to leave a group half done"
    launch.resume(run, redo=False)
    after = state_of(run)
    assert {after.table.state_of(group) for group in begun} == {GroupState.EVICTED}
    assert after.counts[GroupState.TRAINED] == 24
    for group in after.groups.values():
        assert len({done.last_version for done in group.done.values()}) == 1
    assert_audited(run)


def test_a_rewind_gives_no_version_to_other_bytes(tmp_path: Path) -> None:
    """The newest version has generated nothing when it becomes void, and so once more."""
    run = tmp_path / "run"
    cut_off(run, "learner.lr=0.01", point=FaultPoint.WEIGHTS_PUBLISHED, hit=6)
    seen = dict(state_of(run).published)
    plan = FaultPlan([FaultRule(FaultPoint.WEIGHTS_PUBLISHED, 2, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        launch.resume(run, redo=False, injected=Injected(faults=plan))
    launch.resume(run, redo=False)
    for version, record in state_of(run).published.items():
        assert version not in seen or seen[version].digest == record.digest
    assert_audited(run)


def test_a_checkpoint_taken_again_stands_where_the_first_one_stood(tmp_path: Path) -> None:
    """Checkpoint 0 is lost and made anew from the warm start while the log goes on far beyond."""
    run = tmp_path / "run"
    cut_off(run, "checkpoint.every_steps=100", point=FaultPoint.STEP_DONE, hit=2)
    (first,) = [record for record in state_of(run).checkpoints if record.phase == "train"]
    shutil.rmtree(run / "checkpoints" / first.directory)
    plan = FaultPlan([FaultRule(FaultPoint.REDO_STEP, 2, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        launch.resume(run, injected=Injected(faults=plan))
    again = state_of(run).checkpoints[-1]
    assert (again.phase, again.step) == ("train", 0)
    assert again.directory != first.directory
    assert again.position == first.position
    events = Events()
    launch.resume(run, redo=False, display=events)
    assert not events.of("redone"), "what was trained beyond the checkpoint is void"
    assert_audited(run)


def test_a_checkpoint_staged_while_redoing_says_how_things_stood_then(
    tmp_path: Path,
) -> None:
    """Clocks, data position and group count are those of its step, not of the log's end."""
    launch.train(load_config(RunConfig, RECIPE, ["checkpoint.keep=9"]), tmp_path / "reference")
    run = tmp_path / "run"
    overrides = ("checkpoint.keep=9", "checkpoint.every_steps=100")
    cut_off(run, *overrides, point=FaultPoint.WEIGHTS_PUBLISHED, hit=5)
    launch.resume(run, ["checkpoint.every_steps=2"])
    expected = manifests(tmp_path / "reference")
    found = manifests(run)
    assert {step for step, incarnation in found if incarnation == 2} == {2, 4, 6}
    for step in (0, 2, 4, 6):
        again = found.get((step, 2)) or found[step, 1]
        assert again == expected[step, 1], step
    assert len({next_group for _, next_group in expected.values()}) == 4


def manifests(run: Path) -> dict[tuple[int, int], tuple[dict[str, int], int]]:
    """(step, incarnation) → clocks and next group of each training checkpoint."""
    storage = PosixStorage(run)
    found: dict[tuple[int, int], tuple[dict[str, int], int]] = {}
    for record in state_of(run).checkpoints:
        if record.phase == "train":
            manifest = decode_manifest(
                storage.read(f"checkpoints/{record.directory}/manifest.json"), where=""
            )
            experience = CheckpointReader(storage, manifest).experience()
            assert experience["next_group"] == experience["next_data_index"]
            name = manifest.name
            found[name.step, name.incarnation] = (
                dict(manifest.info.clocks),
                experience["next_group"],
            )
    return found


def test_other_bits_stop_a_deterministic_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    cut_off(run, point=FaultPoint.WARM_START_STEP, hit=5)
    monkeypatch.setattr(LocalLearner, "supervised_step", _drifting(LocalLearner.supervised_step))
    with pytest.raises(RedoDivergedError, match="warm start step 4"):
        launch.resume(run)


def test_a_warm_start_that_no_checkpoint_holds_is_said_to_begin_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second, third = Events(), Events(), Events()
    cut_off(run, point=FaultPoint.WARM_START_STEP, hit=3)
    later = ends_at(FaultPoint.WARM_START_STEP, 5)
    with pytest.raises(InjectedFault):
        launch.resume(run, ["checkpoint.warm_start_every_steps=9"], display=first, injected=later)
    assert first.of("warm_start_again") == [{"logged_step": 0}]
    later = ends_at(FaultPoint.WARM_START_STEP, 7)
    with pytest.raises(InjectedFault):
        launch.resume(run, display=second, injected=later)
    assert second.of("warm_start_again") == [{"logged_step": 4}]
    launch.resume(run, display=third)
    assert third.of("restored"), "a checkpoint of the warm start was there"
    assert not third.of("warm_start_again")
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    again = [row["logged_step"] for row in rows if row["event"] == "warm_start_again"]
    assert again == [0, 4]


def test_a_batch_that_raises_twice_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    original = LocalLearner.local_update

    def poisoned(self: LocalLearner, update: UpdateId, groups: Any, **named: Any) -> Any:
        if update == POISON:
            raise ZeroDivisionError("this batch")
        return original(self, update, groups, **named)

    monkeypatch.setattr(LocalLearner, "local_update", poisoned)
    config = load_config(RunConfig, RECIPE)
    with pytest.raises(ZeroDivisionError):
        launch.train(config, run)
    with pytest.raises(ZeroDivisionError):
        launch.resume(run)
    events = Events()
    launch.resume(run, display=events)
    assert any("u3.1" in str(fields["message"]) for fields in events.of("warning"))
    state = state_of(run)
    assert state.last_step == config.trainer.total_steps
    assert state.is_poisoned(POISON)
    assert state.counts[GroupState.EVICTED] == 2
    assert_audited(run)
    # A later redo passes over it in the same way.
    launch.resume(run)
    assert state_of(run).last_step == config.trainer.total_steps


def test_a_verifier_that_raises_fails_its_group_and_never_scores_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GeneratedTask.verify
    config = load_config(RunConfig, RECIPE)
    broken = make_task(config.task, config.seed).prompt(5)

    def verify(self: GeneratedTask, prompt: Any, response_ids: Any) -> Any:
        if prompt == broken:
            raise KeyError("broken")
        return original(self, prompt, response_ids)

    monkeypatch.setattr(GeneratedTask, "verify", verify)
    launch.train(config, tmp_path / "run")
    state = state_of(tmp_path / "run")
    assert state.counts[GroupState.EVICTED] == 1
    assert state.counts[GroupState.TRAINED] == 24
    assert len(state.table.refills) == 1
    assert_audited(tmp_path / "run")


@pytest.mark.parametrize("reward", [float("nan"), None])
def test_a_verifier_that_fails_on_held_out_prompts_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: float | None
) -> None:
    def verify(self: GeneratedTask, prompt: Any, response_ids: Any) -> RewardResult:
        if reward is None:
            raise KeyError("broken")
        return RewardResult(reward, {"correct": 0.0})

    monkeypatch.setattr(GeneratedTask, "verify", verify)
    config = load_config(RunConfig, RECIPE, ["learner.supervised.steps=0"])
    with pytest.raises(TrainingError, match="held-out prompt 0"):
        launch.train(config, tmp_path / "run")
    assert not state_of(tmp_path / "run").evaluated


def test_every_part_of_a_verdict_is_in_the_rows_of_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(self: GeneratedTask, prompt: Any, response_ids: Any) -> RewardResult:
        parts = {"correct": 0.0, "verifier_failed": float(prompt.data_index % 4 == 0)}
        return RewardResult(0.0, parts)

    monkeypatch.setattr(GeneratedTask, "verify", verify)
    overrides = ["learner.supervised.steps=0", "trainer.total_steps=1", "validation.prompts=8"]
    launch.train(load_config(RunConfig, RECIPE, overrides), tmp_path / "run")
    for record in state_of(tmp_path / "run").evaluated.values():
        assert record.metrics["verifier_failed"] == 0.25


def test_sigterm_closes_the_log_and_resume_goes_on(tmp_path: Path) -> None:
    launch.train(load_config(RunConfig, RECIPE), tmp_path / "reference")
    run = tmp_path / "run"
    plan = FaultPlan()
    plan.observers.append(
        lambda point: (
            os.kill(os.getpid(), signal.SIGTERM)
            if point is FaultPoint.STEP_DONE and plan.hits[point] == 3
            else None
        )
    )
    with pytest.raises(StoppedError, match="perdure resume"):
        launch.train(load_config(RunConfig, RECIPE), run, injected=Injected(faults=plan))
    assert state_of(run).closed
    launch.resume(run)
    assert_same_training(run, tmp_path / "reference")


@pytest.mark.parametrize(
    ("verdict", "words"), [(0.0, "a longer warm start"), (1.0, "as good as solved")]
)
def test_a_training_without_a_signal_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: float, words: str
) -> None:
    result = RewardResult(verdict, {"correct": verdict})
    monkeypatch.setattr(GeneratedTask, "verify", lambda *_: result)
    overrides = ["learner.supervised.steps=0", "trainer.total_steps=7", "validation.prompts=0"]
    events = Events()
    config = load_config(RunConfig, RECIPE, overrides)
    launch.train(config, tmp_path / "run", display=events)
    (warning,) = events.of("warning")
    assert "for 5 steps almost every group has had equal rewards" in str(warning["message"])
    assert words in str(warning["message"])


def test_a_training_with_a_signal_is_not_warned_of(tmp_path: Path) -> None:
    events = Events()
    launch.train(load_config(RunConfig, RECIPE), tmp_path / "run", display=events)
    assert not [w for w in events.of("warning") if "equal rewards" in str(w["message"])]


def test_a_finished_run_is_resumed_to_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch.train(load_config(RunConfig, RECIPE), run)
    rows = (run / "metrics/steps.jsonl").read_bytes()
    events = Events()
    launch.resume(run, display=events)
    assert not events.of("step")
    assert not events.of("evaluated")
    assert (run / "metrics/steps.jsonl").read_bytes() == rows


def test_a_log_that_is_shorter_than_its_curve_is_damage(tmp_path: Path) -> None:
    """An older copy of the log under newer curves: acknowledged steps would be gone."""
    run = tmp_path / "run"
    launch.train(load_config(RunConfig, RECIPE), run)
    rows = (run / "metrics/steps.jsonl").read_text()
    (run / "metrics/steps.jsonl").write_text(
        rows + rows.splitlines()[-1].replace(":6,", ":7,", 1) + "\n"
    )
    with pytest.raises(DamagedError, match="shows step 7"):
        launch.resume(run)
