"""How much goes into one commit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from log_cases import (
    FLUSH_S,
    History,
    check_contents,
    controls,
    kept_keys,
    make_claim,
    make_run,
    open_writer,
    read_head,
    session_done,
    started,
    submitted,
)

from perdure.core.clock import ManualClock
from perdure.core.experience_records import SessionsDone
from perdure.core.faults import NoFaults
from perdure.experience.entries import prepare_entry
from perdure.experience.record_memory import RecordMemory
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
    futures = [writer.append([submitted(group)]) for group in range(100)]
    steps = storage.operations
    writer.flush(FLUSH_S)
    assert list(Counter(map(id, futures)).values()) == [40, 40, 20]
    assert storage.operations == steps + 3 * 2
    assert futures[-1].result() == writer.position


def test_log_large_sessions_are_encoded_by_their_caller_and_lie_alone_in_order() -> None:
    storage = MemoryStorage()
    make_run(storage)
    claimed = make_claim(storage)
    writer, history = open_writer(storage, claimed), History()
    history.append(writer, [started(claimed)])
    entries = [session_done(group, 20_000 if group in (1, 4) else 5) for group in range(6)]
    for entry in entries:
        history.append(writer, [entry])
    assert [entry.trajectories is None for entry in entries] == [
        group in (1, 4) for group in range(6)
    ]
    writer.flush(FLUSH_S)
    log = read_head(storage)
    check_contents(storage, log)
    rows = [[s.group for s in r.sessions] for r in controls(log) if isinstance(r, SessionsDone)]
    assert rows == [[0], [1], [2, 3], [4], [5]]
    assert history.acknowledged == kept_keys(log)
    refs = [r.payload for r in controls(log) if isinstance(r, SessionsDone)]
    assert [entry.ref for entry in entries] == [refs[n] for n in (0, 1, 2, 2, 3, 4)]


def test_log_append_whose_encoding_fails_queues_nothing_and_forgets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    make_run(storage)
    claimed = make_claim(storage)
    writer, history = open_writer(storage, claimed), History()
    history.append(writer, [started(claimed)])
    writer.flush(FLUSH_S)
    entries = [session_done(group, 20_000) for group in range(2)]
    joined, left = RecordMemory.joined, [1, 0]

    def without_memory(memory: RecordMemory, pieces: Any) -> Any:
        if not left.pop(0):
            raise MemoryError
        return joined(memory, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(RecordMemory, "joined", without_memory)
        with pytest.raises(MemoryError):
            writer.append(entries)
    writer.flush(FLUSH_S)
    assert kept_keys(read_head(storage)) == history.acknowledged
    history.append(writer, entries)
    writer.flush(FLUSH_S)
    log = read_head(storage)
    check_contents(storage, log)
    assert history.acknowledged == kept_keys(log)
