"""Verdicts on answers, within a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import cast

from perdure.core.errors import InfrastructureError
from perdure.tasks.api import Prompt, RewardResult, Task

_THREADS = 8
_MAX_GIVEN_UP = 64
"""Threads of verifiers that hang; with so many, no other verifier is asked."""


class VerdictError(Exception):
    """An answer has no verdict; says why."""


class VerdictLateError(VerdictError):
    """The verifier was given up."""


class Judge:
    """Asks the verifier of a task, in threads if it may be slow (``Task.slow_verifier``).

    A verifier that is given up goes on in its thread, since nothing can end one. Neither others nor
    the end of the process wait for it.

    Args:
        timeout_s: Longest wait for a verdict.
    """

    def __init__(self, task: Task, *, timeout_s: float) -> None:
        self._task = task
        self._timeout_s = timeout_s
        self._threads = _Threads() if task.slow_verifier else None

    async def verdict(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        """The verdict.

        Raises:
            VerdictError: The verifier raised, was too slow (``VerdictLateError``), or its reward is
                not finite.
            InfrastructureError: As the verifier said: what it stands on failed.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                verdict = await self._asked(prompt, response_ids)
        except TimeoutError as error:
            if not limit.expired():
                raise VerdictError(f"verifier raised TimeoutError: {error}") from error
            what = f"verifier gave no verdict within {self._timeout_s:g} s"
            raise VerdictLateError(what) from None
        except (InfrastructureError, VerdictError):
            raise
        except Exception as error:
            raise VerdictError(f"verifier raised {type(error).__name__}: {error}") from error
        if not math.isfinite(verdict.reward):
            raise VerdictError(f"verifier returned reward {verdict.reward}")
        return verdict

    async def _asked(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        if self._threads is None:
            found = self._task.verify(prompt, response_ids)
        else:
            found = await self._threads.call(lambda: self._task.verify(prompt, response_ids))
        return cast("RewardResult", await found if inspect.isawaitable(found) else found)


class _Threads:
    """Makes calls in threads, a few at once; those that are given up count no more."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_THREADS)
        self._given_up: set[threading.Thread] = set()

    async def call(self, verify: Callable[[], object]) -> object:
        """What the call gives, or raises. Cancellation leaves it to itself.

        Raises:
            VerdictError: Too many that were given up have not returned.
        """
        async with self._room:
            self._given_up = {thread for thread in self._given_up if thread.is_alive()}
            if len(self._given_up) >= _MAX_GIVEN_UP:
                raise VerdictError(f"{_MAX_GIVEN_UP} verifiers hang, so no other one is asked")
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

            def settle(result: object, error: BaseException | None) -> None:
                if not answer.done():
                    answer.set_result((result, error))

            def run() -> None:
                result, error = None, None
                try:
                    result = verify()
                except BaseException as raised:  # noqa: BLE001 - raised where it is waited for
                    error = raised
                # Nobody listens any more if the loop is closed.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(settle, result, error)

            # One that hangs can be neither ended nor joined.
            thread = threading.Thread(target=run, name="verifier", daemon=True)
            thread.start()
            try:
                result, error = await answer
            except asyncio.CancelledError:
                self._given_up.add(thread)
                raise
            if error is not None:
                raise error
            return result
