"""The error tree. Every user-facing error is one sentence: what, where, rule, way out.

Each class has a process exit code (documented in ``docs/exit-codes.md``). Errors are picklable so
that they cross process boundaries unchanged.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar, cast

E = TypeVar("E", bound=BaseException)


class PerdureError(Exception):
    """Base of every error perdure raises on purpose.

    Args:
        what: What went wrong, in one clause.
        where: File, field or component it concerns.
        rule: The rule that was broken.
        way_out: What the user can do now.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", rule: str = "", way_out: str = "") -> None:
        super().__init__(what, where, rule, way_out)
        self.what = what
        self.where = where
        self.rule = rule
        self.way_out = way_out

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.rule, self.way_out)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        parts = [head]
        if self.rule:
            parts.append(self.rule)
        if self.way_out:
            parts.append(f"way out: {self.way_out}")
        return "; ".join(parts)


def _rebuild(
    cls: type[PerdureError], what: str, where: str, rule: str, way_out: str
) -> PerdureError:
    return cls(what, where=where, rule=rule, way_out=way_out)


class ConfigError(PerdureError):
    """A configuration, recipe or command line that cannot be honoured."""

    exit_code = 2


class RunBusyError(PerdureError):
    """A live process holds the run."""

    exit_code = 3


class FencedError(PerdureError):
    """A newer incarnation has claimed the run; this writer may not write any more."""

    exit_code = 4


class DamagedError(PerdureError):
    """Bytes that were durable are missing or wrong. Damaged is never treated as absent."""

    exit_code = 5


class NothingToResumeError(PerdureError):
    """The run, checkpoint or recipe asked for does not exist."""

    exit_code = 6


class StorageError(PerdureError):
    """The storage refused: disk full, directory not writable, I/O error."""

    exit_code = 7


class RedoDivergedError(PerdureError):
    """Deterministic mode: a redone step gave another digest than the logged one."""

    exit_code = 8


class FutureFormatError(PerdureError):
    """Files were written by a newer format than this version reads."""

    exit_code = 9


class AuditFailedError(PerdureError):
    """The independent audit found experience skipped, trained twice or not accounted for."""

    exit_code = 10


class LifecycleError(PerdureError):
    """An event that is illegal in the current state of a prompt group."""

    exit_code = 11


class TrainingError(PerdureError):
    """Training cannot go on (non-finite loss, a reward function that raises, a stuck wait)."""

    exit_code = 12


class InfrastructureError(TrainingError):
    """An engine, a tool or a connection failed: the same work may succeed when it is repeated."""

    exit_code = 14


class EngineLostError(InfrastructureError):
    """A rollout engine is gone or silent, or none serves: infrastructure, worth another try."""

    exit_code = 13


class StoppedError(PerdureError):
    """SIGTERM ended the run in an orderly way; 128 + 15."""

    exit_code = 143


class InterruptError(StoppedError):
    """Ctrl-C ended the run in an orderly way; 128 + 2."""

    exit_code = 130


def without_frames(error: E) -> E:
    """The error without its tracebacks, and those of what caused it.

    For an error that is kept: the frames of a traceback keep alive whatever their functions held.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        pending += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            pending += cast("BaseExceptionGroup[BaseException]", one).exceptions
    return error
