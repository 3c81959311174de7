"""How much goes into one commit."""

from __future__ import annotations

from collections import Counter

from log_cases import FLUSH_S, make_claim, make_run, started, submitted

from perdure.core.clock import ManualClock
from perdure.core.faults import NoFaults
from perdure.experience.entries import prepare_entry
from perdure.experience.writer import LogOptions, LogWriter
from perdure.storage import MemoryStorage


def test_log_what_comes_together_is_committed_in_portions() -> None:
    storage = MemoryStorage()
    make_run(storage)
    claimed = make_claim(storage)
    size = prepare_entry(submitted(0)).size
    options = LogOptions(threaded=False, commit_bytes=5 * size)
    writer = LogWriter(
        storage, claim=claimed, clock=ManualClock(), faults=NoFaults(), options=options
    )
    writer.append([started(claimed)])
    writer.flush(FLUSH_S)
    futures = [writer.append([submitted(group)]) for group in range(50)]
    steps = storage.operations
    writer.flush(FLUSH_S)
    assert list(Counter(map(id, futures)).values()) == [20, 20, 10]
    assert storage.operations == steps + 3 * 2
    assert futures[-1].result() == writer.position
