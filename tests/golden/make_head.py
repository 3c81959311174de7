"""Write ``tests/golden/remote-v1`` again: only before a format is released, never afterwards.

PYTHONPATH=tests python tests/golden/make_head.py
"""

from __future__ import annotations

from pathlib import Path

from head_cases import HEAD

GOLDEN = Path(__file__).parent / "remote-v1"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "head.json").write_bytes(HEAD.encode())


if __name__ == "__main__":
    main()
