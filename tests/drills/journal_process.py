"""A process of ``test_journal_kill.py``: sessions leave tokens and tool results until it is killed.

What a session says follows from its name alone, so that a later process knows it too. A turn is
five tokens, a tool call, and one token of its result; a session has four turns. Says ``found …``
of what an earlier process left, ``called …`` of each call, and ``durable …`` of what is
acknowledged.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from perdure.core.clock import SystemClock
from perdure.core.experience_records import (
    GroupSettled,
    Submitted,
    ToolResult,
)
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, PolicyVersion, SessionId
from perdure.core.record_types import GroupOutcome, StopReason
from perdure.core.records import Published
from perdure.core.trajectories import PartialDelta, Segment, Trajectory
from perdure.experience import (
    ExperienceStore,
    FinishedSession,
    OpenGroup,
    RunInfo,
    claim_experience,
    create_run,
)
from perdure.storage import PosixStorage

SESSIONS = 3
TURN, TURNS = 6, 4
LENGTH = TURN * TURNS
FLUSH_S = 60.0


def whole(session: SessionId, attempt: int) -> PartialDelta:
    """All that a session says in an attempt."""
    places = np.arange(LENGTH)
    tokens = 1000 * session.group + 100 * session.index + 10000 * attempt + places
    return PartialDelta(
        session,
        0,
        tokens.astype(np.int32),
        (-places / 8).astype(np.float32),
        (places % TURN != TURN - 1).astype(np.uint8),
        (Segment(PolicyVersion(0), 0, LENGTH),),
        attempt,
    )


class Worker:
    """Goes on with every session that is not done."""

    def __init__(self, store: ExperienceStore, run: Path, chance: random.Random) -> None:
        self._store = store
        self._calls = run / "calls.txt"
        self._chance = chance

    def run(self) -> None:
        """Until the process is killed."""
        while True:
            for group in self._store.open_groups():
                self._run_group(group)
            self._submit()

    def _submit(self) -> None:
        table = self._store.state.table
        new = Submitted(
            table.next_group,
            GlobalStep(1),
            sessions=SESSIONS,
            prompt_ids=(1, 2),
            task="t",
            answer="",
            dataset_digest="d",
            data_index=table.next_data_index,
        )
        self._store.submit([new])

    def _run_group(self, group: OpenGroup) -> None:
        going = {session: self._store.prefix(session) for session in group.missing}
        place = {s: (prefix.attempt, len(prefix.response_ids_T)) for s, prefix in going.items()}
        while any(tokens < LENGTH for _, tokens in place.values()):
            deltas = [self._next(s, *at) for s, at in place.items() if at[1] < LENGTH]
            acknowledged = self._store.partials(deltas)
            for delta in deltas:
                place[delta.session] = (delta.attempt, delta.end)
                say_when(acknowledged, f"tokens {delta.session.key()} {delta.attempt} {delta.end}")
            if self._chance.random() < 0.05:
                place |= self._restart(group.missing[0], *place[group.missing[0]])
        done = [FinishedSession(trajectory(s, n), 1.0, {}) for s, (n, _) in place.items()]
        settled = GroupSettled(group.submitted.group, GroupOutcome.FINISHED)
        self._store.sessions_done(done, settled=[settled])

    def _next(self, session: SessionId, attempt: int, tokens: int) -> PartialDelta:
        """Up to five tokens, or those of a result that is durable."""
        place = tokens % TURN
        if place == TURN - 1:
            self._result(session, attempt, tokens // TURN)
            return whole(session, attempt).between(tokens, tokens + 1)
        upto = tokens + self._chance.randint(1, TURN - 1 - place)
        return whole(session, attempt).between(tokens, upto)

    def _result(self, session: SessionId, attempt: int, turn: int) -> None:
        """The result of a call, which is not made again if it is in the log."""
        if (turn, 0) in self._store.tool_results(session):
            return
        name = f"{session.key()} {attempt} {turn}"
        with self._calls.open("a") as calls:
            calls.write(f"{name}\n")
        result = ToolResult(session, attempt, turn, 0, "echo", name)
        acknowledged = self._store.tool_result(result)
        self._store.urge()
        acknowledged.result(FLUSH_S)
        say(f"durable result {name}")

    def _restart(
        self, session: SessionId, attempt: int, tokens: int
    ) -> dict[SessionId, tuple[int, int]]:
        if tokens == LENGTH:
            return {}
        self._store.restart_session(session, attempt=attempt + 1, reason="by chance")
        return {session: (attempt + 1, 0)}


def trajectory(session: SessionId, attempt: int) -> Trajectory:
    said = whole(session, attempt)
    return Trajectory(
        session,
        np.array([1, 2], np.int32),
        said.token_ids_N,
        said.logprobs_N,
        said.loss_mask_N,
        said.segments,
        StopReason.STOP,
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def say_when(acknowledged: Future[object], what: str) -> None:
    acknowledged.add_done_callback(lambda done: done.exception() or say(f"durable {what}"))


def say_what_is_there(store: ExperienceStore) -> None:
    """Every open session's tokens, checked against what it must have said."""
    for group in store.open_groups():
        for session, prefix in store.prefixes(group.missing).items():
            tokens = len(prefix.response_ids_T)
            expected = whole(session, prefix.attempt).between(0, tokens)
            np.testing.assert_array_equal(prefix.response_ids_T, expected.token_ids_N)
            np.testing.assert_array_equal(prefix.logprobs_T, expected.logprobs_N)
            np.testing.assert_array_equal(prefix.loss_mask_T, expected.loss_mask_N)
            say(f"found tokens {session.key()} {prefix.attempt} {tokens}")
            for (turn, _), result in store.tool_results(session).items():
                assert result.result == f"{session.key()} {prefix.attempt} {turn}"
                say(f"found result {result.result}")
    for number, group in store.state.groups.items():
        for index in group.done:
            say(f"found done {SessionId(GroupId(number), index).key()}")
    say("found all")


def main() -> None:
    run = Path(sys.argv[1])
    storage = PosixStorage(run)
    if not (run / "run.json").exists():
        create_run(storage, RunInfo("7" * 32, 0.0))
    claimed = claim_experience(storage, clock=SystemClock(), faults=NoFaults())
    store = claimed.start()
    store.append(Published(PolicyVersion(0), "weights", GlobalStep(0)))
    say_what_is_there(store)
    Worker(store, run, random.Random(claimed.incarnation)).run()


if __name__ == "__main__":
    main()
