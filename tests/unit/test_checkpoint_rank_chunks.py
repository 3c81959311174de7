"""Files of several chunks that only one rank has: the one manifest of all says what it takes."""

from __future__ import annotations

import numpy as np
import pytest
from rank_cases import newest_manifest, on_all_ranks

from perdure import CheckpointEngine, every
from perdure.checkpoint.team import Team
from perdure.storage import MemoryStorage, bulk

CHUNK = 8192


@pytest.mark.parametrize("large", [None, 0, 1])
def test_a_file_of_several_chunks_is_named_whichever_rank_has_it(
    monkeypatch: pytest.MonkeyPatch, large: int | None
) -> None:
    monkeypatch.setattr(bulk, "CHUNK_BYTES", CHUNK)
    storage = MemoryStorage()

    def run(team: Team, steps: int) -> np.ndarray:
        engine = CheckpointEngine("run", storage=storage, process_group=team, save=every(steps=1))
        cursor = np.zeros(CHUNK if team.place.rank == large else 8, np.uint8)
        engine.add("cursor", cursor, per_rank=True)
        for step in engine.steps(steps, change_total=True):
            cursor[:] = step * 10 + team.place.rank
        return cursor

    for steps in (1, 2):
        cursors = on_all_ranks(2, lambda team, steps=steps: run(team, steps))
        assert [cursor[-1] for cursor in cursors] == [steps * 10, steps * 10 + 1]
        manifest = newest_manifest(storage)
        several = [path for path, entry in manifest.files.items() if len(entry.sums) > 1]
        assert len(several) == (0 if large is None else 1)
        assert ("chunks" in manifest.features) == bool(several)
