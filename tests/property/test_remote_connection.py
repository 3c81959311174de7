"""Connections that end anywhere, bytes that arrive wrong: nothing is lost or counts twice."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import experience_records as make
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from remote_cases import (
    FLUSH_S,
    Doors,
    check_log,
    doors,
    group_of,
    new_storage,
    session,
    start_store,
)

from perdure.core.experience_records import GroupSettled
from perdure.core.ids import GroupId, SessionId
from perdure.core.record_codec import record_fields
from perdure.core.record_types import GroupOutcome
from perdure.experience import ExperienceStore, RemoteOptions, RemoteStore
from perdure.experience.columns import checked_columns
from perdure.experience.partials import partial_columns
from perdure.experience.remote.frames import (
    FrameType,
    make_frame,
    number_frame,
    parse_frame,
)
from perdure.experience.remote.handshake import PROTOCOL
from perdure.experience.remote.requests import read_request, sessions_frame
from perdure.experience.remote.unfinished import partials_frame, result_frame
from perdure.storage.memory import MemoryStorage

GROUPS = 6
PATIENT = RemoteOptions(reconnect_timeout_s=1e6, retry_s=1.0)


class CutSocket(socket.socket):
    """A stream that ends after so many bytes out, or so many in."""

    bytes_out = bytes_in = 2**40

    def send(self, data: Any, flags: int = 0) -> int:
        sent = super().send(memoryview(data)[: self.bytes_out], flags) if self.bytes_out else 0
        self.bytes_out -= sent
        self._cut_if_used_up()
        return sent

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        received = super().recv_into(memoryview(buffer)[: max(self.bytes_in, 1)], 0, flags)
        self.bytes_in -= min(received, self.bytes_in)
        self._cut_if_used_up()
        return received

    def _cut_if_used_up(self) -> None:
        if not (self.bytes_out and self.bytes_in):
            self.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("cut")


def cut_off(one: socket.socket, limits: tuple[int, int]) -> CutSocket:
    stream = CutSocket(fileno=one.detach())
    stream.bytes_out, stream.bytes_in = limits
    return stream


def run_worker(door: Doors, connect: Callable[[], socket.socket]) -> None:
    """Append every group, the second half session by session; all of it is acknowledged."""
    worker = door.worker(options=PATIENT, connect=connect)
    futures = []
    for group in range(GROUPS):
        settled = [GroupSettled(GroupId(group), GroupOutcome.FINISHED)]
        if group % 2:
            futures += [worker.sessions_done([one]) for one in group_of(group)]
            futures.append(worker.sessions_done([], settled=settled))
        else:
            futures.append(worker.sessions_done(group_of(group), settled=settled))
    positions = [future.result(FLUSH_S) for future in futures]
    assert positions == sorted(positions)
    worker.close()


# A greeting takes 192 bytes, a request of a group 576: limits fall into both, and behind them.
LIMITS = st.tuples(st.integers(193, 4000), st.integers(193, 1200))


@given(cuts=st.lists(LIMITS, max_size=5), restarts=st.sets(st.integers(0, 5)))
def test_remote_connections_end_anywhere(cuts: list[tuple[int, int]], restarts: set[int]) -> None:
    """Some of them because the store is another incarnation from then on."""
    storage = new_storage()
    with doors() as door:
        first = door.open(start_store(storage, groups=GROUPS))
        opened: list[socket.socket] = []
        run_worker(door, bad_line(door, storage, opened, cuts=cuts, restarts=restarts))
        check_log(storage, [one for group in range(GROUPS) for one in group_of(group)])
        assert len(opened) <= len(cuts) + 1
        assert first.warnings == [] or len(opened) > 1


def bad_line(
    door: Doors,
    storage: MemoryStorage,
    opened: list[socket.socket],
    *,
    cuts: list[tuple[int, int]],
    restarts: set[int],
) -> Callable[[], socket.socket]:
    """Streams of which the first ones end early, some to a store that was started anew."""
    planned = iter(cuts)

    def connect() -> socket.socket:
        if len(opened) in restarts and opened:
            door.close()
            door.open(start_store(storage.open_as_new_process()))
        stream = cut_off(door.connect(), next(planned, (2**40, 2**40)))
        opened.append(stream)
        return stream

    return connect


def begin_sessions(worker: RemoteStore, *, attempts: list[int]) -> None:
    """Leave tokens and results of one session a group, and read them back on the way."""
    for group, attempt in enumerate(attempts):
        session_id = SessionId(GroupId(group), 0)
        for number in range(1, attempt + 1):
            worker.partials([make.delta(group, 0, 0, 2, attempt=number - 1)]).result(FLUSH_S)
            worker.restart_session(session_id, attempt=number, reason="again").result(FLUSH_S)
        sent = [
            worker.partials([make.delta(group, 0, 0, 3, attempt=attempt)]),
            worker.tool_result(make.tool_result(group, 0, attempt=attempt)),
            worker.partials([make.delta(group, 0, 3, 7, attempt=attempt, version=1)]),
        ]
        found = worker.prefix(session_id)
        assert all(future.done() for future in sent), "answers come in order"
        assert (found.attempt, len(found.response_ids_T)) == (attempt, 7)
        results = {(0, 0): make.tool_result(group, 0, attempt=attempt)}
        assert worker.tool_results(session_id) == results
        for future in sent:
            future.result(0)


def check_begun(store: ExperienceStore, *, attempts: list[int]) -> None:
    """The store has what :func:`begin_sessions` has left, once."""
    for group, attempt in enumerate(attempts):
        prefix = store.prefix(SessionId(GroupId(group), 0))
        wanted = make.delta(group, 0, 0, 7, attempt=attempt)
        np.testing.assert_array_equal(prefix.response_ids_T, wanted.token_ids_N, strict=True)
        np.testing.assert_array_equal(prefix.logprobs_T, wanted.logprobs_N, strict=True)
        assert [(s.version, s.start, s.end) for s in prefix.segments] == [(0, 0, 3), (1, 3, 7)]
        results = store.tool_results(SessionId(GroupId(group), 0))
        assert results == {(0, 0): make.tool_result(group, 0, attempt=attempt)}


@given(
    cuts=st.lists(LIMITS, max_size=5),
    restarts=st.sets(st.integers(0, 5)),
    attempts=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_remote_unfinished_sessions_outlive_connections_that_end_anywhere(
    cuts: list[tuple[int, int]], restarts: set[int], attempts: list[int]
) -> None:
    storage = new_storage()
    with doors() as door:
        door.open(start_store(storage, groups=len(attempts)))
        opened: list[socket.socket] = []
        connect = bad_line(door, storage, opened, cuts=cuts, restarts=restarts)
        worker = door.worker(options=PATIENT, connect=connect)
        begin_sessions(worker, attempts=attempts)
        worker.close()
        door.close()
        following = start_store(storage.open_as_new_process())
        check_begun(following, attempts=attempts)
        following.close("closed")


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_remote_wrong_bytes_never_count(at: int, bit: int, cut: bool) -> None:
    """One bit of a worker's stream is flipped, or the stream ends there: a prefix counts."""
    frames = [hello()] + [
        bytes(number_frame(sessions_frame(group_of(group), ()), group + 1))
        for group in range(GROUPS)
    ]
    unfinished = [make.delta(GROUPS, 0, 0, 3), make.delta(GROUPS, 1, 0, 5)]
    frames.append(bytes(number_frame(partials_frame(unfinished), GROUPS + 1)))
    frames.append(bytes(number_frame(result_frame(make.tool_result(GROUPS, 0)), GROUPS + 2)))
    whole = bytearray(b"".join(frames))
    at %= len(whole)
    if cut:
        del whole[at:]
    else:
        whole[at] ^= 1 << bit
    storage = new_storage()
    with doors() as door:
        store = start_store(storage, groups=GROUPS + 1)
        opened = door.open(store)
        with opened.connect() as stream:
            stream.sendall(whole)
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(4096):
                pass
        intact, end = 0, 0
        for frame in frames:
            end += len(frame)
            intact += end <= at
        requests = max(intact - 1, 0)
        sent = [one for group in range(min(requests, GROUPS)) for one in group_of(group)]
        check_log(storage, sent)
        begun = store.open_group(GroupId(GROUPS)).begun
        left = [(one.session.index, len(one.token_ids_N)) for one in unfinished]
        assert [(s.index, b.tokens) for s, b in begun.items()] == left * (requests > GROUPS)
        results = store.tool_results(SessionId(GroupId(GROUPS), 0))
        assert len(results) == (requests > GROUPS + 1)
        worker = door.worker()
        worker.sessions_done(group_of(GROUPS - 1)).result(FLUSH_S)
        worker.close()


def hello() -> bytes:
    fields = {"protocol": PROTOCOL, "run_id": "5" * 32, "incarnation": 1}
    return bytes(number_frame(make_frame(FrameType.HELLO, fields), 0))


@given(
    segments=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 4)), max_size=3),
        min_size=2,
        max_size=2,
    ),
    lengths=st.lists(st.integers(-1, 5), min_size=2, max_size=2),
)
def test_remote_segments_that_do_not_cover_the_response_are_refused(
    segments: list[list[tuple[int, int, int]]], lengths: list[int]
) -> None:
    good = [one.trajectory for one in group_of(0)]
    (fields, arrays), _ = checked_columns(good)
    request = {**fields, "segments": segments, "response_tokens": lengths}
    request |= {"rewards": [0.5, 1.0], "parts": [{}, {}], "settled": []}
    frame = number_frame(make_frame(FrameType.SESSIONS, request, arrays), 1)
    covered = [
        [start for _, start, _ in some] == [0, *(end for _, _, end in some)][:-1]
        and bool(some)
        and some[-1][2] == length
        for some, length in zip(segments, lengths, strict=True)
    ]
    fits = min(lengths) >= 0 and sum(lengths) == sum(len(one.response_ids_T) for one in good)
    try:
        read_request(parse_frame(memoryview(frame)))
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == (all(covered) and fits)


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(
    data=st.data(),
    name=st.sampled_from(
        [
            "sessions",
            "prompt_tokens",
            "response_tokens",
            "segments",
            "stop_reasons",
            "rewards",
            "parts",
            "settled",
        ]
    ),
)
def test_remote_nonsense_is_refused_and_the_store_goes_on(data: st.DataObject, name: str) -> None:
    """A whole frame with a true checksum and a field that may be anything."""
    good = group_of(0)
    (fields, arrays), _ = checked_columns([one.trajectory for one in good])
    request: dict[str, Any] = {
        **fields,
        "rewards": [one.reward for one in good],
        "parts": [dict(one.parts) for one in good],
        "settled": [],
    }
    request[name] = data.draw(st.lists(VALUES, min_size=2, max_size=2) | VALUES)
    frame = number_frame(make_frame(FrameType.SESSIONS, request, arrays), 1)
    storage = new_storage()
    with doors() as door:
        store = start_store(storage, groups=2)
        opened = door.open(store)
        with opened.connect() as stream:
            stream.sendall(hello() + bytes(frame))
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(4096):
                pass
        store.flush(FLUSH_S)
        assert opened.warnings == []
        worker = door.worker()
        worker.sessions_done([session(1, 0)]).result(FLUSH_S)
        worker.close()
        done = store.state.groups[GroupId(0)].done
        assert set(done) <= {0, 1}
        assert not np.isnan([settled.reward for settled in done.values()]).any()


PIECES = partial_columns([make.delta(0, 0, 0, 3), make.delta(0, 1, 0, 2)])
UNFINISHED: dict[FrameType, dict[str, Any]] = {
    FrameType.PARTIALS: PIECES[0],
    FrameType.TOOL_RESULT: record_fields(make.tool_result(0, 0)),
    FrameType.SESSION_RESTARTED: record_fields(make.restarted(0, 0)),
    FrameType.ASK_PREFIXES: {"sessions": [[0, 0]]},
    FrameType.ASK_TOOL_RESULTS: {"sessions": [[0, 0]]},
}


@given(data=st.data(), frame_type=st.sampled_from(sorted(UNFINISHED)), drop=st.booleans())
def test_remote_nonsense_about_unfinished_sessions_is_refused(
    data: st.DataObject, frame_type: FrameType, drop: bool
) -> None:
    """As before, and the request that it spoils does not count unless it could be read."""
    request = dict(UNFINISHED[frame_type])
    name = data.draw(st.sampled_from(sorted(request)))
    del request[name]
    if not drop:
        request[name] = data.draw(st.lists(VALUES, min_size=2, max_size=2) | VALUES)
    arrays = PIECES[1] if frame_type is FrameType.PARTIALS else None
    frame = number_frame(make_frame(frame_type, request, arrays), 1)
    with doors() as door:
        store = start_store(new_storage(), groups=1)
        opened = door.open(store)
        with opened.connect() as stream:
            stream.sendall(hello() + bytes(frame))
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(4096):
                pass
        assert opened.warnings == []
        worker = door.worker()
        whole = store.prefix(SessionId(GroupId(0), 0))
        start, attempt = len(whole.response_ids_T), whole.attempt
        assert (start, attempt) in ((0, 0), (3, 0), (0, 1))
        piece = make.delta(0, 0, start, start + 2, attempt=attempt)
        worker.partials([piece]).result(FLUSH_S)
        worker.close()
