"""Sealed JSON: small files that carry the digest of their own contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from perdure.audit.report import Findings
from perdure.core.errors import FutureFormatError

RULE = "a sealed JSON file holds an object whose digest is that of its contents"
NEWEST_FORMAT = 1


def read_sealed(
    path: Path, findings: Findings, *, where: str, names: tuple[str, ...]
) -> dict[str, Any] | None:
    """The object in a sealed JSON file; None, and a finding, if its bytes are wrong or gone.

    Args:
        path: The file.
        findings: Receives the damage.
        where: The file's name in a finding.
        names: What the object must have; another kind of file in its place lacks some of it.

    Raises:
        FutureFormatError: The file is intact and of a newer format.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        findings.damage(where, "the file is missing", RULE)
        return None
    except (ValueError, RecursionError) as error:
        findings.damage(where, f"not JSON ({error})", RULE)
        return None
    if not isinstance(value, dict) or value.pop("digest", None) != _digest(value):
        findings.damage(where, "the digest does not match", RULE)
        return None
    format_ = value.get("format")
    if isinstance(format_, int) and format_ > NEWEST_FORMAT:
        raise FutureFormatError(
            f"format {format_} is newer than {NEWEST_FORMAT}",
            where=str(path),
            way_out="use the perdure version that wrote it, or a newer one",
        )
    if format_ != NEWEST_FORMAT:
        findings.damage(where, f"format {format_!r} is not a known one", RULE)
        return None
    missing = [name for name in names if name not in value]
    if missing:
        findings.damage(where, f"it has no {', '.join(missing)}", RULE)
        return None
    return value


def _digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # A lone surrogate in a damaged file has no UTF-8; it must not look like a crash of the audit.
    return xxhash.xxh3_128_hexdigest(text.encode(errors="replace"))
