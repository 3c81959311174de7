"""Who is let in, who is turned away with which sentence, and whose fault ends what."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import experience_records as make
import pytest
from remote_cases import (
    FLUSH_S,
    INLINE,
    RUN_ID,
    Doors,
    check_log,
    doors,
    new_storage,
    session,
    start_store,
    wait_until,
)

from perdure.core.clock import ManualClock
from perdure.core.errors import (
    ConfigError,
    FencedError,
    FutureFormatError,
    RunBusyError,
    StorageError,
)
from perdure.core.ids import GroupId, SessionId
from perdure.experience import RemoteOptions, RemoteStore, RunInfo, StoreServer, create_run
from perdure.experience.partials import partial_columns
from perdure.experience.remote import connection, handshake, replies, server
from perdure.experience.remote.frames import FrameType, make_frame, number_frame
from perdure.experience.remote.handshake import PROTOCOL
from perdure.experience.remote.requests import sessions_frame
from perdure.experience.remote.unfinished import prefixes_answer, question_frame
from perdure.experience.remote.wire import Wire
from perdure.storage.memory import MemoryStorage

OTHER_RUN = "7" * 32
Stub = Callable[..., socket.socket]


@pytest.fixture
def storage() -> MemoryStorage:
    return new_storage()


@pytest.fixture
def door() -> Iterator[Doors]:
    with doors() as value:
        yield value


def dial(path: Path, run_id: str = RUN_ID) -> RemoteStore:
    """A worker as production makes it."""
    return RemoteStore(path, run_id=run_id, clock=ManualClock())


@pytest.fixture
def stub() -> Iterator[Stub]:
    """Makes ends of connections whose other end has said this, and says and reads nothing more."""
    with contextlib.ExitStack() as stack:

        def make(*said: bytes) -> socket.socket:
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)
            theirs.sendall(b"".join(said))
            theirs.shutdown(socket.SHUT_WR)
            return ours

        yield make


def hello(protocol: int = PROTOCOL, run_id: str = RUN_ID, incarnation: object = 1) -> bytes:
    fields = {"protocol": protocol, "run_id": run_id, "incarnation": incarnation}
    return bytes(number_frame(make_frame(FrameType.HELLO, fields), 0))


def greeted(door: Doors, said: bytes = b"") -> Wire:
    """A connection behind the greeting, by hand."""
    assert door.now is not None
    wire = Wire(door.now.connect())
    assert wire.receive(FLUSH_S) is not None
    wire.send(bytearray(said or hello()), timeout_s=FLUSH_S)
    return wire


def test_a_worker_dials_a_path(storage: MemoryStorage, door: Doors) -> None:
    door.open(start_store(storage, groups=1))
    assert door.path.stat().st_mode & 0o077 == 0
    worker = dial(door.path)
    worker.sessions_done([session(0, 0)]).result(FLUSH_S)
    worker.close()
    check_log(storage, [session(0, 0)])


class Short:
    """A listener in a process that is out of descriptors for some time."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self._listener = listener
        self.times = times

    def accept(self) -> object:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)


def test_a_shortage_of_descriptors_passes(
    storage: MemoryStorage, door: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "POLL_S", 0.01)
    opened = door.open(start_store(storage, groups=1))
    listener = Short(opened.server._listener, times=2)
    opened.server._listener = listener  # type: ignore[assignment]
    worker = dial(door.path)
    worker.sessions_done([session(0, 0)]).result(FLUSH_S)
    worker.close()
    assert listener.times == 0
    assert "Too many open files" in opened.warnings[0]
    check_log(storage, [session(0, 0)])


def test_nobody_listens(storage: MemoryStorage, door: Doors) -> None:
    with pytest.raises(StorageError, match="nobody listens here .No such file") as absent:
        dial(door.path)
    door.open(start_store(storage))
    door.close()
    with pytest.raises(StorageError, match="nobody listens here .Connection refused") as refused:
        dial(door.path)
    for error in (absent.value, refused.value):
        assert error.where == str(door.path)
        assert error.rule
        assert "resume the run" in error.way_out


def test_the_store_of_another_run_is_not_written(storage: MemoryStorage, door: Doors) -> None:
    door.open(start_store(storage))
    with pytest.raises(ConfigError) as error:
        dial(door.path, OTHER_RUN)
    assert RUN_ID in error.value.what
    assert OTHER_RUN in error.value.rule
    assert error.value.where == str(door.path)
    assert error.value.way_out


def test_an_older_store_is_told_from_one_that_is_away(door: Doors, stub: Stub) -> None:
    with pytest.raises(ConfigError) as error:
        door.worker(connect=lambda: stub(hello(PROTOCOL - 1)))
    assert f"protocol {PROTOCOL - 1}" in error.value.what
    assert f"protocol {PROTOCOL}" in error.value.rule
    assert error.value.where == str(door.path)
    assert error.value.way_out


def test_an_older_worker_is_told_why_it_is_shown_out(storage: MemoryStorage, door: Doors) -> None:
    door.open(start_store(storage))
    wire = greeted(door, hello(PROTOCOL - 1))
    frame = wire.receive(FLUSH_S)
    assert frame is not None
    assert frame.type is FrameType.FAREWELL
    assert f"protocol {PROTOCOL - 1}, this store protocol {PROTOCOL}" in frame.fields["reason"]
    wire.close()


def test_a_newer_protocol_is_not_guessed_at(door: Doors, stub: Stub) -> None:
    with pytest.raises(FutureFormatError) as error:
        door.worker(connect=lambda: stub(hello(PROTOCOL + 1)))
    assert f"protocol {PROTOCOL + 1}" in error.value.what
    assert error.value.where == str(door.path)
    assert error.value.rule
    assert error.value.way_out


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64),
        hello()[:-1],
        hello(incarnation="1"),
        bytes(number_frame(make_frame(FrameType.URGE, {}), 0)),
        bytes(number_frame(make_frame(FrameType.HELLO, {"protocol": 1}), 0)),
    ],
)
def test_whoever_else_listens_is_no_store(door: Doors, stub: Stub, said: bytes) -> None:
    with pytest.raises(StorageError, match="no store answers here"):
        door.worker(connect=lambda: stub(said))


def test_a_silent_store_is_not_waited_for_forever(
    door: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "ANSWER_TIMEOUT_S", 0.01)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(StorageError, match="nothing came"):
        handshake.open_wire(lambda: ours, path=door.path, run_id=RUN_ID)


def test_a_path_is_taken_over_by_the_next_incarnation_alone(
    storage: MemoryStorage, door: Doors
) -> None:
    first = door.open(start_store(storage, groups=1))
    second = door.open(start_store(storage.open_as_new_process(), take_over=True))
    worker = dial(door.path)
    assert worker.sessions_done([session(0, 0)]).result(FLUSH_S).incarnation == 2
    worker.close()
    other_storage = MemoryStorage()
    create_run(other_storage, RunInfo(OTHER_RUN, 0.0))
    other = start_store(other_storage)
    with pytest.raises(RunBusyError) as error:
        StoreServer(other, door.path)
    assert RUN_ID in error.value.what
    other.close("refused")
    first.server.close()
    assert second.warnings == []


def test_a_file_is_never_taken_for_an_old_socket(storage: MemoryStorage, door: Doors) -> None:
    store = start_store(storage)
    door.path.write_text("somebody's")
    with pytest.raises(StorageError, match="not a socket"):
        StoreServer(store, door.path)
    assert door.path.read_text() == "somebody's"
    with pytest.raises(StorageError, match="shorter than 90 bytes") as error:
        StoreServer(store, door.path.with_name("x" * 100))
    assert "AF_UNIX path too long" in error.value.what
    with pytest.raises(StorageError, match="no socket can be made"):
        StoreServer(store, door.path.parent / "absent" / "store")
    store.close("refused")


@pytest.mark.parametrize(
    "said",
    [
        hello(run_id=OTHER_RUN),
        hello(PROTOCOL + 1),
        b"x" * 64,
        bytes(sessions_frame([session(0, 0)], ())),
        bytes(number_frame(sessions_frame([session(0, 0)], ()), 1)),
    ],
)
def test_a_stranger_is_shown_out(storage: MemoryStorage, door: Doors, said: bytes) -> None:
    opened = door.open(start_store(storage, groups=1))
    wire = greeted(door, said)
    frame = wire.receive(FLUSH_S)
    assert frame is not None
    assert frame.type is FrameType.FAREWELL
    assert wire.receive(FLUSH_S) is None
    wire.close()
    assert len(opened.warnings) == 1
    dial(door.path).close()
    check_log(storage, [])


@pytest.mark.parametrize(
    "bad",
    [
        number_frame(make_frame(FrameType.ACKNOWLEDGED, {"position": [1, 0, 0]}), 2),
        number_frame(sessions_frame([session(0, 1)], ()), 1),
        number_frame(sessions_frame([session(0, 1)], ()), 3),
    ],
)
def test_what_no_worker_sends_ends_the_connection_behind_what_it_sent(
    storage: MemoryStorage, door: Doors, bad: bytearray
) -> None:
    opened = door.open(start_store(storage, groups=1))
    wire = greeted(door)
    wire.send(number_frame(sessions_frame([session(0, 0)], ()), 1), timeout_s=FLUSH_S)
    wire.send(bad, timeout_s=FLUSH_S)
    received = [frame.type for frame in iter(lambda: wire.receive(FLUSH_S), None)]
    assert received == [FrameType.ACKNOWLEDGED, FrameType.FAREWELL]
    wire.close()
    check_log(storage, [session(0, 0)])
    assert len(opened.warnings) == 1


def bad_piece(**changed: object) -> bytearray:
    """A request with three tokens of one session, which begins at token 4."""
    fields, arrays = partial_columns([make.delta(0, 0, 4, 7)])
    return make_frame(FrameType.PARTIALS, {**fields, **changed}, arrays)


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (bad_piece(segments=[[(0, 4, 6)]]), "segments end at 6 of 7 tokens"),
        (bad_piece(segments=[[(0, 4, 5), (0, 6, 7)]]), "covers 6 to 7 where 5 is the next"),
        (bad_piece(segments=[[(0, 4, 4), (0, 4, 7)]]), "covers 4 to 4 where 4 is the next"),
        (bad_piece(segments=[[(0, 5, 7)]]), "covers 5 to 7 where 4 is the next"),
        (bad_piece(segments=[[]]), "segments end at 4 of 7 tokens"),
        (bad_piece(ends=[6], segments=[[(0, 4, 6)]]), "an array has not 2 tokens"),
        (bad_piece(attempts=[]), "its columns have different lengths"),
    ],
)
def test_pieces_that_do_not_fit_together_are_refused_with_what_is_wrong(
    storage: MemoryStorage, door: Doors, request_: bytearray, what: str
) -> None:
    opened = door.open(start_store(storage, groups=1))
    wire = greeted(door)
    wire.send(number_frame(request_, 1), timeout_s=FLUSH_S)
    frame = wire.receive(FLUSH_S)
    assert frame is not None
    assert frame.type is FrameType.REFUSED
    assert frame.fields["what"].startswith("frame 1 is malformed: ")
    assert what in frame.fields["what"]
    wire.close()
    assert not opened.warnings


def test_what_another_process_says_is_checked_without_assertions_as_well() -> None:
    """As with the one above, under ``python -O``."""
    frame = number_frame(bad_piece(segments=[[(0, 4, 6)]]), 1)
    script = (
        "import sys\n"
        "from perdure.experience.remote.frames import parse_frame\n"
        "from perdure.experience.remote.unfinished import read_partials\n"
        "frame = parse_frame(memoryview(sys.stdin.buffer.read()))\n"
        "try:\n"
        "    read_partials(frame)\n"
        "except ValueError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", script], input=bytes(frame), capture_output=True, check=False
    )
    assert done.stderr.decode().strip() == "frame 1 is malformed: segments end at 6 of 7 tokens"


@pytest.mark.parametrize("room", [1, 2, 3])
def test_answers_wait_for_room_before_they_are_made(
    storage: MemoryStorage, door: Doors, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Whoever asks and does not read the answers makes the store hold so many and no more."""
    store = start_store(storage, groups=1, options=INLINE)
    piece = make.delta(0, 0, 0, 3)
    store.partials([piece])
    size = len(prefixes_answer(store.prefixes([piece.session])))
    monkeypatch.setattr(replies, "MAX_HELD_BYTES", room * size)
    made: list[object] = []
    answer = connection.prefixes_answer

    def counted(prefixes: Any) -> bytearray:
        made.append(prefixes)
        return answer(prefixes)

    monkeypatch.setattr(connection, "prefixes_answer", counted)
    door.open(store)
    wire = greeted(door)
    asked = 12
    for number in range(1, asked + 1):
        question = number_frame(question_frame(FrameType.ASK_PREFIXES, [piece.session]), number)
        wire.send(question, timeout_s=FLUSH_S)
    # Nothing is durable, so nothing is sent: those that are held, and one that waits for room.
    wait_until(lambda: len(made) == room + 1)
    threading.Event().wait(0.1)
    assert len(made) == room + 1
    store.flush(FLUSH_S)
    for number in range(1, asked + 1):
        frame = wire.receive(FLUSH_S)
        assert frame is not None
        assert (frame.type, frame.number) == (FrameType.TOLD, number)
    assert len(made) == asked
    wire.close()


def test_refused_answers_give_their_room_back(
    storage: MemoryStorage, door: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = start_store(storage, groups=1)
    piece = make.delta(0, 0, 0, 3)
    store.partials([piece])
    store.flush(FLUSH_S)
    monkeypatch.setattr(replies, "MAX_HELD_BYTES", 1)
    opened = door.open(store)
    wire = greeted(door)
    start_store(storage.open_as_new_process(), take_over=True).close("took over")
    for number in (1, 2, 3):
        question = number_frame(question_frame(FrameType.ASK_PREFIXES, [piece.session]), number)
        wire.send(question, timeout_s=FLUSH_S)
        frame = wire.receive(FLUSH_S)
        assert frame is not None
        assert (frame.type, frame.fields["error"]) == (FrameType.REFUSED, "FencedError")
    wire.close()
    door.now = None
    opened.server.close()
    with pytest.raises(FencedError):
        store.close("fenced")


def test_a_worker_that_hangs_up_at_once_costs_nothing(storage: MemoryStorage, door: Doors) -> None:
    door.open(start_store(storage, groups=1))
    wire = greeted(door)
    wire.send(number_frame(sessions_frame([session(0, 0)], ()), 1), timeout_s=FLUSH_S)
    wire.close()
    worker = door.worker()
    worker.sessions_done([session(0, 0), session(0, 1)]).result(FLUSH_S)
    worker.close()
    check_log(storage, [session(0, 0), session(0, 1)])


@pytest.mark.parametrize(
    "reply",
    [
        number_frame(make_frame(FrameType.ACKNOWLEDGED, {"position": [1, 0, 64]}), 2),
        number_frame(make_frame(FrameType.ACKNOWLEDGED, {"position": [1, 0]}), 1),
        number_frame(make_frame(FrameType.REFUSED, {"error": "LifecycleError"}), 1),
        number_frame(make_frame(FrameType.URGE, {}), 1),
        number_frame(make_frame(FrameType.TOLD, {"results": []}), 1),
        b"\0" * 64,
    ],
)
def test_a_store_that_answers_nonsense_is_left_and_asked_again(
    storage: MemoryStorage, door: Doors, stub: Stub, reply: bytearray
) -> None:
    """The first connection leads to a liar; what it did not acknowledge goes to the store."""
    opened = door.open(start_store(storage, groups=1))
    first = iter([stub(hello(), bytes(reply))])
    worker = door.worker(connect=lambda: next(first, None) or opened.connect())
    worker.sessions_done([session(0, 0)]).result(FLUSH_S)
    worker.close()
    check_log(storage, [session(0, 0)])


def test_a_question_is_not_answered_by_an_acknowledgement(
    storage: MemoryStorage, door: Doors, stub: Stub
) -> None:
    opened = door.open(start_store(storage, groups=1))
    lie = number_frame(make_frame(FrameType.ACKNOWLEDGED, {"position": [1, 0, 64]}), 1)
    first = iter([stub(hello(), bytes(lie))])
    worker = door.worker(connect=lambda: next(first, None) or opened.connect())
    assert worker.tool_results(SessionId(GroupId(0), 0)) == {}
    worker.close()


def test_a_liar_is_not_asked_forever(door: Doors, stub: Stub) -> None:
    options = RemoteOptions(reconnect_timeout_s=5.0, retry_s=0.5)
    worker = door.worker(connect=lambda: stub(hello()), options=options)
    error = worker.sessions_done([session(0, 0)]).exception(FLUSH_S)
    assert isinstance(error, StorageError)
    assert "has not answered for 5 s" in error.what
    with pytest.raises(StorageError):
        worker.close()


def test_a_run_that_is_replaced_by_another_ends_the_worker(door: Doors, stub: Stub) -> None:
    first = iter([stub(hello())])
    worker = door.worker(connect=lambda: next(first, None) or stub(hello(run_id=OTHER_RUN)))
    error = worker.sessions_done([session(0, 0)]).exception(FLUSH_S)
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError):
        worker.close()


def test_only_so_many_workers_are_let_in(
    storage: MemoryStorage, door: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_CONNECTIONS", 1)
    opened = door.open(start_store(storage))
    worker = door.worker()
    with pytest.raises(StorageError, match="no store answers here"):
        door.worker()
    assert "turned away" in opened.warnings[0]
    worker.close()


def test_a_fault_of_the_program_reaches_the_owner_of_the_server(
    storage: MemoryStorage, door: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = start_store(storage, groups=1)
    opened = door.open(store)

    def fail(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(store, "packed_sessions_done", fail)
    options = RemoteOptions(reconnect_timeout_s=1.0, retry_s=0.5)
    worker = door.worker(options=options)
    assert isinstance(worker.sessions_done([session(0, 0)]).exception(FLUSH_S), StorageError)
    with pytest.raises(StorageError):
        worker.close()
    with pytest.raises(ZeroDivisionError):
        opened.server.close()
    door.now = None
    store.close("failed")
