"""What may be registered, how it is named, and what is checked after restoring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from standalone_loops import Script, StillClock, crashed, manifest_of, read_log, uninterrupted

from perdure import CheckpointEngine
from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError, DamagedError
from perdure.storage import MemoryStorage


class TestRegistration:
    def test_a_required_part_that_is_missing_refuses_to_start(self) -> None:
        script = Script(MemoryStorage(), required=["counters", "policy", "optimizer"])
        with pytest.raises(ConfigError, match="policy, optimizer"):
            script.run()
        assert script.storage.list("checkpoints") == []

    def test_a_stored_part_that_is_not_registered_refuses_to_go_on(self) -> None:
        storage = MemoryStorage()
        crashed(storage, 15)
        engine = CheckpointEngine("run", storage=storage, clock=StillClock())
        engine.register(counters={"total": 0}, array=np.zeros(2), draws=[])
        with pytest.raises(ConfigError, match="generator"):
            next(iter(engine.steps(40)))

    def test_a_part_that_was_not_stored_refuses_to_go_on(self) -> None:
        storage = MemoryStorage()
        crashed(storage, 15)
        script = Script(storage)
        script.engine.register(more={"x": 1})
        with pytest.raises(ConfigError, match="more"):
            script.run()

    @pytest.mark.parametrize(
        ("name", "part", "message"),
        [
            ("f", len, "builtins.builtin_function_or_method"),
            ("x", 3, "cannot change in place"),
            ("x", np.float64(3), "cannot change in place"),
            ("x", None, "cannot change in place"),
            ("s", {1, 2}, "builtins.set"),
            ("agents", {"0": object()}, "agents/0"),
            ("a b", {"x": 1}, "name of a component"),
            ("progress", {"x": 1}, "registered already"),
        ],
    )
    def test_what_cannot_be_stored_is_refused_by_name(
        self, name: str, part: object, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            CheckpointEngine("run", storage=MemoryStorage()).register(**{name: part})

    def test_one_object_has_one_name(self) -> None:
        counters = {"x": 1}
        engine = CheckpointEngine("run", storage=MemoryStorage())
        engine.register(a=counters)
        with pytest.raises(ConfigError, match="registered already"):
            engine.register(b=counters)

    def test_what_a_dict_holds_later_is_refused_at_the_save_with_its_place(self) -> None:
        script = Script(MemoryStorage())
        with pytest.raises(ConfigError, match=r"counters.*holds a builtins\.object at bad"):
            script.run(each=lambda s: script.counters.update(bad=object()) if s == 9 else None)

    def test_registering_while_the_loop_runs_is_refused(self) -> None:
        script = Script(MemoryStorage())
        with pytest.raises(ConfigError, match="while the loop runs"):
            script.run(each=lambda step: script.engine.register(late={"x": 1}))

    def test_names_nest(self) -> None:
        storage = MemoryStorage()
        agents = [{"policy": torch.nn.Linear(1, 1), "opt": None} for _ in range(2)]
        for agent in agents:
            agent["opt"] = torch.optim.SGD(agent["policy"].parameters(), lr=0.1)
        engine = CheckpointEngine("run", storage=storage, clock=StillClock())
        engine.register(agents=agents, rng="all")
        for _ in engine.steps(1):
            pass
        record = read_log(storage)[0].checkpoints[-1]
        names = manifest_of(storage)(record).components
        assert {"agents/0/policy", "agents/0/opt", "agents/1/policy", "rng"} < set(names)
        assert manifest_of(storage)(record).files.keys() >= {"model/agents/1/policy.safetensors"}

    def test_a_run_of_a_trainer_is_refused(self) -> None:
        from perdure.experience import RunInfo, create_run

        storage = MemoryStorage()
        create_run(storage, RunInfo("id", 0.0, config_digest="digest"))
        with pytest.raises(ConfigError, match="perdure train"):
            Script(storage).run()


class Converting:
    """A component of one's own that knows an older form of its state."""

    def __init__(self, version: int) -> None:
        self.schema_version = version
        self.seconds = 0.0

    def state(self) -> ComponentState:
        key = "minutes" if self.schema_version == 1 else "seconds"
        value = self.seconds / 60 if self.schema_version == 1 else self.seconds
        return ComponentState(values={key: value})

    def load(self, state: ComponentState, schema_version: int) -> None:
        values = state.values
        self.seconds = 60 * values["minutes"] if schema_version == 1 else values["seconds"]


def test_a_component_of_ones_own_converts_older_versions() -> None:
    storage = MemoryStorage()
    for version, expected in ((1, 0.0), (2, 120.0)):
        part = Converting(version)
        engine = CheckpointEngine("run", storage=storage, clock=StillClock())
        engine.register(part=part)
        for step in engine.steps(version, change_total=True):
            part.seconds += 60.0 * step
        assert engine.restored_from is None or part.seconds == expected + 60.0


def test_data_of_another_schema_version_is_refused() -> None:
    storage = MemoryStorage()
    for version in (1, 2):
        engine = CheckpointEngine("run", storage=storage, clock=StillClock())
        engine.add("counters", {"x": 1}, schema_version=version)
        if version == 1:
            list(engine.steps(1))
    with pytest.raises(ConfigError, match="schema version 1"):
        list(engine.steps(1))


class TestSanity:
    def run(self, sanity: Any, *, parts: Any = None) -> Script:
        storage = MemoryStorage()
        crashed(storage, 15)
        script = Script(storage, sanity=sanity)
        if parts is not None:
            parts.append(script)
        script.run()
        return script

    def test_it_works_on_copies_and_changes_nothing(self) -> None:
        seen: list[Any] = []

        def sanity(parts: dict[str, Any]) -> None:
            seen.append(parts["counters"]["total"])
            parts["counters"]["total"] = -1
            parts["generator"].random()
            np.random.random()  # noqa: NPY002
            torch.rand(3)

        before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        script = self.run(sanity)
        after = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        assert seen == [55]
        assert script.state() == uninterrupted()
        assert before == after

    def test_false_or_an_exception_refuses(self) -> None:
        with pytest.raises(DamagedError, match="returned False"):
            self.run(lambda parts: False)
        with pytest.raises(DamagedError, match="raised KeyError"):
            self.run(lambda parts: parts["absent"])

    def test_changing_the_live_objects_is_noticed(self) -> None:
        scripts: list[Script] = []
        with pytest.raises(ConfigError, match="has changed the restored state"):
            self.run(lambda parts: scripts[0].counters.update(total=3), parts=scripts)

    def test_copies_belong_together(self) -> None:
        storage = MemoryStorage()
        losses: list[float] = []

        def sanity(parts: dict[str, Any]) -> None:
            policy, optimizer = parts["policy"], parts["optimizer"]
            before = policy.weight.detach().clone()
            policy(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            parts["schedule"].step()
            losses.append(float((policy.weight - before).detach().abs().sum()))

        for total in (1, 2):
            torch.manual_seed(0)
            policy = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            engine = CheckpointEngine("run", storage=storage, clock=StillClock(), sanity=sanity)
            engine.register(policy=policy, optimizer=optimizer, schedule=schedule)
            weight = policy.weight.detach().clone()
            for _ in engine.steps(total, change_total=True):
                optimizer.step()
                schedule.step()
            assert torch.equal(policy.weight, weight)
        assert losses == [0.5]

    def test_weights_that_are_not_numbers_are_refused(self) -> None:
        storage = MemoryStorage()
        for total in (1, 2):
            policy = torch.nn.Linear(1, 1)
            engine = CheckpointEngine("run", storage=storage, clock=StillClock())
            engine.register(policy=policy)
            if total == 1:
                torch.nn.init.constant_(policy.weight, float("nan"))
                list(engine.steps(total))
        with pytest.raises(DamagedError, match="policy/weight"):
            list(engine.steps(2, change_total=True))
