"""Write ``tests/golden/remote-v1`` again: only before a format is released, never afterwards.

PYTHONPATH=tests python tests/golden/make_head.py
"""

from __future__ import annotations

from pathlib import Path

from head_cases import HEADS

GOLDEN = Path(__file__).parent / "remote-v1"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, head in HEADS.items():
        (GOLDEN / name).write_bytes(head.encode())


if __name__ == "__main__":
    main()
