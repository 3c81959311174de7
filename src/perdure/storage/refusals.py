"""What the storage says when it refuses: one clear sentence with the way out, by errno."""

from __future__ import annotations

import errno
import os
from types import MappingProxyType

from perdure.core.errors import StorageError

TEMPORARY_PREFIX = ".tmp-"
"""Files whose name starts so are being written or were left by a crash; they do not count."""

_WAYS_OUT = MappingProxyType(
    {
        errno.ENOSPC: "free space on this file system, then resume; nothing acknowledged is lost",
        errno.EDQUOT: "free space inside your quota, then resume; nothing acknowledged is lost",
        errno.EACCES: "make the directory writable for this user or choose another run directory",
        errno.EPERM: "choose a run directory on a local POSIX file system (hard links, flock)",
        errno.EROFS: "remount the file system writable or choose another run directory",
        errno.EIO: "check the disk (kernel log, SMART), then resume; what was acknowledged is kept",
        errno.ENOENT: "create the directory, or check that nobody removed it",
        errno.ENOTDIR: "move the file that is in the way, or choose another directory",
        errno.EISDIR: "move the directory that is in the way",
        errno.ENOLCK: "choose a run directory on a local file system that supports flock",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
)


def refusal(action: str, *, where: str, error: OSError) -> StorageError:
    """The ``StorageError`` for an ``OSError`` met while doing ``action`` to the file ``where``."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    way_out = _WAYS_OUT.get(error.errno or 0, "fix the cause, then resume")
    return StorageError(f"cannot {action}: {reason}", where=where, way_out=way_out)


def abandoned(where: str) -> StorageError:
    """The error of a file that is used after one of its writes or syncs failed."""
    return StorageError(
        "the file was abandoned after a failed write or sync",
        where=where,
        rule="a failed sync is never retried, because the kernel may have dropped the bytes",
        way_out="append to a new file",
    )


def relative_parts(path: str) -> list[str]:
    """Split a storage path into names.

    Raises:
        ValueError: The path is absolute or leads out of the root.
    """
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if path.startswith("/") or ".." in parts:
        raise ValueError(f"a storage path is relative and stays below the root: {path!r}")
    return parts
