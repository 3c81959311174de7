"""Write ``tests/golden/ranks-v1`` again: only before a format is released, never afterwards.

    PYTHONPATH=tests python tests/golden/make_ranks.py

The checkpoint of three ranks after two steps (see ``rank_cases``).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

from rank_cases import RankScript, run_ranks

from perdure.experience.claims import Holder
from perdure.storage import PosixStorage

GOLDEN = Path(__file__).parent / "ranks-v1"


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with mock.patch.object(Holder, "here", return_value=Holder("golden", 1)):
        ended = run_ranks(PosixStorage(GOLDEN), 3, total=2)
    assert all(isinstance(script, RankScript) for script in ended), ended
    (GOLDEN / "lock").unlink()


if __name__ == "__main__":
    main()
