"""Boxes inside tensors: which part of a whole somebody holds, and what two parts share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Elements ``offsets[d]`` to ``offsets[d] + sizes[d]`` along every axis ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Elements inside; 1 for a tensor without axes."""
        return math.prod(self.sizes)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has all of its elements."""
        return len(self.sizes) == len(self.offsets) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= extent
            for offset, size, extent in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def shared(self, other: Box) -> Box | None:
        """What both have; None if they have no element in common."""
        offsets, sizes = list[int](), list[int]()
        for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, end = max(a, b), min(a + m, b + n)
            if start >= end:
                return None
            offsets.append(start)
            sizes.append(end - start)
        return Box(tuple(offsets), tuple(sizes))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in an array that holds ``outer``."""
        return tuple(
            slice(offset - base, offset - base + size)
            for offset, size, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


def box_on(
    shape: Sequence[int],
    *,
    mesh: Sequence[int],
    coordinate: Sequence[int],
    cuts: Sequence[int | None],
) -> Box:
    """The part of a tensor that one place of a mesh of ranks holds.

    One mesh axis after the other cuts what the ones before it have left. A cut into ``n`` gives
    every part ``ceil(size / n)`` elements as long as there are some; the last ones may be shorter
    or empty (``torch.chunk``, and so ``torch.distributed.tensor.Shard``).

    Args:
        shape: Of the whole tensor.
        mesh: How many ranks there are along each mesh axis.
        coordinate: The place, one number a mesh axis.
        cuts: For each mesh axis the tensor's axis that it cuts; None if it repeats the tensor.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for parts, place, axis in zip(mesh, coordinate, cuts, strict=True):
        if axis is None:
            continue
        step = -(-sizes[axis] // parts)
        start = min(place * step, sizes[axis])
        offsets[axis] += start
        sizes[axis] = min(step, sizes[axis] - start)
    return Box(tuple(offsets), tuple(sizes))


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why the boxes do not cover a tensor of this shape exactly once; empty if they do."""
    outside = next((box for box in boxes if not box.is_inside(shape)), None)
    if outside is not None:
        return f"the part {_text(outside)} is not inside {list(shape)}"
    held = [box for box in boxes if box.volume]
    missing = math.prod(shape) - sum(box.volume for box in held)
    if missing > 0:
        return f"{missing} of {math.prod(shape)} elements are missing"
    twice = _overlap(sorted(held, key=lambda box: box.offsets))
    if twice is not None:
        return f"the parts {_text(twice[0])} and {_text(twice[1])} overlap"
    return ""


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element; the boxes are in the order of their offsets."""
    if _cut_along_first(boxes):
        pairs = itertools.pairwise(boxes)
    else:
        pairs = itertools.combinations(boxes, 2)
    return next((pair for pair in pairs if pair[0].shared(pair[1]) is not None), None)


def _cut_along_first(boxes: Sequence[Box]) -> bool:
    """Whether all of them are slabs of the first axis: then only neighbours can overlap."""
    return all(
        box.offsets[1:] == boxes[0].offsets[1:] and box.sizes[1:] == boxes[0].sizes[1:]
        for box in boxes
    )


def _text(box: Box) -> str:
    return f"{list(box.sizes)} at {list(box.offsets)}"
