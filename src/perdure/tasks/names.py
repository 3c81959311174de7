"""Nearest-name hints for what users mistype."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?``, or the list of names when none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(names)}"
