"""The estimate of what a step holds: refused, warned of, or neither."""

from __future__ import annotations

from pathlib import Path

import pytest
from drill_tools import RECIPE

from perdure.config import load_config
from perdure.core.errors import ConfigError
from perdure.models import Transformer
from perdure.tasks.config import make_task
from perdure.trainers.assembly import model_shape
from perdure.trainers.config import RunConfig
from perdure.trainers.memory import (
    Memory,
    machine_memory,
    require_memory,
    step_needs,
    warn_of_memory,
)

HUGE = [
    ("trainer.train_batch_size=100000000", "trainer.train_batch_size"),
    ("rollout.sessions_per_group=100000000", "trainer.train_batch_size"),
    ("learner.supervised.batch_size=10000000000", "learner.supervised.batch_size"),
]


@pytest.mark.parametrize(("override", "field"), HUGE)
def test_what_cannot_fit_is_refused_before_there_is_a_run(override: str, field: str) -> None:
    config = load_config(RunConfig, RECIPE, [override])
    with pytest.raises(ConfigError, match=field) as caught:
        require_memory(config, make_task(config.task, config.seed))
    for part in (caught.value.where, caught.value.rule, caught.value.way_out):
        assert part
    assert override.partition("=")[0] in caught.value.way_out


def test_the_bounds_are_where_the_estimate_says() -> None:
    config = load_config(RunConfig, RECIPE)
    task = make_task(config.task, config.seed)
    most = max(need.at_most for need in step_needs(config, task))
    least = max(need.at_least for need in step_needs(config, task))
    assert 0 < least < most
    said: list[str] = []

    def hear(name: str, fields: dict[str, object]) -> None:
        said.append(f"{name}: {fields['message']}")

    require_memory(config, task, memory=Memory(least, 0))
    warn_of_memory(config, task, hear, memory=Memory(most, most))
    assert not said
    with pytest.raises(ConfigError, match="memory: "):
        require_memory(config, task, memory=Memory(least - 1, 0))
    warn_of_memory(config, task, hear, memory=Memory(most, most - 1))
    assert len(said) == 1
    assert said[0].startswith("warning: ")


def test_no_warm_start_needs_nothing() -> None:
    config = load_config(RunConfig, RECIPE, ["learner.supervised.steps=0"])
    assert step_needs(config, make_task(config.task, config.seed))[1].at_most == 0


def test_longer_answers_and_fewer_updates_need_more() -> None:
    def most(*overrides: str) -> int:
        config = load_config(RunConfig, RECIPE, overrides)
        return step_needs(config, make_task(config.task, config.seed))[0].at_most

    assert most("rollout.max_new_tokens=50") > most()
    assert most("trainer.local_updates_per_step=1") > most()


def test_batches_that_run_ahead_are_held_too() -> None:
    def needs(mode: str, ahead: int) -> int:
        overrides = [f"mode={mode}", f"sampler.num_warmup_batches={ahead}"]
        config = load_config(RunConfig, RECIPE, overrides)
        return step_needs(config, make_task(config.task, config.seed))[0].at_least

    assert needs("sync", 3) == needs("sync", 0) == needs("colocate_async", 0)
    assert needs("colocate_async", 3) == 4 * needs("colocate_async", 0)


def test_engines_in_processes_of_their_own_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(*overrides: str) -> int:
        config = load_config(RunConfig, RECIPE, overrides)
        task = make_task(config.task, config.seed)
        return {need.field: need.at_least for need in step_needs(config, task)}["rollout.engines"]

    assert needs() == needs("mode=colocate_async") == 0
    one = needs("mode=separate_async")
    assert one > 200 * 2**20
    assert needs("mode=separate_async", "rollout.engines=3") == 3 * one
    assert needs("mode=separate_async", "rollout.slots=1000") > one
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert needs("mode=separate_async", "runtime=ray") == one
    assert needs("mode=separate_async", "runtime=ray", "ray.address=10.0.0.1:6379") == 0
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert needs("mode=separate_async", "runtime=ray") == 0


def test_the_anchor_is_a_second_copy_of_the_policy() -> None:
    def held(*overrides: str) -> int:
        config = load_config(RunConfig, RECIPE, overrides)
        need = step_needs(config, make_task(config.task, config.seed))[2]
        assert need.at_least == need.at_most
        return need.at_least

    config = load_config(RunConfig, RECIPE)
    task = make_task(config.task, config.seed)
    policy = Transformer(model_shape(config, task))
    nbytes = sum(parameter.nbytes for parameter in policy.parameters())
    assert held("learner.old_logprobs=anchor") == nbytes
    assert held("learner.old_logprobs=anchor", "trainer.local_updates_per_step=1") == 0
    assert held() == 0
    huge = ["learner.old_logprobs=anchor", "model.hidden_size=400000000"]
    config = load_config(RunConfig, RECIPE, huge)
    with pytest.raises(ConfigError, match="old_logprobs"):
        require_memory(config, make_task(config.task, config.seed))


def test_a_container_has_what_it_may_use(tmp_path: Path) -> None:
    limit, meminfo = tmp_path / "memory.max", tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 3 kB\nSwapFree: 0 kB\n")
    files = {"limit_files": [limit], "available_file": meminfo}
    whole = machine_memory(**files)
    assert whole.available == 3 * 1024 < whole.total
    limit.write_text("max\n")
    assert machine_memory(**files) == whole
    limit.write_text("2048\n")
    assert machine_memory(**files) == Memory(2048, 2048)
    meminfo.unlink()
    assert machine_memory(limit_files=[], available_file=meminfo).available == whole.total
