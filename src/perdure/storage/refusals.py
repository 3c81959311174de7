"""What the storage says when it refuses: one clear sentence with the way out, by errno."""

from __future__ import annotations

import errno
import os
import re
from types import MappingProxyType

from perdure.core.errors import StorageError

TEMPORARY_PREFIX = ".tmp-"
"""Files whose name starts so are being written or were left by a crash; they do not count."""

_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + r"[0-9a-f]{16}-.")

_GO_ON = ", then resume; nothing acknowledged is lost"

_WAYS_OUT = MappingProxyType(
    {
        errno.ENOSPC: f"free space on this file system{_GO_ON}",
        errno.EDQUOT: f"free space inside your quota{_GO_ON}",
        errno.EACCES: "make the directory writable for this user or choose another run directory",
        errno.EPERM: "choose a run directory on a local POSIX file system (hard links, flock)",
        errno.EROFS: "remount the file system writable or choose another run directory",
        errno.EIO: f"check the disk (kernel log, SMART){_GO_ON}",
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
    way_out = _WAYS_OUT.get(error.errno or 0, f"fix the cause{_GO_ON}")
    return StorageError(f"cannot {action}: {reason}", where=where, way_out=way_out)


def before_the_run(error: StorageError) -> StorageError:
    """The same refusal met while a run was being created, when there is nothing to resume yet."""
    return StorageError(
        error.what,
        where=error.where,
        rule="the run does not exist yet, so nothing is lost",
        way_out=f"{error.way_out.removesuffix(_GO_ON)}, then start it again",
    )


def abandoned(where: str) -> StorageError:
    """The error of a file that is used after one of its writes or syncs failed."""
    return StorageError(
        "the file was abandoned after a failed write or sync",
        where=where,
        rule="a failed sync is never retried, because the kernel may have dropped the bytes",
        way_out="append to a new file",
    )


def temporary_name(number: int, name: str) -> str:
    """Name of the temporary file number ``number`` (64 bits) beside the file ``name``."""
    return f"{TEMPORARY_PREFIX}{number:016x}-{name}"


def is_temporary(name: str) -> bool:
    """Whether :func:`temporary_name` made this name: that of a storage's own temporary file."""
    return _TEMPORARY.match(name) is not None


def relative_parts(path: str) -> list[str]:
    """Split a storage path into names.

    Raises:
        ValueError: The path is absolute or leads out of the root.
    """
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if path.startswith("/") or ".." in parts:
        raise ValueError(f"a storage path is relative and stays below the root: {path!r}")
    return parts
