"""Write ``tests/golden/schema-v1`` again: only before a format is released, never afterwards.

    PYTHONPATH=tests python tests/golden/make_schema.py

Checkpoints of a script whose normaliser has schema version 1 (see ``schema_cases``).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

from schema_cases import script

from perdure.experience.claims import Holder

GOLDEN = Path(__file__).parent / "schema-v1"


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with mock.patch.object(Holder, "here", return_value=Holder("golden", 1)):
        script(GOLDEN, 1, steps=2)
    (GOLDEN / "lock").unlink()


if __name__ == "__main__":
    main()
