"""Priorities of the rows of a ring, as a sum tree: draws in proportion to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.checkpoint.segments.format import Array
from perdure.checkpoint.segments.ring import ReplayRing
from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Priorities:
    """One number of at least 0 for each row; new rows get the highest one so far.

    A component of its own: register it behind its ring, with a kind that is restored no earlier.

    Args:
        ring: The rows; what it drops has no priority any more.
    """

    schema_version = 1

    def __init__(self, ring: ReplayRing) -> None:
        self._ring = ring
        self._slots = 1 << max(0, ring.capacity - 1).bit_length()
        self._clear(ring.head, 1.0)

    @property
    def total(self) -> float:
        """Sum of the priorities of all rows that are there."""
        self._follow()
        return float(self._tree[1])

    @property
    def highest(self) -> float:
        """The highest priority ever given; 1 at first."""
        return self._highest

    def of(self, numbers: Array) -> Floats:
        """Priorities of the rows with these numbers."""
        self._follow()
        return self._tree[self._slots + np.asarray(numbers) % self._slots]

    def update(self, numbers: Array, priorities: Array) -> None:
        """Give rows new priorities; those that are gone are passed over.

        Raises:
            ConfigError: A priority is negative or no number; nothing was changed.
        """
        values = np.asarray(priorities, np.float64)
        if not np.all(np.isfinite(values) & (values >= 0)):
            raise ConfigError(
                "is negative or no number",
                where="priority",
                rule="rows are drawn in proportion to their priorities",
                way_out="give the absolute error plus a small number",
            )
        self._follow()
        rows = np.asarray(numbers, np.int64)
        there = (rows >= self._ring.head) & (rows < self._ring.total)
        self._set(rows[there], values[there])
        self._highest = max(self._highest, float(values.max(initial=0.0)))

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """Numbers of ``count`` rows, each drawn in proportion to its priority.

        Raises:
            ConfigError: No row has a priority above 0.
        """
        if not self.total:
            raise ConfigError(
                "no row has a priority above 0",
                where="priorities",
                rule="sampling begins when enough rows are there",
                way_out="wait until is_warm(…)",
            )
        left = rng.random(count) * self._tree[1]
        node = np.ones(count, np.int64)
        for _ in range(self._slots.bit_length() - 1):
            node *= 2
            # Rounding may leave something at the right of a branch that holds nothing.
            right = (left >= self._tree[node]) & (self._tree[node + 1] > 0)
            left -= np.where(right, self._tree[node], 0.0)
            node += right
        slot = node - self._slots
        return self._ring.head + (slot - self._ring.head) % self._slots

    def state(self) -> ComponentState:
        self._follow()
        numbers = np.arange(self._head, self._seen)
        return ComponentState(
            tensors={"priorities": self.of(numbers)},
            values={"head": self._head, "highest": self._highest},
        )

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take priorities over; rows that the ring has not are left out.

        Raises:
            ValueError: Another schema version, or more of them than the ring has room for.
        """
        if schema_version != self.schema_version:
            raise ValueError(f"schema version {schema_version}, expected {self.schema_version}")
        if "priorities" not in state.tensors:
            raise ValueError("missing: priorities")
        values = np.asarray(state.tensors["priorities"], np.float64)[-self._slots :]
        stop = int(state.values["head"]) + len(state.tensors["priorities"])
        self._clear(stop - len(values), float(state.values["highest"]))
        self._set(np.arange(stop - len(values), stop), values)
        self._seen = stop

    def _clear(self, head: int, highest: float) -> None:
        self._tree: Floats = np.zeros(2 * self._slots)
        self._head = self._seen = head
        self._highest = highest

    def _follow(self) -> None:
        """Forget the rows that the ring dropped and meet the new ones."""
        head, total = self._ring.head, self._ring.total
        self._set(np.arange(self._head, min(head, self._seen)), np.zeros(1))
        self._set(np.arange(max(head, total), self._seen), np.zeros(1))
        self._head = head
        self._set(np.arange(max(head, self._seen), total), np.full(1, self._highest))
        self._seen = total

    def _set(self, numbers: Array, values: Array) -> None:
        if not len(numbers):
            return
        node = self._slots + numbers % self._slots
        self._tree[node] = values
        while node[0] > 1:
            node = np.unique(node // 2)
            self._tree[node] = self._tree[2 * node] + self._tree[2 * node + 1]
