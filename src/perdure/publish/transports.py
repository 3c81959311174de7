"""How weights reach engines: shared by reference inside one process, or through one file for all.

A transport lays a version out once; every engine takes it from there. What is loaded is verified by
the publication, whatever the transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import WeightFile, Weights
from perdure.core.storage_api import Storage
from perdure.models.weight_files import write_weights
from perdure.storage import PosixStorage


class WeightTransport(Protocol):
    """Makes the weights of one version reachable for engines. One caller at a time."""

    async def lay_out(
        self, version: PolicyVersion, weights: Mapping[str, Any], *, incarnation: IncarnationNumber
    ) -> Weights:
        """What engines are to be given. Raises ``StorageError`` if there is no room for it."""
        ...

    async def drop_older(self) -> None:
        """Only what was laid out last is asked for from now on."""
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...


class InProcessTransport:
    """For engines in the learner's process: they copy its weights, which are laid out already.

    The learner goes on to change them. An engine that comes between two publications takes what it
    finds, has the wrong digest, and waits for the next.
    """

    async def lay_out(
        self, version: PolicyVersion, weights: Mapping[str, Any], *, incarnation: IncarnationNumber
    ) -> Weights:
        del version, incarnation
        return weights

    async def drop_older(self) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        """Nothing is held."""


class FileTransport:
    """One file for all engines, in memory (``/dev/shm``) or on a file system they share.

    There is one file, and two while a version is published. What a process that died has left is
    removed by the next one with the same directory.

    Args:
        directory: Of this run alone; created, and removed by :meth:`close`.
        storage: Of the directory's parent.
    """

    def __init__(self, directory: Path, *, storage: Storage | None = None) -> None:
        self._directory = directory.absolute()
        self._storage = storage or PosixStorage(self._directory.parent)
        self._newest = ""
        self._count = 0

    async def lay_out(
        self, version: PolicyVersion, weights: Mapping[str, Any], *, incarnation: IncarnationNumber
    ) -> Weights:
        self._count += 1
        name = f"weights-{incarnation}-{version}-{self._count}"
        checksum = await asyncio.to_thread(self._write, name, weights)
        self._newest = name
        return WeightFile(str(self._directory / name), checksum)

    def _write(self, name: str, weights: Mapping[str, Any]) -> str:
        self._storage.make_dirs(self._directory.name)
        self._drop_all_but(self._newest)
        return write_weights(self._storage, f"{self._directory.name}/{name}", weights)

    async def drop_older(self) -> None:
        await asyncio.to_thread(self._drop_all_but, self._newest)

    def _drop_all_but(self, kept: str) -> None:
        for name in self._storage.list(self._directory.name):
            if name != kept:
                self._storage.remove(f"{self._directory.name}/{name}")

    async def close(self) -> None:
        await asyncio.to_thread(self._storage.remove, self._directory.name)
