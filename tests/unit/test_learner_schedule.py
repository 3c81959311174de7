from __future__ import annotations

import pytest

from perdure.core.components import ComponentState
from perdure.learner.components import ScheduleComponent
from perdure.learner.config import ScheduleConfig
from perdure.learner.schedule import LearningRate, rate_factor


def rates(config: ScheduleConfig, positions: range, horizon: int) -> list[float]:
    return [rate_factor(config, position, horizon) for position in positions]


def test_constant() -> None:
    config = ScheduleConfig(kind="constant", warmup_updates=4)
    assert rates(config, range(6), 10) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_its_final_value_at_the_horizon_and_keeps_it() -> None:
    config = ScheduleConfig(kind="linear", warmup_updates=2, final_fraction=0.2)
    assert rates(config, range(8), 6) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine() -> None:
    config = ScheduleConfig(kind="cosine", final_fraction=0.1)
    assert rates(config, range(0, 9, 4), 8) == pytest.approx([1, 0.55, 0.1])


def test_a_restored_position_goes_on_along_the_saved_curve() -> None:
    config = ScheduleConfig(kind="linear")
    before = LearningRate(config, horizon=2048)
    before.position = 1024
    after = LearningRate(config, horizon=2048)
    ScheduleComponent(after).load(ScheduleComponent(before).state(), 1)
    found = []
    for position in (1024, 1280, 1536):
        after.position = position if position > 1024 else after.position
        found.append(1e-3 * after.factor())
    assert found == pytest.approx([5e-4, 3.75e-4, 2.5e-4])


def test_another_curve_is_refused() -> None:
    saved = ScheduleComponent(LearningRate(ScheduleConfig(kind="linear"), horizon=2048)).state()
    other = LearningRate(ScheduleConfig(kind="linear"), horizon=4096)
    with pytest.raises(ValueError, match="horizon is 2048 in the saved state, 4096 in the config"):
        ScheduleComponent(other).load(saved, 1)
    assert other.position == 0


@pytest.mark.parametrize("field", ["kind", "position"])
def test_a_missing_field_is_refused(field: str) -> None:
    component = ScheduleComponent(LearningRate(ScheduleConfig(), horizon=4))
    values = {name: value for name, value in component.state().values.items() if name != field}
    with pytest.raises(ValueError, match="scheduler: fields"):
        component.load(ComponentState(values=values), 1)
