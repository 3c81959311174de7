"""Why nothing moves: what the log and the live file say, put into sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import experience_records as make
import pytest

from perdure.cli.status_lines import lines
from perdure.config import load_config
from perdure.core.records import ControlRecord
from perdure.experience.fold import fold
from perdure.experience.state import ExperienceState
from perdure.runtime.live_file import LiveFile, read_live
from perdure.runtime.metrics_files import newest_events
from perdure.trainers.config import RunConfig
from perdure.trainers.run_status import RunStatus, reasons, run_status

RECIPE = Path(__file__).parents[1] / "drills" / "drill_recipe.yaml"
ENGINE = {"name": "a", "state": "serving", "reason": "", "in_flight": 0, "silent_s": 0.0}
LIVE: dict[str, Any] = {
    "format": 1,
    "wall_s": 100.0,
    "every_s": 2.0,
    "activity": "wait",
    "awaited_groups": 0,
    "engines": [ENGINE],
    "silent_sessions": [],
}


def state() -> ExperienceState:
    records: list[ControlRecord] = [
        *make.finished_group(0),
        make.taken(1, [0]),
        make.step_done(1),
        make.published(2, 1),
        make.submitted(1, step=1),
        make.session_done(1, 0),
        *make.finished_group(2, step=2),
        make.submitted(3, step=2),
    ]
    return fold(make.placed(records))


def status_of(live: dict[str, Any] | None, *overrides: str, now_wall_s: float = 101.0) -> RunStatus:
    config = load_config(RunConfig, RECIPE, ["mode=separate_async", *overrides])
    return run_status(state(), config=config, live=live, now_wall_s=now_wall_s)


def test_what_the_log_says() -> None:
    found = status_of(None)
    assert (found.step, found.last_step, found.total_steps) == (2, 1, 6)
    assert found.groups == {"pending": 1, "running": 1, "finished": 1, "trained": 1}
    assert (found.frontier, found.version, found.version_step) == (4, 2, 1)
    assert str(found.oldest) == "group 1 (running, age 2, 1 sessions missing)"
    assert not found.blocked_by
    assert found.live_age_s is None
    assert list(reasons(found, held=True, run="runs/x")) == []


def test_nobody_works_on_it() -> None:
    assert list(reasons(status_of(LIVE), held=False, run="runs/x")) == [
        "no process works on it; go on with `perdure resume runs/x`"
    ]


def test_a_finished_run_needs_no_reason() -> None:
    assert list(reasons(status_of(None, "trainer.total_steps=1"), held=False, run="runs/x")) == []


def test_old_prompts_hold_back_sampling_and_their_sessions_are_named() -> None:
    silent = {"group": 1, "session": 1, "doing": "generating", "tokens": 7, "silent_s": 33.4}
    live = {**LIVE, "silent_sessions": [silent], "awaited_groups": 4}
    found = status_of(live, "sampler.age_policy=wait", "sampler.max_prompt_age=2")
    assert list(reasons(found, held=True, run="runs/x")) == [
        "group 1 (running, age 2, 1 sessions missing: session 1 is generating, 7 tokens, silent for"
        " 33 s) holds back sampling (sampler.age_policy is wait)"
    ]


def test_the_loop_waits_for_groups() -> None:
    (why,) = reasons(status_of({**LIVE, "awaited_groups": 4}), held=True, run="runs/x")
    assert why.startswith("the loop waits for 4 finished groups, 1 are there; the oldest in")
    assert list(reasons(status_of({**LIVE, "awaited_groups": 1}), held=True, run="runs/x")) == []


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"state": "quarantined", "reason": "late"}, "engine a is quarantined: late"),
        ({"state": "lost", "reason": "killed"}, "engine a is lost: killed"),
        ({"in_flight": 3, "silent_s": 9.6}, "has 3 requests and has been silent for 10 s"),
    ],
)
def test_an_engine_that_gives_nothing_is_named(engine: dict[str, Any], says: str) -> None:
    (why,) = reasons(
        status_of({**LIVE, "engines": [{**ENGINE, **engine}]}), held=True, run="runs/x"
    )
    assert says in why


@pytest.mark.parametrize(
    ("reason", "says"),
    [("asleep", "engine a: asleep, version"), ("late", "engine a: quarantined, version")],
)
def test_an_engine_that_sleeps_while_the_learner_trains_is_not_called_quarantined(
    reason: str, says: str
) -> None:
    engine = {**ENGINE, "state": "quarantined", "reason": reason, "version": 3}
    live = {**LIVE, "activity_s": 1.0, "running_sessions": 0, "generated_tokens": 0}
    status = status_of({**live, "engines": [engine]})
    text = "\n".join(lines(status, held=True, ages_s={}, checkpoint="none"))
    assert says in text
    assert ("(late)" in text) == (reason == "late")


def test_an_engine_that_nobody_asks_may_be_silent() -> None:
    assert not list(
        reasons(
            status_of({**LIVE, "engines": [{**ENGINE, "silent_s": 99.0}]}), held=True, run="runs/x"
        )
    )


@pytest.mark.parametrize(("now_wall_s", "stale"), [(160.0, False), (160.5, True)])
def test_a_process_that_says_nothing_is_called_so(now_wall_s: float, stale: bool) -> None:
    found = status_of(LIVE, now_wall_s=now_wall_s)
    assert found.stale is stale
    assert (
        any("has said nothing" in why for why in reasons(found, held=True, run="runs/x")) is stale
    )


def test_the_live_file_is_replaced_and_nonsense_is_nothing(tmp_path: Path) -> None:
    assert read_live(tmp_path) is None
    LiveFile(tmp_path).write({"wall_s": 1.0})
    LiveFile(tmp_path).write({"wall_s": 2.0})
    assert read_live(tmp_path) == {"format": 1, "wall_s": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["live.json"]
    for text in ("", "{", "[]", '{"format": 2, "wall_s": 1.0}', '{"format": 1}'):
        (tmp_path / "live.json").write_text(text)
        assert read_live(tmp_path) is None


def test_a_live_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    LiveFile(tmp_path / "gone").write({"wall_s": 1.0})
    assert read_live(tmp_path / "gone") is None


def test_the_newest_event_of_each_name(tmp_path: Path) -> None:
    rows = [
        '{"wall_s": 1.0, "event": "step", "global_step": 1}',
        '{"wall_s": 2.0, "event": "step", "global_step": 2}',
        '{"wall_s": 3.0, "event": "published"}',
        '{"wall_s": 4.0, "event": "st',
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(rows))
    found = newest_events(tmp_path, ("step", "published", "warning"))
    assert {name: row["wall_s"] for name, row in found.items()} == {"step": 2.0, "published": 3.0}
    assert newest_events(tmp_path / "none", ("step",)) == {}
