"""Trying a remote tier out: does the store do what shipping a run relies on, and may we?"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.checkpoint.tier.objects import ObjectStore
from perdure.core.clock import Clock
from perdure.core.errors import StorageError
from perdure.storage.probe import Finding

_FOLDER = "probe"
_READS = 5


def probe_objects(objects: ObjectStore, *, clock: Clock) -> list[Finding]:
    """Check an object store with one object of its own, which is deleted again.

    Args:
        objects: The prefix that a run is to be shipped to, or is.
        clock: Measures.
    """
    probe = _Probe(objects, clock, f"{_FOLDER}/{uuid.uuid4().hex}")
    written = _guarded("remote write", probe.create)
    if written.grade == "failed":
        return [written]
    return [
        written,
        _guarded("remote read", probe.read),
        _guarded("remote list", probe.list),
        _guarded("remote swap", probe.swap),
        _guarded("remote delete", probe.delete),
    ]


def _guarded(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "ok", check())
    except (StorageError, FileNotFoundError) as error:
        return Finding(name, "failed", str(error))


@dataclass(slots=True)
class _Probe:
    """One object; every check says what it has seen, or raises ``StorageError``."""

    objects: ObjectStore
    clock: Clock
    key: str
    content: bytes = field(default=b"one", init=False)

    def create(self) -> str:
        started_s = self.clock.monotonic_s()
        self._require(
            self.objects.create(self.key, self.content), "a new object was taken for an old one"
        )
        took_s = self.clock.monotonic_s() - started_s
        self._require(
            not self.objects.create(self.key, b"two"), "an object that is there was overwritten"
        )
        return f"a new object in {took_s * 1e3:.0f} ms; one that is there is not overwritten"

    def read(self) -> str:
        started_s = self.clock.monotonic_s()
        for _ in range(_READS):
            self._require_content(self.objects.read(self.key))
        return (
            f"what was written, in {(self.clock.monotonic_s() - started_s) / _READS * 1e3:.0f} ms"
        )

    def list(self) -> str:
        found = self.objects.list(_FOLDER)
        self._require(found.get(self.key) == len(self.content), "the new object is not listed")
        return "the new object is there"

    def swap(self) -> str:
        _, old = self.objects.read_tagged(self.key)
        new = self.objects.swap(self.key, b"three", expected=old)
        self._require(new is not None, "an unchanged object could not be replaced")
        self.content = b"three"
        stale = self.objects.swap(self.key, b"four", expected=old)
        self._require(stale is None, "an object that had changed was replaced")
        self._require_content(self.objects.read(self.key))
        return "replaced if it is unchanged, and only then"

    def delete(self) -> str:
        self.objects.delete([self.key])
        try:
            self.objects.read(self.key)
        except FileNotFoundError:
            return "gone at once"
        raise self._broken("the object is still there")

    def _require_content(self, found: bytes) -> None:
        self._require(found == self.content, "another content comes back than was written")

    def _require(self, kept: bool, what: str) -> None:
        if not kept:
            raise self._broken(what)

    def _broken(self, what: str) -> StorageError:
        return StorageError(
            what,
            where=self.key,
            rule="the pointer of a run is replaced only by who knows its present state",
            way_out="use a store with conditional writes (If-None-Match, If-Match)",
        )
