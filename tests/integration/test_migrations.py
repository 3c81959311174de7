"""Older schema versions load, step by step, and can be stored once more (spec G8)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ckpt_cases import names, perdure
from schema_cases import DEVIATION, NAME, broken, half, migrations, script

from perdure.audit import audit_run
from perdure.checkpoint import Migrations
from perdure.core.clock import SystemClock
from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError, FutureFormatError
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.runtime.maintenance import Place
from perdure.runtime.migrating import migrate_run
from perdure.storage import PosixStorage

GOLDEN = Path(__file__).parent.parent / "golden" / "schema-v1"
WITH = ("--with", "schema_cases:migrations")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of version 1, as it was written then."""
    shutil.copytree(GOLDEN, tmp_path / "run")
    return tmp_path / "run"


def files(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_the_golden_run_is_of_version_1(run: Path) -> None:
    assert script(run, 1, steps=3).loaded == [1]


def test_an_older_version_is_migrated_before_it_is_loaded(run: Path) -> None:
    normaliser = script(run, 3, steps=3, migrations=migrations)
    assert normaliser.loaded == [3]
    np.testing.assert_array_equal(normaliser.tensors["variance"], DEVIATION**2)
    assert normaliser.values == {"name": "x", "count": 0}
    assert script(run, 3, steps=4).loaded == [3]


def test_a_missing_step_is_refused_by_name(run: Path) -> None:
    before = names(run)
    with pytest.raises(ConfigError) as caught:
        script(run, 3, steps=3, migrations=half)
    assert caught.value.what == "there is no migration from schema version 2 to 3"
    assert caught.value.where == f"component {NAME}"
    assert names(run) == before


def test_without_any_step_the_component_is_asked(run: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{NAME}.* version 1 with \['deviation'\]"):
        script(run, 3, steps=3)


def test_a_step_that_fails_is_named(run: Path) -> None:
    with pytest.raises(
        ConfigError, match="from schema version 1 to 2 failed .KeyError: 'variance'"
    ):
        script(run, 2, steps=3, migrations=broken)


def test_a_version_from_the_future_is_refused(run: Path) -> None:
    script(run, 3, steps=3, migrations=migrations)
    with pytest.raises(FutureFormatError, match=f"{NAME}: schema version 3 is newer than 2"):
        script(run, 2, steps=4, migrations=migrations)


def test_migrate_stores_a_new_checkpoint_and_leaves_the_old(run: Path) -> None:
    before, source = files(run), names(run)[-1]
    code, out, err = perdure("ckpt", "migrate", run, *WITH)
    assert code == 0, err
    target = names(run)[-1]
    assert f"{NAME}: schema version 1 to 3" in out
    assert f"{source} stored as {target}" in out
    assert target != source
    after = files(run)
    assert {path: after[path] for path in before if "latest" not in path} == {
        path: data for path, data in before.items() if "latest" not in path
    }
    assert {path for path in after if path.startswith("segments/")} == {
        path for path in before if path.startswith("segments/")
    }
    shown = json.loads(perdure("ckpt", "show", run, "--json")[1])
    assert shown["lineage"]["migrated_from"] == source
    assert shown["components"][NAME]["schema_version"] == 3
    assert perdure("ckpt", "verify", run)[0] == 0
    assert audit_run(run).ok
    report = json.loads(perdure("ckpt", "diff", f"{run}:{source}", run, "--json")[1])
    assert {part["component"] for part in report["parts"]} == {NAME}
    # Without any migration now: version 3 finds its own.
    normaliser = script(run, 3, steps=4)
    assert normaliser.loaded == [3]
    np.testing.assert_array_equal(normaliser.tensors["variance"], DEVIATION**2)


@pytest.mark.parametrize(
    "point",
    [
        FaultPoint.CLAIM_SEALED,
        FaultPoint.CHECKPOINT_STAGED,
        FaultPoint.CHECKPOINT_FILES_DURABLE,
        FaultPoint.MANIFEST_RENAMED,
        FaultPoint.CHECKPOINT_LOGGED,
        FaultPoint.POINTER_WRITTEN,
    ],
)
def test_migrate_cut_short_leaves_the_old_or_the_new(run: Path, point: FaultPoint) -> None:
    before = files(run)
    plan = FaultPlan([FaultRule(point, 1, FaultAction.RAISE)])
    place = Place(PosixStorage(run), SystemClock(), plan)
    with pytest.raises(InjectedFault):
        migrate_run(place, migrations)
    assert plan.fired
    after = files(run)
    assert {path: after[path] for path in before if "latest" not in path} == {
        path: data for path, data in before.items() if "latest" not in path
    }
    assert script(run, 3, steps=3, migrations=migrations).loaded == [3]
    assert audit_run(run).ok


def test_migrate_with_nothing_to_do_claims_nothing(run: Path) -> None:
    assert perdure("ckpt", "migrate", run, *WITH)[0] == 0
    before = files(run)
    code, out, _ = perdure("ckpt", "migrate", run, *WITH)
    assert (code, "nothing to migrate" in out) == (0, True)
    assert files(run) == before


@pytest.mark.parametrize(
    ("source", "code", "text"),
    [
        ("schema_cases:broken", 2, "failed (KeyError"),
        ("schema_cases", 2, "is not MODULE:NAME"),
        ("no_such_module:m", 2, "cannot be imported"),
        ("schema_cases:script", 2, "is not a perdure.checkpoint.Migrations"),
    ],
)
def test_a_migration_that_cannot_be_used_changes_nothing(
    run: Path, source: str, code: int, text: str
) -> None:
    before = files(run)
    found, _, err = perdure("ckpt", "migrate", run, "--with", source)
    assert (found, text in err) == (code, True), err
    assert files(run) == before


def test_steps_by_exact_name_come_before_patterns_and_are_unique() -> None:
    steps = Migrations()

    @steps.step("a/*", 1)
    def for_all(state: ComponentState) -> ComponentState:
        return state

    @steps.step("a/b", 3)
    def for_one(state: ComponentState) -> ComponentState:
        return state

    assert steps.newest("a/c", 1) == 2
    assert steps.newest("a/b", 1) == 1
    assert steps.newest("a/b", 3) == 4
    with pytest.raises(ConfigError, match="two migrations from schema version 1"):
        steps.step("a/*", 1)(for_one)
    forgetful = Migrations()
    forgetful.step("x", 1)(lambda state: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="it returned a NoneType"):
        forgetful.apply("x", ComponentState(), stored=1, wanted=2)
