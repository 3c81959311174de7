"""What the log says of how good a global step came out."""

from __future__ import annotations

from perdure.core.ids import GlobalStep
from perdure.experience.state import ExperienceState


def metrics_of_step(state: ExperienceState, step: GlobalStep) -> dict[str, float]:
    """Metrics of a step as it last came out and of its newest validation.

    Returns:
        Name → value: ``train/…`` of the step, ``held_out/…`` of the validation; empty if the log
        knows neither.
    """
    found: dict[str, float] = {}
    done = state.step_done.get(step)
    if done is not None:
        metrics = done.metrics
        for (redone_step, _), again in state.redone.items():
            if redone_step == step and not again.equal:
                metrics = again.metrics
        found |= {f"train/{name}": value for name, value in metrics.items()}
    for (evaluated_step, _), record in state.evaluated.items():
        if evaluated_step == step:
            found |= {f"held_out/{name}": value for name, value in record.metrics.items()}
    return found
