"""Notices engines whose log-probabilities are not those of the weights they hold (spec E3)."""

from __future__ import annotations

from collections.abc import Mapping


def mismatch_problem(metrics: Mapping[str, float], *, threshold: float | None) -> str | None:
    """What is wrong with the engines of a finished step, in a sentence; None if nothing is.

    Only tokens count that were sampled with the very weights the learner compared.

    Args:
        metrics: Of its ``step_done`` record.
        threshold: ``learner.mismatch_alarm``.
    """
    tokens = metrics.get("mismatch_tokens", 0.0)
    broken = metrics.get("mismatch_not_finite", 0.0)
    if threshold is None or not tokens:
        return None
    if broken:
        return f"{broken:.0f} of {tokens:.0f} log-probabilities are not finite numbers"
    mean = metrics["mismatch_mean"]
    if mean <= threshold:
        return None
    return (
        f"log-probabilities of engines and learner differ by {mean:.3g} on average (at most"
        f" {metrics['mismatch_max']:.3g}) for the same weights and {tokens:.0f} tokens;"
        f" learner.mismatch_alarm is {threshold:g}"
    )


class MismatchWatch:
    """Looks at each finished step; speaks when a mismatch begins, not at every step it lasts."""

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold
        self._alarmed = False

    def look(self, metrics: Mapping[str, float]) -> str | None:
        """What there is to say after a step with these metrics; None almost always."""
        problem = mismatch_problem(metrics, threshold=self._threshold)
        begins = problem is not None and not self._alarmed
        self._alarmed = problem is not None
        if not begins:
            return None
        return (
            f"mismatch: {problem}; what is trained is not what was sampled: look at the engine's"
            " number format, temperature and truncation, or correct for it with"
            " learner.importance.mode=truncate in a new run"
        )
