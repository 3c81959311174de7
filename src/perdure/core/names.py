"""The nearest valid name, for every message that refuses an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like ``name``, ignoring case, or None if nothing is alike."""
    by_folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def hint(name: str, choices: Iterable[str]) -> str:
    """``did you mean 'x'?`` or, when nothing is alike, the list of what there is."""
    names = sorted(choices)
    close = nearest(name, names)
    if close is not None:
        return f"did you mean {close!r}?"
    return f"use one of: {', '.join(names)}" if names else "remove it"
