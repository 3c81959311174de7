"""``perdure ckpt diff``: two checkpoints, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.checkpoints import read_checkpoint
from perdure.cli.output import JsonOption, print_json
from perdure.core.errors import AuditFailedError

if TYPE_CHECKING:
    from perdure.checkpoint import Comparison, Difference

DIFF_EXAMPLES = (
    "Examples:\n\nperdure ckpt diff runs/tiny-1 runs/tiny-2\n\n"
    "perdure ckpt diff runs/tiny-1:step-00000060-1 runs/tiny-1:step-00000080-1"
)
_WIDTH = 48
"""Characters shown of a small value."""


def diff_checkpoints(
    a: Annotated[str, typer.Argument(metavar="A", help="RUN or RUN:CHECKPOINT.")],
    b: Annotated[str, typer.Argument(metavar="B", help="RUN or RUN:CHECKPOINT.")],
    *,
    all_parts: Annotated[bool, typer.Option("--all", help="Show equal parts too.")] = False,
    json: JsonOption = False,
) -> None:
    """Compare what two checkpoints restore: names, types, shapes, every bit, small values.

    RUN alone is its newest checkpoint. The exit code is 10 if anything differs.
    """
    from perdure.checkpoint import compare

    (name_a, reader_a), (name_b, reader_b) = read_checkpoint(a), read_checkpoint(b)
    found = compare(reader_a, reader_b)
    shown = found.parts if all_parts else found.differences
    counts = _counts(found)
    if json:
        rows = [_row(part) for part in shown]
        names = {"a": {"address": a, "checkpoint": name_a}, "b": {"address": b}}
        names["b"]["checkpoint"] = name_b
        print_json({**names, "equal": found.equal, "counts": counts, "parts": rows})
    else:
        typer.echo(f"A {a} {name_a}\nB {b} {name_b}")
        for line in _lines(shown):
            typer.echo(line)
        typer.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if not found.equal:
        raise AuditFailedError(
            "the checkpoints differ",
            where=f"{a} and {b}",
            way_out="see the differences above; --all shows the equal parts too",
        )


def _row(part: Difference) -> dict[str, object]:
    row = asdict(part)
    if part.max_abs is not None and not math.isfinite(part.max_abs):
        # JSON has no such numbers.
        row["max_abs"] = str(part.max_abs)
    return row


def _counts(found: Comparison) -> dict[str, int]:
    counts = {"equal": 0, "different": 0, "only in A": 0, "only in B": 0}
    for part in found.parts:
        counts[part.verdict] += 1
    return counts


def _lines(parts: tuple[Difference, ...]) -> Iterator[str]:
    for part in parts:
        measured = ""
        if part.max_abs is not None and part.verdict == "different":
            measured = f"  max abs difference {part.max_abs:.6g}"
        if part.elements:
            measured += f", {part.elements:,} of {part.total:,} elements"
        yield f"{part.verdict:<10} {part.component}: {part.part}  {_said(part)}{measured}"


def _said(part: Difference) -> str:
    a, b = (text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…" for text in (part.a, part.b))
    return a if a == b or not b else b if not a else f"{a} | {b}"
