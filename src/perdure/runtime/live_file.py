"""``live.json``: what a running process knows and the log does not. Recovery never needs it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIVE_PATH = "live.json"
FORMAT = 1


class LiveFile:
    """Replaces the file as a whole, without waiting for the disk. One owner."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LIVE_PATH
        self._temporary = run_dir / f"{LIVE_PATH}.new"

    def write(self, facts: Mapping[str, object]) -> None:
        """Say how things stand. A disk that refuses stops nothing: readers see how old it is."""
        text = json.dumps({"format": FORMAT, **facts}, separators=(",", ":"), default=str)
        try:
            self._temporary.write_text(text)
            os.replace(self._temporary, self._path)
        except OSError:
            return


def read_live(run_dir: Path) -> dict[str, Any] | None:
    """What the last process said; None if it said nothing that can be read here."""
    try:
        facts = json.loads((run_dir / LIVE_PATH).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        return None
    wall_s = facts.get("wall_s")
    return facts if isinstance(wall_s, float) and math.isfinite(wall_s) else None
