"""A worker that goes on with unfinished sessions through a remote store, until it kills itself.

    python generator_process.py SOCKET CALLS STEPS

Sessions are those of ``journal_process``; every third group has one that starts again. ``CALLS`` is
a file that each tool call adds a line to. After ``STEPS`` steps (0: never), in front of a request,
behind it, or behind its acknowledgement, the process is gone. Says what ``durable_notes`` reads.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import numpy as np
from journal_process import LENGTH, TURN, say, say_when, trajectory, whole
from remote_process import FLUSH_S, RUN_ID

from perdure.core.clock import SystemClock
from perdure.core.errors import LifecycleError
from perdure.core.experience_records import GroupSettled, ToolResult
from perdure.core.ids import GroupId, SessionId
from perdure.core.record_types import GroupOutcome
from perdure.experience import FinishedSession, RemoteOptions, RemoteStore

SESSIONS = tuple(SessionId(GroupId(group), index) for group in range(6) for index in range(2))
OPTIONS = RemoteOptions(retry_s=0.01, reconnect_timeout_s=FLUSH_S)


def starts_again(session: SessionId) -> bool:
    return session.group % 3 == 0 and session.index == 0


def finished(session: SessionId) -> FinishedSession:
    """What has to be in the log in the end."""
    said = trajectory(session, int(starts_again(session)))
    prompt = np.array([1, 2, session.group], np.int32)
    return FinishedSession(dataclasses.replace(said, prompt_ids_P=prompt), 1.0, {})


class Generator:
    """Runs one session after the other."""

    def __init__(self, store: RemoteStore, calls: Path, steps: int) -> None:
        self._store = store
        self._calls = calls
        self._steps = steps

    def run(self) -> None:
        """Until no session is left, or the steps are."""
        for session in [one for one in SESSIONS if self._is_open(one)]:
            prefix = self._store.prefix(session)
            self._run_session(session, prefix.attempt, len(prefix.response_ids_T))

    def _is_open(self, session: SessionId) -> bool:
        """Whether there is something left to do; what was done is checked and said."""
        try:
            prefix, results = self._store.prefix(session), self._store.tool_results(session)
        except LifecycleError:
            say(f"found done {session.key()}")
            return False
        tokens, attempt = len(prefix.response_ids_T), prefix.attempt
        expected = whole(session, attempt).between(0, tokens)
        np.testing.assert_array_equal(prefix.response_ids_T, expected.token_ids_N, strict=True)
        np.testing.assert_array_equal(prefix.logprobs_T, expected.logprobs_N, strict=True)
        np.testing.assert_array_equal(prefix.loss_mask_T, expected.loss_mask_N, strict=True)
        say(f"found tokens {session.key()} {attempt} {tokens}")
        for (turn, _), result in results.items():
            assert result.result == f"{session.key()} {attempt} {turn}"
            say(f"found result {result.result}")
        return True

    def _run_session(self, session: SessionId, attempt: int, tokens: int) -> None:
        while tokens < LENGTH:
            if tokens == LENGTH // 2 and not attempt and starts_again(session):
                self._step()
                attempt, tokens = attempt + 1, 0
                self._store.restart_session(session, attempt=attempt, reason="as planned")
            calling = tokens % TURN == TURN - 1
            if calling:
                self._call(session, attempt, tokens // TURN)
            upto = tokens + 1 if calling else tokens + min(2, TURN - 1 - tokens % TURN)
            self._step()
            future = self._store.partials([whole(session, attempt).between(tokens, upto)])
            say_when(future, f"tokens {session.key()} {attempt} {upto}")
            tokens = upto
            self._step()
        settled = [GroupSettled(session.group, GroupOutcome.FINISHED)] if session.index else []
        future = self._store.sessions_done([finished(session)], settled)
        self._step()
        future.result(FLUSH_S)

    def _call(self, session: SessionId, attempt: int, turn: int) -> None:
        """A call, which is not made again if its result is in the log."""
        if (turn, 0) in self._store.tool_results(session):
            return
        name = f"{session.key()} {attempt} {turn}"
        with self._calls.open("a") as calls:
            calls.write(f"{name}\n")
        self._step()
        future = self._store.tool_result(ToolResult(session, attempt, turn, 0, "echo", name))
        self._step()
        future.result(FLUSH_S)
        say(f"durable result {name}")
        self._step()

    def _step(self) -> None:
        self._steps -= 1
        if self._steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    path, calls, steps = sys.argv[1:]
    store = RemoteStore(Path(path), run_id=RUN_ID, clock=SystemClock(), options=OPTIONS)
    try:
        Generator(store, Path(calls), int(steps)).run()
    finally:
        store.close()


if __name__ == "__main__":
    main()
