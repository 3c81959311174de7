"""Verdicts on answers, within a deadline."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from perdure.core.errors import InfrastructureError
from perdure.tasks.api import Prompt, RewardResult, Task

_THREADS = 8


class VerdictError(Exception):
    """An answer has no verdict; says why."""


class Judge:
    """Asks the verifier of a task, in threads if it may be slow (``Task.slow_verifier``).

    A verifier that is given up goes on in its thread, since nothing can end one. When all threads
    are taken so, verdicts that need one are too late as well.

    Args:
        timeout_s: Longest wait for a verdict.
    """

    def __init__(self, task: Task, *, timeout_s: float) -> None:
        self._task = task
        self._timeout_s = timeout_s
        self._threads = (
            ThreadPoolExecutor(_THREADS, thread_name_prefix="verifier")
            if task.slow_verifier
            else None
        )

    async def verdict(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        """The verdict.

        Raises:
            VerdictError: The verifier raised, was too slow, or gave no finite reward.
            InfrastructureError: As the verifier said: what it stands on failed.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                verdict = await self._asked(prompt, response_ids)
        except TimeoutError:
            raise VerdictError(f"verifier gave no verdict within {self._timeout_s:g} s") from None
        except InfrastructureError:
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
            loop = asyncio.get_running_loop()
            verify = self._task.verify
            found = await loop.run_in_executor(self._threads, verify, prompt, response_ids)
        return cast("RewardResult", await found if inspect.isawaitable(found) else found)
