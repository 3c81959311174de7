"""How much goes into one commit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import xxhash
from log_cases import (
    FLUSH_S,
    RUN_ID,
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
from perdure.experience.seals import read_seal
from perdure.experience.writer import LogOptions, LogWriter
from perdure.storage import MemoryStorage
from perdure.storage.faulty import FaultyStorage, StorageFault, StorageFaultKind


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
    steps = storage.operations
    writer.flush(FLUSH_S)
    assert storage.operations == steps
    assert kept_keys(read_head(storage)) == history.acknowledged
    history.append(writer, entries)
    writer.flush(FLUSH_S)
    log = read_head(storage)
    check_contents(storage, log)
    assert history.acknowledged == kept_keys(log)


@pytest.mark.parametrize("tokens", [5, 20_000, 60_000])
@pytest.mark.parametrize("failing", [False, True])
def test_log_seal_has_the_checksum_of_what_is_durable_in_each_segment(
    tokens: int, *, failing: bool
) -> None:
    memory = MemoryStorage()
    make_run(memory)
    faults = [StorageFault(StorageFaultKind.EIO_SYNC, 3, "payload-000001-000000")]
    storage = FaultyStorage(memory, plan=faults if failing else [])
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed, segment_bytes=2**20)
    history = History()
    history.append(writer, [started(claimed)])
    for group in range(12):
        history.append(writer, [session_done(group, tokens), submitted(group)])
        if group % 3 == 2:
            writer.flush(FLUSH_S)
    writer.close("done")
    seal = read_seal(memory, claimed.incarnation, run_id=RUN_ID)
    assert seal is not None
    spans = (*seal.control, *seal.payload)
    assert len(spans) >= (3 if failing or tokens == 60_000 else 2)
    for span in spans:
        data = memory.read(span.name.path)[: span.valid_end]
        assert span.checksum == xxhash.xxh3_64_intdigest(data)
    assert history.acknowledged == history.asked
    assert kept_keys(read_head(memory))[: len(history.asked)] == history.asked
