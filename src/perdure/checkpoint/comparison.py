"""Two checkpoints beside each other: tensor by tensor, value by value, segment by segment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from perdure.checkpoint.arena import materialize
from perdure.checkpoint.dtypes import item_size
from perdure.checkpoint.layout import TensorSpec
from perdure.checkpoint.reading import CheckpointReader, StoredTensor

Verdict = Literal["equal", "different", "only in A", "only in B"]

_BLOCK = 1 << 20
"""Elements compared at once, so that a tensor never lies in memory as a whole."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor, small value, list of segments or component of two checkpoints.

    Attributes:
        component: Whose it is.
        part: ``tensor <name>``, ``value <path>``, ``segments``, or ``component``.
        a: What A has: element type and shape, or the value; empty if nothing.
        b: The same of B.
        max_abs: Largest absolute difference of two elements; NaN if one is not a number and the
            other is; None where elements cannot be subtracted.
        elements: How many elements have other bits.
        total: How many elements there are.
    """

    component: str
    part: str
    verdict: Verdict
    a: str = ""
    b: str = ""
    max_abs: float | None = None
    elements: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that two checkpoints hold, equal or not."""

    parts: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether every part has the same bits in both."""
        return not self.differences

    @property
    def differences(self) -> tuple[Difference, ...]:
        return tuple(part for part in self.parts if part.verdict != "equal")


def compare(a: CheckpointReader, b: CheckpointReader) -> Comparison:
    """Compare bit by bit; what differs in bits is measured.

    Names of runs, steps and dates are not compared, only what is restored from.

    Raises:
        DamagedError: A file of one of them is missing or wrong.
    """
    names = sorted(a.manifest.components.keys() | b.manifest.components.keys())
    values_a, values_b = a.values(), b.values()
    parts: list[Difference] = []
    for name in names:
        entries = a.manifest.components.get(name), b.manifest.components.get(name)
        said_a, said_b = (
            f"{entry.kind}, schema {entry.schema_version}" if entry else "" for entry in entries
        )
        parts.append(Difference(name, "component", _presence(said_a, said_b), said_a, said_b))
        if None in entries:
            continue
        parts += _tensors(name, a.stored_tensors(name), b.stored_tensors(name))
        parts += _values(name, values_a.get(name, {}), values_b.get(name, {}))
        parts += _segments(name, a, b)
        parts += _legacy(name, a, b)
    return Comparison(tuple(parts))


def _presence(a: str, b: str) -> Verdict:
    if not b:
        return "only in A"
    if not a:
        return "only in B"
    return "equal" if a == b else "different"


def _tensors(
    component: str, a: Mapping[str, StoredTensor], b: Mapping[str, StoredTensor]
) -> Iterator[Difference]:
    for name in sorted(a.keys() | b.keys()):
        part = f"tensor {name}"
        in_a, in_b = a.get(name), b.get(name)
        said_a, said_b = _describe(in_a), _describe(in_b)
        if in_a is None or in_b is None or in_a.spec != in_b.spec:
            yield Difference(component, part, _presence(said_a, said_b), said_a, said_b)
            continue
        elements, max_abs = _measure(in_a, in_b)
        yield Difference(
            component,
            part,
            "different" if elements else "equal",
            said_a,
            said_b,
            max_abs=max_abs,
            elements=elements,
            total=math.prod(in_a.spec.shape),
        )


def _describe(stored: StoredTensor | None) -> str:
    return "" if stored is None else f"{stored.spec.code} {list(stored.spec.shape)}"


def _measure(a: StoredTensor, b: StoredTensor) -> tuple[int, float | None]:
    """How many elements have other bits, and the largest absolute difference."""
    total = math.prod(a.spec.shape)
    size = item_size(a.spec.code)
    different, largest = 0, 0.0
    for start in range(0, total, _BLOCK):
        count = min(_BLOCK, total - start)
        left, right = (one.elements(start, start + count) for one in (a, b))
        unequal = np.any((left != right).reshape(count, size), axis=1)
        if not unequal.any():
            continue
        different += int(np.count_nonzero(unequal))
        spec = TensorSpec(a.spec.code, (count,))
        found = _largest(materialize(left, spec), materialize(right, spec), unequal)
        # Once it is no number, it stays so.
        largest = largest if math.isnan(largest) or found <= largest else found
    return different, largest


def _largest(a: Any, b: Any, where: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
    left, right = _numbers(a)[where], _numbers(b)[where]
    if left.dtype.kind in "iu":
        # The distance of two 64-bit numbers needs all 64 bits; it is right modulo 2**64.
        high, low = np.maximum(left, right), np.minimum(left, right)
        return float(np.max(high.astype(np.uint64) - low.astype(np.uint64)))
    # Two infinities of one sign, two that are no numbers: no distance between them.
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(same, 0.0, np.abs(left - right))
    return float(np.max(distance))


def _numbers(tensor: Any) -> np.ndarray[Any, Any]:
    if not isinstance(tensor, np.ndarray):
        # A type that numpy lacks came as a torch tensor.
        return tensor.double().numpy()
    array = cast("np.ndarray[Any, Any]", tensor)
    wide = {"c": np.complex128, "f": np.float64, "b": np.uint8}.get(array.dtype.kind)
    return array if wide is None else array.astype(wide)


def _values(component: str, a: Any, b: Any) -> Iterator[Difference]:
    left, right = dict(_leaves(a)), dict(_leaves(b))
    for path in sorted(left.keys() | right.keys()):
        said_a, said_b = (repr(side[path]) if path in side else "" for side in (left, right))
        verdict = _presence(said_a, said_b)
        distance = _distance(left.get(path), right.get(path)) if verdict == "different" else None
        yield Difference(component, f"value {path}", verdict, said_a, said_b, max_abs=distance)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path → every value that is no list and no map; empty ones stand for themselves."""
    inner: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = list(cast("dict[Any, Any]", value).items())
    elif isinstance(value, list):
        inner = list(enumerate(cast("list[Any]", value)))
    if not inner:
        if path:
            yield path, value
        return
    for key, item in inner:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _distance(a: Any, b: Any) -> float | None:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return abs(float(a) - float(b)) if numbers else None


def _legacy(component: str, a: CheckpointReader, b: CheckpointReader) -> Iterator[Difference]:
    """Pickles are compared as bytes and never opened."""
    datas = a.legacy(component), b.legacy(component)
    if datas == (None, None):
        return
    said_a, said_b = ("" if data is None else f"{len(data)} bytes" for data in datas)
    verdict = _presence(said_a, said_b)
    if verdict == "equal" and datas[0] != datas[1]:
        verdict = "different"
    yield Difference(component, "pickle", verdict, said_a, said_b)


def _segments(component: str, a: CheckpointReader, b: CheckpointReader) -> Iterator[Difference]:
    left = a.manifest.segments.get(component, ())
    right = b.manifest.segments.get(component, ())
    if not left and not right:
        return
    same = {one.checksum for one in left} & {one.checksum for one in right}
    said_a, said_b = (
        f"{len(side)} segments, {sum(one.rows for one in side)} rows, {len(same)} in common"
        for side in (left, right)
    )
    equal = [one.checksum for one in left] == [one.checksum for one in right]
    verdict: Verdict = "equal" if equal else "different"
    yield Difference(component, "segments", verdict, said_a, said_b)
