"""Pickles: only in ``legacy/``, only if both sides ask, never before the checksum is right."""

from __future__ import annotations

import array
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_cases import flip, names, perdure

from perdure import CheckpointEngine
from perdure.audit import audit_run
from perdure.checkpoint import (
    LegacyComponent,
    Migrations,
    ValuesComponent,
    decode_manifest,
    manifest,
)
from perdure.core.clock import SystemClock
from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError, DamagedError, FutureFormatError, PerdureError
from perdure.core.faults import NoFaults
from perdure.runtime.maintenance import Place
from perdure.runtime.migrating import migrate_run
from perdure.storage import PosixStorage

OPENED: list[str] = []


class Env:
    """Refers to itself, to an array, and to what cannot be pickled."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.me = self
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        OPENED.append("env")
        vars(self).update(state)


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("x",)


def train(run: Path, env: object, *, steps: int, legacy: bool = True, **options: Any) -> None:
    engine = CheckpointEngine(run, **options)
    engine.register(counter={"n": 0})
    if legacy:
        engine.add("agents/env", env, legacy=True)
    for _ in engine.steps(steps, change_total=True):
        if isinstance(env, Env):
            env.rng.random()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train(tmp_path / "run", Env(1), steps=3)
    return tmp_path / "run"


def test_it_comes_back_in_place_if_both_sides_ask(run: Path) -> None:
    live, expected = Env(2), np.random.default_rng(1)
    lock, draws = live.lock, [expected.random() for _ in range(4)]
    train(run, live, steps=3, allow_legacy=True)
    assert live.rng.random() == draws[3]
    assert live.me is live
    assert live.lock is lock
    directory = run / "checkpoints" / names(run)[-1]
    assert (directory / "legacy/agents/env.pickle").is_file()
    shown = json.loads((directory / "manifest.json").read_text())
    assert shown["features"] == ["legacy"]
    assert shown["components"]["agents/env"]["legacy_file"] == "legacy/agents/env.pickle"
    assert "legacy_file" not in shown["components"]["counter"]
    assert perdure("ckpt", "verify", run)[0] == 0
    assert audit_run(run).ok


def test_without_being_allowed_nothing_is_opened_or_loaded(run: Path) -> None:
    OPENED.clear()
    with pytest.raises(ConfigError) as caught:
        train(run, Env(2), steps=4)
    assert caught.value.what == "is stored as a pickle"
    assert caught.value.where == "component agents/env"
    assert "allow_legacy=True" in caught.value.way_out
    assert OPENED == []
    assert not (run / "restoring.json").exists()


def test_what_is_registered_otherwise_cannot_take_a_pickle(run: Path) -> None:
    engine = CheckpointEngine(run, allow_legacy=True)
    engine.register(counter={"n": 0})
    engine.add("agents/env", {"rng": 0})
    OPENED.clear()
    with pytest.raises(ConfigError, match="agents/env.* was stored as a pickle"):
        engine.start(4)
    assert OPENED == []


def test_a_damaged_pickle_is_never_opened(run: Path) -> None:
    for name in names(run):
        flip(run / "checkpoints" / name / "legacy/agents/env.pickle", 40)
    OPENED.clear()
    with pytest.raises(DamagedError):
        train(run, Env(2), steps=4, allow_legacy=True)
    assert OPENED == []
    assert "legacy/agents/env.pickle: checksum" in perdure("ckpt", "verify", run)[1]


def test_diff_compares_pickles_without_opening_them(run: Path, tmp_path: Path) -> None:
    train(tmp_path / "other", Env(9), steps=3)
    OPENED.clear()
    report = json.loads(perdure("ckpt", "diff", run, tmp_path / "other", "--json")[1])
    assert [(p["component"], p["part"]) for p in report["parts"]] == [("agents/env", "pickle")]
    assert perdure("ckpt", "diff", run, run)[0] == 0
    assert OPENED == []


def test_migrating_carries_a_pickle_as_it_is(run: Path) -> None:
    migrations = Migrations()
    migrations.step("counter", 1)(lambda state: state)
    OPENED.clear()
    place = Place(PosixStorage(run), SystemClock(), NoFaults())
    done = migrate_run(place, migrations)
    assert OPENED == []
    copies = [
        (run / "checkpoints" / name / "legacy/agents/env.pickle").read_bytes()
        for name in (done.source, done.target)
    ]
    assert copies[0] == copies[1]
    assert perdure("ckpt", "verify", run)[0] == 0


def test_a_state_with_a_pickle_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    class Smuggler(ValuesComponent):
        def state(self) -> ComponentState:
            return ComponentState(legacy=b"x")

    engine = CheckpointEngine(tmp_path / "run")
    engine.register(part=Smuggler({}))
    with pytest.raises(ConfigError, match="component part: its state holds a pickle"):
        for _ in engine.steps(1):
            pass


def test_readers_that_do_not_know_pickles_refuse(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / "checkpoints" / names(run)[-1] / "manifest.json"
    monkeypatch.setattr(manifest, "FEATURES", frozenset({"segments"}))
    with pytest.raises(FutureFormatError, match="does not know: legacy"):
        decode_manifest(path.read_bytes(), where="manifest.json")


@pytest.mark.parametrize(
    ("held", "fresh"),
    [
        ({"a": {1, 2}, "b": (3, None)}, {"gone": 1}),
        ([1, [2], {"x"}], [9, 9]),
        ({1, 2, "x"}, {7}),
        (Plain(a=1, b=[2, 3]), Plain(c=4)),
        (Plain(), Plain(c=4)),
    ],
    ids=["dict", "list", "set", "object", "empty object"],
)
def test_containers_and_objects_are_filled(held: Any, fresh: Any) -> None:
    LegacyComponent(fresh, "x").load(LegacyComponent(held, "x").state(), 1)
    assert (vars(fresh) if isinstance(held, Plain) else fresh) == (
        vars(held) if isinstance(held, Plain) else held
    )


def test_containers_that_hold_themselves() -> None:
    held: list[Any] = [1]
    held.append(held)
    fresh: list[Any] = []
    LegacyComponent(fresh, "x").load(LegacyComponent(held, "x").state(), 1)
    assert fresh[0] == 1
    assert fresh[1] is fresh


@pytest.mark.parametrize("held", [Slotted(), 3, "x", (1,), array.array("i", [1]), torch.zeros(2)])
def test_what_cannot_be_filled_in_place_is_refused(held: Any) -> None:
    with pytest.raises(ConfigError, match="component x: a .* cannot be filled in place"):
        LegacyComponent(held, "x")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (ComponentState(), "without a pickle"),
        (ComponentState(legacy=b"no pickle"), "cannot be unpickled"),
        (LegacyComponent([1], "x").state(), "builtins.list was stored"),
    ],
)
def test_what_is_no_such_pickle_does_not_fit(state: ComponentState, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LegacyComponent({}, "x").load(state, 1)


def test_what_cannot_be_pickled_names_its_part(tmp_path: Path) -> None:
    with pytest.raises(PerdureError, match="component agents/env: .*cannot be pickled"):
        train(tmp_path / "run", Plain(lock=threading.Lock()), steps=1)
