"""Verifiers that raise, hang, or come too late."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import pytest

from perdure.runtime.verdicts import Judge, VerdictError, VerdictLateError
from perdure.tasks.api import Prompt, RewardResult
from perdure.tasks.tokenizer import ByteTokenizer

PROMPT = Prompt((1,), "t", "", 0)
RIGHT = RewardResult(1.0, {"correct": 1.0})


class Slow:
    """Verifies in a thread, as it is told."""

    slow_verifier = True
    tokenizer = ByteTokenizer()

    def __init__(self, verify: Callable[[Sequence[int]], RewardResult]) -> None:
        self._verify = verify

    def verify(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        return self._verify(response_ids)


def hanging_at(release: threading.Event, *hangs: int) -> Slow:
    """A verifier that hangs at answers that begin with one of these tokens."""

    def verify(response_ids: Sequence[int]) -> RewardResult:
        if response_ids[0] in hangs:
            release.wait()
        return RIGHT

    return Slow(verify)


def verdicts(task: Slow, count: int, *, timeout_s: float) -> list[RewardResult | BaseException]:
    """Of answers that are asked for one after another."""

    async def main() -> list[RewardResult | BaseException]:
        judge = Judge(task, timeout_s=timeout_s)  # type: ignore[arg-type]
        return [
            (await asyncio.gather(judge.verdict(PROMPT, [n]), return_exceptions=True))[0]
            for n in range(count)
        ]

    return asyncio.run(main())


def test_verifiers_that_hang_keep_no_other_one_from_its_thread() -> None:
    release = threading.Event()
    found = verdicts(hanging_at(release, *range(12)), 14, timeout_s=0.1)
    release.set()
    assert [type(one) for one in found[:12]] == [VerdictLateError] * 12
    assert str(found[0]) == "verifier gave no verdict within 0.1 s"
    assert found[12:] == [RIGHT, RIGHT]


def test_no_verifier_is_asked_when_very_many_hang() -> None:
    release = threading.Event()
    found = verdicts(hanging_at(release, *range(64)), 65, timeout_s=0.005)
    release.set()
    assert type(found[64]) is VerdictError
    assert "64 verifiers hang" in str(found[64])


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(), SystemExit(3)])
def test_whatever_a_verifier_raises_is_raised_here(error: BaseException) -> None:
    def verify(response_ids: Sequence[int]) -> RewardResult:
        raise error

    if isinstance(error, SystemExit):
        with pytest.raises(SystemExit):
            verdicts(Slow(verify), 1, timeout_s=10)
        return
    (found,) = verdicts(Slow(verify), 1, timeout_s=10)
    assert type(found) is VerdictError


def test_a_process_ends_though_a_verifier_hangs() -> None:
    script = """
import asyncio, threading
from perdure.runtime.verdicts import Judge, VerdictLateError
from perdure.tasks.api import Prompt
class Hanging:
    slow_verifier = True
    def verify(self, prompt, response_ids):
        threading.Event().wait()
async def main():
    try:
        await Judge(Hanging(), timeout_s=0.1).verdict(Prompt((1,), "t", "", 0), [1])
    except VerdictLateError as error:
        print(error)
asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=True
    )
    assert ended.stdout == "verifier gave no verdict within 0.1 s\n"
