"""A small example data set for the ``jsonl`` task, made by rule."""

from __future__ import annotations

import json

from perdure.core import keyed_random

MIN_MAX_SEED = 7
MIN_MAX_LINES = 480


def min_max_jsonl(*, seed: int = MIN_MAX_SEED, count: int = MIN_MAX_LINES) -> str:
    """``count`` different lines asking for the smallest or largest digit of three to six.

    For instance ``{"prompt": "max 3 9 4 =", "answer": "9"}``. ``recipes/data/min_max.jsonl`` holds
    this text.
    """
    random = keyed_random.generator(seed, "task/samples/min_max")
    lines: dict[str, None] = {}
    while len(lines) < count:
        digits = [str(d) for d in random.integers(0, 10, size=int(random.integers(3, 7)))]
        word, pick = (("min", min), ("max", max))[int(random.integers(2))]
        prompt = " ".join([word, *digits, "="])
        lines[json.dumps({"prompt": prompt, "answer": pick(digits)}) + "\n"] = None
    return "".join(lines)
