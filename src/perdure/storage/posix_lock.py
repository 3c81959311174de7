"""Locks of a directory on this machine: they fall with the process that holds them."""

from __future__ import annotations

import fcntl
import os


class PosixLock:
    """A held flock(2). It falls with the process: forked children give their copy up at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        if self in _held:
            _held.remove(self)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)

    def forget(self) -> None:
        """Close the inherited descriptor without unlocking what the parent holds."""
        os.close(self._descriptor)


_held: set[PosixLock] = set()


def _forget_locks() -> None:
    # A flock lives as long as any copy of its descriptor: a worker forked by a trainer that is
    # killed would keep the run busy for ever.
    while _held:
        _held.pop().forget()


os.register_at_fork(after_in_child=_forget_locks)


def try_lock(descriptor: int) -> bool:
    """Take an exclusive flock(2); False if another open file holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
