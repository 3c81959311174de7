"""How much of a replay is kept: by count, by age, or both."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Trim:
    """What stays; whatever breaks one of the limits goes, oldest first.

    Attributes:
        rows: Newest rows that stay; None = no limit.
        column: A column of numbers that never fall (a step, a time); its value is a row's age.
        span: A row stays if its value in ``column`` is at least that of the newest row less this.
    """

    rows: int | None = None
    column: str | None = None
    span: float | None = None

    def __post_init__(self) -> None:
        if (self.column is None) != (self.span is None):
            raise ConfigError(
                "needs both or neither of column and span",
                where="trim",
                rule="age is measured in a column",
                way_out="name the column that holds the step or the time of a row",
            )
        if self.rows is not None and self.rows < 0:
            raise ConfigError(
                f"rows is {self.rows}", where="trim", rule="at least 0", way_out="raise it"
            )


KEEP_ALL = Trim()
