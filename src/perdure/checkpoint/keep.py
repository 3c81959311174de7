"""Which checkpoints stay, and why: rules, and a decision over records that does no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from perdure.core.errors import ConfigError
from perdure.core.records import Checkpointed

Mode = Literal["min", "max"]
Metrics = Mapping[str, float]

_WARM = "warm"
"""Phase whose steps are another clock; its checkpoints stay only as long as they are new."""


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the ``count`` checkpoints whose ``metric`` is lowest or highest."""

    metric: str
    mode: Mode
    count: int = 1


@dataclass(frozen=True, slots=True)
class Keep:
    """Rules of retention; a checkpoint stays while one of them holds. Made by :func:`keep`.

    Attributes:
        last: Newest ones, which can be resumed with everything the log has behind them.
        every: Archival: the first one at or after each multiple of so many steps.
        best: Archival: the best by a metric.
    """

    last: int = 2
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last):
            raise _refused(
                f"is {self.last!r}",
                "keep",
                "a number, at least 1: the last verified one is never deleted",
            )
        if self.every is not None and not _is_count(self.every):
            raise _refused(f"is {self.every!r}", "keep.every", "at least 1 step")
        best = self.best
        if best is None:
            return
        if not best.metric or best.mode not in ("min", "max") or not _is_count(best.count):
            raise _refused(
                f"is {(best.metric, best.mode, best.count)}",
                "keep.best",
                "the name of a metric, min or max, and how many, at least 1",
            )

    def encode(self) -> dict[str, Any]:
        """Its part of a manifest."""
        best = self.best
        return {
            "last": self.last,
            "every": self.every,
            "best": None if best is None else [best.metric, best.mode, best.count],
        }

    @classmethod
    def decode(cls, item: Mapping[str, Any]) -> Self:
        """Read :meth:`encode` back. Raises ``KeyError``, ``TypeError`` or ``ValueError``."""
        every, best = item["every"], item["best"]
        return cls(
            int(item["last"]),
            None if every is None else int(every),
            None if best is None else Best(str(best[0]), best[1], int(best[2])),
        )


def keep(
    *, last: int = 2, every: int | None = None, best: tuple[str, Mode, int] | None = None
) -> Keep:
    """Keep the newest ``last`` checkpoints, and beside them archival ones.

    Args:
        last: At least 1; 2 leaves one to fall back to.
        every: The first checkpoint at or after each multiple of so many steps stays.
        best: ``("reward", "max", 2)``: the two with the highest ``reward`` stay. Among equals the
            older one does. A checkpoint without that metric, or with one that is no finite number,
            is none of the best.

    Raises:
        ConfigError: A number is out of range, or ``best`` is not of that form.
    """
    if best is not None and len(best) != 3:
        raise _refused(f"is {best}", "keep.best", "three values: metric, min or max, how many")
    return Keep(last, every, None if best is None else Best(*best))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


MetricsOf = Callable[[Checkpointed], Metrics | None]
"""Metrics of a checkpoint; None if they cannot be known because its manifest is damaged."""


def why_kept(
    committed: Sequence[Checkpointed],
    rules: Keep,
    *,
    metrics_of: MetricsOf,
    verified: Collection[str] = (),
) -> dict[str, tuple[str, ...]]:
    """Directory → the reasons why it stays; one without reasons may go.

    Args:
        committed: Commits whose checkpoint is in its place, oldest first.
        rules: What to keep.
        metrics_of: Asked only if a rule looks at metrics.
        verified: Directories whose every byte is known to be right; the newest of them stays.
    """
    reasons: dict[str, list[str]] = {record.directory: [] for record in committed}
    for record in committed[-rules.last :]:
        reasons[record.directory].append("last")
    if rules.every is not None:
        for record in _first_of_each(committed, rules.every):
            reasons[record.directory].append("every")
    if rules.best is not None:
        for directory, reason in _best(committed, rules.best, metrics_of):
            reasons[directory].append(reason)
    for directory in [r.directory for r in committed if r.directory in verified][-1:]:
        reasons[directory].append("verified")
    return {directory: tuple(found) for directory, found in reasons.items()}


def _first_of_each(committed: Sequence[Checkpointed], every: int) -> list[Checkpointed]:
    first: dict[int, Checkpointed] = {}
    for record in committed:
        if record.phase != _WARM and record.step >= every:
            first.setdefault(record.step // every, record)
    return [*first.values()]


def _best(
    committed: Sequence[Checkpointed], best: Best, metrics_of: MetricsOf
) -> list[tuple[str, str]]:
    """The best with their values; and those that may be among them for all that is known."""
    values: list[tuple[float, str]] = []
    unknown: list[tuple[str, str]] = []
    for record in committed:
        metrics = metrics_of(record)
        if metrics is None:
            unknown.append((record.directory, "unreadable"))
        elif math.isfinite(value := metrics.get(best.metric, math.nan)):
            values.append((value, record.directory))
    sign = 1 if best.mode == "min" else -1
    values.sort(key=lambda found: sign * found[0])
    chosen = values[: best.count]
    return [(name, f"best {best.metric} {value:.6g}") for value, name in chosen] + unknown


def _refused(what: str, where: str, rule: str) -> ConfigError:
    return ConfigError(
        what,
        where=where,
        rule=rule,
        way_out='write keep=3, or keep=keep(last=3, every=10_000, best=("reward", "max", 2))',
    )
