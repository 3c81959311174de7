import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.core.keyed_random import generator
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.rollout.slots import BAND_ROWS, LiveRequest, SlotTable


def live_of(name: str, *, prefix: tuple[int, ...] = (), **sampling: object) -> LiveRequest:
    params = SamplingParams(**{"max_new_tokens": 6} | sampling)  # type: ignore[arg-type]
    request = GenerationRequest(name, (1, 2), params, (5, 6, 7), prefix)
    context = np.array((1, 2, *prefix), np.int64)
    return LiveRequest(request, context, params.max_new_tokens - len(prefix))


def table_of(*lives: LiveRequest, slots: int = 4) -> SlotTable:
    table = SlotTable(slots=slots, max_tokens=12, vocab_size=10)
    for slot, live in enumerate(lives):
        table.occupy(slot, live)
    return table


def record(table: SlotTable, tokens: list[int]) -> list[tuple[int, bool, bool]]:
    found = table.record(np.array(tokens), np.full(len(tokens), -0.5, np.float32), chunk_tokens=2)
    return list(zip(found.due, found.ended, found.stopped, strict=True))


def test_token_t_uses_draw_t_whatever_was_generated_before() -> None:
    draws = generator(5, "sampling", 6, 7).random(6)
    np.testing.assert_array_equal(live_of("a").uniforms(), draws)
    np.testing.assert_array_equal(live_of("a", prefix=(3, 3, 3, 3)).uniforms(), draws[4:])
    table = table_of(live_of("a"), live_of("b", prefix=(3, 3)))
    np.testing.assert_array_equal(table.next_uniforms(2), draws[[0, 2]])
    record(table, [8, 8])
    np.testing.assert_array_equal(table.next_uniforms(2), draws[[1, 3]])


def test_stops_budgets_and_full_chunks_are_due() -> None:
    table = table_of(
        live_of("stops", stop_token_ids=(4, 5)), live_of("ends", max_new_tokens=1), live_of("goes")
    )
    assert record(table, [5, 5, 5]) == [(0, True, True), (1, True, False)]
    table.release(0)
    table.release(1)
    assert record(table, [4, 4, 4]) == [(2, False, False)]
    tokens, logprobs = table.take_undelivered(2)
    assert tokens.tolist() == [5, 4]
    assert logprobs.tolist() == [-0.5, -0.5]
    assert record(table, [0, 0, 1]) == []


def test_free_rows_never_move_or_fall_due() -> None:
    table = table_of(live_of("a"))
    for _ in range(5):
        record(table, [3, 3, 3, 3])
    assert table.position.tolist() == [6, 0, 0, 0]
    assert table.generated.tolist() == [5, 0, 0, 0]


def test_compaction_brings_live_rows_to_the_front_unchanged() -> None:
    lives = [live_of(name, stop_token_ids=(9,), top_k=index) for index, name in enumerate("abcd")]
    table = table_of(*lives)
    record(table, [3, 4, 5, 6])
    table.release(0)
    table.release(2)
    targets, sources = table.compaction()
    assert (targets, sources) == ([0], [3])
    table.move(targets, sources)
    assert [live.request.request_id if live else None for live in table.requests] == [
        "d",
        "b",
        None,
        None,
    ]
    assert [live.slot for live in lives] == [-1, 1, -1, 0]
    assert table.free_slots() == [2, 3]
    assert table.top_k[:2].tolist() == [3, 1]
    assert table.token[:2].tolist() == [6, 4]
    assert table.take_undelivered(0)[0].tolist() == [6]
    assert table.compaction() == ([], [])
    assert record(table, [9, 1]) == [(0, True, True), (1, False, False)]


def test_a_reused_slot_remembers_nothing() -> None:
    table = table_of(live_of("a", stop_token_ids=(1, 2, 3), top_k=2, top_p=0.5, temperature=0.0))
    record(table, [7])
    table.release(0)
    table.occupy(0, live_of("b"))
    fresh = table_of(live_of("b"))
    for name in ("token", "position", "generated", "delivered", "top_k", "top_p", "greedy"):
        np.testing.assert_array_equal(getattr(table, name), getattr(fresh, name))
    assert record(table, [3]) == []


def test_stops_are_seen_in_steps_in_which_nothing_else_is_due() -> None:
    table = table_of(live_of("a", max_new_tokens=6, stop_token_ids=(5,)))
    found = [
        table.record(np.array([token]), np.zeros(1, np.float32), chunk_tokens=50)
        for token in (1, 2, 5)
    ]
    assert [outcome.due for outcome in found] == [[], [], [0]]
    assert found[-1].stopped == [True]


def test_a_row_that_was_not_delivered_stays_due() -> None:
    table = table_of(live_of("a"))
    assert record(table, [1]) == []
    assert record(table, [1]) == [(0, False, False)]
    assert record(table, [1]) == [(0, False, False)]


@settings(max_examples=60, deadline=None, database=None)
@given(data=st.data())
def test_compaction_keeps_bands_sorted_by_how_far_their_rows_are(data: st.DataObject) -> None:
    """Requests that come one by one and leave in any order."""
    slots = 3 * BAND_ROWS + 5
    table = SlotTable(slots=slots, max_tokens=400, vocab_size=10)
    for turn in range(data.draw(st.integers(1, 25))):
        free = table.free_slots()
        assert free == list(range(table.count, slots))
        for slot in free[: data.draw(st.integers(0, 12))]:
            table.occupy(slot, live_of(f"{turn}.{slot}", max_new_tokens=300))
        if table.count:
            count = table.count
            table.record(np.zeros(count, np.int64), np.zeros(count, np.float32), chunk_tokens=400)
        for slot in data.draw(st.sets(st.integers(0, slots - 1), max_size=8)):
            if table.requests[slot] is not None:
                table.release(slot)
        before = {id(live): int(table.position[live.slot]) for live in table.requests if live}
        targets, sources = table.compaction()
        assert targets == sorted(targets), "moved in this order, none is overwritten unread"
        assert all(source > target for target, source in zip(targets, sources, strict=True))
        if targets:
            table.move(targets, sources)
        assert table.compaction() == ([], [])
        assert table.live.tolist() == [True] * table.count + [False] * (slots - table.count)
        held = [live for live in table.requests if live]
        assert {id(live): int(table.position[live.slot]) for live in held} == before
        live = table.position[: table.count]
        bands = [live[start : start + BAND_ROWS] for start in range(0, len(live), BAND_ROWS)]
        for ahead, behind in itertools.pairwise(bands):
            assert ahead.min() >= behind.max()
