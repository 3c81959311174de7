"""Threads that take turns at every call of their storage, in an order that a test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

_TURN_S = 60.0


class Killed(BaseException):
    """Raised in an actor that is killed, from its next storage call."""


class Actor:
    """Runs ``work(storage)`` in a thread that stops before every storage call until its turn."""

    def __init__(self, storage: Any, work: Callable[[Any], None]) -> None:
        self.steps = 0
        self.over = False
        self._error: BaseException | None = None
        self._killed = False
        self._work = work
        self._storage = SteppedStorage(storage, self._wait_for_turn)
        self._turn = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._await_stop()

    def step(self) -> None:
        """Let the actor make its next storage call and run up to the one after."""
        self.steps += 1
        self._turn.release()
        self._await_stop()

    def kill(self) -> None:
        """End the actor: none of its calls has an effect any more."""
        self._killed = True
        while not self.over:
            self.step()
        self._thread.join(_TURN_S)

    def finish(self) -> None:
        """Join an actor that is over. Raises what ended it."""
        self._thread.join(_TURN_S)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._wait_for_turn()
            self._work(self._storage)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by finish
            self._error = error
        self.over = True
        self._stopped.release()

    def _wait_for_turn(self) -> None:
        self._stopped.release()
        assert self._turn.acquire(timeout=_TURN_S)
        if self._killed:
            raise Killed

    def _await_stop(self) -> None:
        assert self._stopped.acquire(timeout=_TURN_S)


class SteppedStorage:
    """A storage that calls ``stop`` before every call, also of the files it opens."""

    def __init__(self, inner: Any, stop: Callable[[], None]) -> None:
        self._inner = inner
        self._stop = stop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: Any) -> Any:
            self._stop()
            result = value(*args)
            return SteppedStorage(result, self._stop) if name == "create_append" else result

        return call


def run_actors(actors: Sequence[Actor], choose: Callable[[list[Actor]], Actor]) -> None:
    """Run all actors to their end; ``choose`` picks who goes on. Raises an actor's error."""
    while running := [actor for actor in actors if not actor.over]:
        choose(running).step()
    for actor in actors:
        actor.finish()
