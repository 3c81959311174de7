"""The columns of a replay: their types, and batches that fit them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from perdure.checkpoint.dtypes import code_of
from perdure.checkpoint.segments.format import Array, describe
from perdure.core.errors import ConfigError
from perdure.core.names import hint


class Columns:
    """Name → element type and shape of one row, in a fixed order.

    Raises:
        ConfigError: There are none, or a type cannot be stored.
    """

    def __init__(self, columns: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
        if not columns:
            raise ConfigError(
                "there are none", where="columns", rule="at least one", way_out="name what is kept"
            )
        self._columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for name, (dtype, shape) in columns.items():
            try:
                self._columns[name] = describe(np.dtype(dtype)), tuple(shape)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    str(error),
                    where=f"column {name}",
                    rule="columns hold plain numbers",
                    way_out="convert it, objects to indices for example",
                ) from error

    def __iter__(self) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        return ((name, dtype, shape) for name, (dtype, shape) in self._columns.items())

    @property
    def row_bytes(self) -> int:
        return sum(dtype.itemsize * int(np.prod(shape)) for _, dtype, shape in self)

    def types(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        return dict(self._columns)

    def described(self) -> dict[str, list[Any]]:
        """As it is stored: name → code of the element type, shape of one row."""
        return {name: [code_of(dtype), list(shape)] for name, dtype, shape in self}

    def require(self, name: str) -> None:
        """Raises ``ConfigError`` if there is no such column."""
        if name not in self._columns:
            raise ConfigError(
                f"there is no column {name!r}",
                where="columns",
                rule="a column is named when the replay is made",
                way_out=hint(name, self._columns),
            )

    def require_number(self, name: str) -> None:
        """Raises ``ConfigError`` if there is no such column, or it holds more than a number."""
        self.require(name)
        if self._columns[name][1]:
            raise ConfigError(
                f"has rows of shape {self._columns[name][1]}",
                where=f"column {name}",
                rule="episodes and ages are one number a row",
                way_out="keep it in a column of its own",
            )

    def rows_of(self, batch: Mapping[str, Any]) -> tuple[dict[str, Array], int]:
        """The batch as arrays of the columns' types, and its number of rows.

        Raises:
            ConfigError: Columns, shapes, types or numbers of rows differ.
        """
        different = sorted(self._columns.keys() ^ batch.keys())
        if different:
            raise _unfit(", ".join(different), "is missing or has no column")
        arrays = {name: np.asarray(batch[name]) for name in self._columns}
        counts = {array.shape[0] if array.ndim else -1 for array in arrays.values()}
        if len(counts) != 1 or counts == {-1}:
            raise _unfit(", ".join(arrays), "have different numbers of rows")
        for name, dtype, shape in self:
            array = arrays[name]
            if array.shape[1:] != shape:
                raise _unfit(name, f"has rows of shape {array.shape[1:]}, expected {shape}")
            if not np.can_cast(array.dtype, dtype, casting="same_kind"):
                raise _unfit(name, f"is of type {array.dtype}, expected {dtype}")
        return arrays, counts.pop()


def _unfit(name: str, what: str) -> ConfigError:
    return ConfigError(
        what,
        where=f"column {name}",
        rule="a batch has every column of the replay, each with the same number of rows",
        way_out="append what the columns were named for",
    )
