"""Tensors that several ranks have stored in parts: is every element in exactly one of them?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

PARTS_RULE = "the parts of a tensor cover each of its elements exactly once"


def parts_problems(components: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parts that a manifest lists, a text a tensor.

    Args:
        components: ``components`` of a manifest.
    """
    problems: list[str] = []
    for component, entry in components.items():
        for name, tensor in entry.get("shards", {}).items():
            try:
                problem = _problem(tensor["shape"], tensor["parts"])
            except (KeyError, TypeError, ValueError) as error:
                problem = f"its parts cannot be read ({error!r})"
            if problem:
                problems.append(f"tensor {name} of {component}: {problem}")
    return problems


def _problem(shape: list[int], parts: list[tuple[int, list[int], list[int]]]) -> str:
    """Every axis is cut where a part begins or ends; each cell between cuts is counted."""
    for rank, offsets, sizes in parts:
        inside = all(
            offset >= 0 and size >= 0 and offset + size <= extent
            for offset, size, extent in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            return f"the part of rank {rank} reaches out of it"
    cuts = [
        sorted({0, extent} | {edge for _, o, s in parts for edge in (o[axis], o[axis] + s[axis])})
        for axis, extent in enumerate(shape)
    ]
    cells = np.zeros([len(edges) - 1 for edges in cuts], np.int64)
    for _, offsets, sizes in parts:
        cells[
            tuple(
                slice(edges.index(offset), edges.index(offset + size))
                for edges, offset, size in zip(cuts, offsets, sizes, strict=True)
            )
        ] += 1
    if (cells == 0).any():
        return "no part holds some of its elements"
    return "two parts hold the same elements" if (cells > 1).any() else ""
