"""What the remote tier asks of an object store, and the same store with bounded retries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from perdure.core.clock import Clock
from perdure.core.errors import ConfigError, StorageError
from perdure.core.keyed_random import generator
from perdure.storage import bulk

Bytes = bytes | memoryview
_T = TypeVar("_T")


class RemoteUnavailableError(StorageError):
    """The remote tier did not answer, or answered nonsense; the same request may succeed later."""


def chunk_sums(data: Iterable[Bytes], chunk_bytes: int) -> tuple[int, tuple[str, ...]]:
    """How many bytes there are in the parts together, and xxh3-128 of each ``chunk_bytes``.

    Of nothing there is one checksum.
    """
    sums = bulk.ChunkSums(chunk_bytes)
    for part in data:
        sums.update(part)
    return sums.bytes, sums.hexdigests()


class ObjectStore(Protocol):
    """Whole objects under keys below one prefix. Thread-safe.

    An object appears with all its bytes or not at all. Every method raises
    ``RemoteUnavailableError`` for what may pass and ``StorageError`` for what will not. After a
    ``RemoteUnavailableError`` of a call that writes, it may or may not have taken effect.
    """

    def create(self, key: str, data: Bytes) -> bool:
        """Store a new object, or return False if the key is taken (perhaps by this very call).

        ``data`` may hold other bytes as soon as the call returns, unless its buffer is still held.
        """
        ...

    def overwrite(self, key: str, data: Bytes) -> None:
        """Store an object, whatever the key holds."""
        ...

    def swap(self, key: str, data: Bytes, *, expected: str | None) -> str | None:
        """Replace an object only if its tag is still ``expected`` (None: only if it is absent).

        Returns:
            The new tag; None if somebody else, or this very call, has changed it.
        """
        ...

    def read(self, key: str) -> bytes:
        """All bytes. Raises ``FileNotFoundError`` if there is no such object."""
        ...

    def read_into(self, key: str, out: memoryview) -> bool:
        """Fill ``out``; False if the object is shorter or longer. Raises ``FileNotFoundError``."""
        ...

    def fingerprint(self, key: str, *, chunk_bytes: int) -> tuple[int, tuple[str, ...]]:
        """Size of what is stored and xxh3-128 of each ``chunk_bytes`` of it, by reading it.

        Of an empty object there is one checksum. Raises ``FileNotFoundError``.
        """
        ...

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        """All bytes and the tag of this state. Raises ``FileNotFoundError`` if it is absent."""
        ...

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below ``prefix`` (a folder, without the last ``/``) and their bytes."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; absent ones are fine."""
        ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a request is repeated.

    Attributes:
        attempts: Requests in all.
        first_delay_s: Longest wait before the second; doubles from one to the next.
        longest_delay_s: Bound of a single wait. Each wait is drawn between half its bound and it.
    """

    attempts: int = 5
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_delay_s < 0 or self.longest_delay_s < 0:
            raise ConfigError(
                f"cannot be {self}",
                where="remote.retry",
                rule="at least one attempt, and no negative delay",
                way_out="leave it out: the defaults are 5 attempts from 0.5 s to 30 s apart",
            )

    def delay_s(self, attempt: int, *, key: str) -> float:
        """Wait after the ``attempt``-th failure (from 1) of a request for ``key``."""
        # A store may be down for days: the power has to stay a number.
        bound_s = min(self.first_delay_s * 2.0 ** min(attempt - 1, 64), self.longest_delay_s)
        share = generator(attempt, f"retry {key}").random()
        return float(bound_s * (0.5 + share / 2))


@dataclass(slots=True)
class RetryingObjects:
    """An :class:`ObjectStore` whose requests are repeated while they may still succeed.

    Attributes:
        stop: Set: nothing is waited for any more, the last failure is raised at once.
        retries: Requests that were repeated so far.
    """

    objects: ObjectStore
    policy: RetryPolicy = field(kw_only=True)
    clock: Clock = field(kw_only=True)
    stop: threading.Event = field(kw_only=True, default_factory=threading.Event)
    retries: int = field(default=0, init=False)

    def create(self, key: str, data: Bytes) -> bool:
        return self._insist(key, lambda: self.objects.create(key, data))

    def overwrite(self, key: str, data: Bytes) -> None:
        self._insist(key, lambda: self.objects.overwrite(key, data))

    def swap(self, key: str, data: Bytes, *, expected: str | None) -> str | None:
        return self._insist(key, lambda: self.objects.swap(key, data, expected=expected))

    def read(self, key: str) -> bytes:
        return self._insist(key, lambda: self.objects.read(key))

    def read_into(self, key: str, out: memoryview) -> bool:
        return self._insist(key, lambda: self.objects.read_into(key, out))

    def fingerprint(self, key: str, *, chunk_bytes: int) -> tuple[int, tuple[str, ...]]:
        return self._insist(key, lambda: self.objects.fingerprint(key, chunk_bytes=chunk_bytes))

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        return self._insist(key, lambda: self.objects.read_tagged(key))

    def list(self, prefix: str) -> dict[str, int]:
        return self._insist(prefix, lambda: self.objects.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._insist(keys[0], lambda: self.objects.delete(keys))

    def _insist(self, key: str, call: Callable[[], _T]) -> _T:
        attempt = 0
        while True:
            attempt += 1
            try:
                return call()
            except RemoteUnavailableError:
                if attempt >= self.policy.attempts or self.stop.is_set():
                    raise
                self.retries += 1
                if self.clock.wait(self.stop, self.policy.delay_s(attempt, key=key)):
                    raise
