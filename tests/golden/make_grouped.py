"""Write ``tests/golden/grouped-v1`` again: only before a format is released, never afterwards.

    PYTHONPATH=tests python tests/golden/make_grouped.py

The checkpoint of a script with 32 small arrays after two steps (see ``grouped_cases``).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

from grouped_cases import GroupedScript

from perdure.experience.claims import Holder
from perdure.storage import PosixStorage

GOLDEN = Path(__file__).parent / "grouped-v1"


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with mock.patch.object(Holder, "here", return_value=Holder("golden", 1)):
        GroupedScript(PosixStorage(GOLDEN), 32).run(2)
    (GOLDEN / "lock").unlink()


if __name__ == "__main__":
    main()
