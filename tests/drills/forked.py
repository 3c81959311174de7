"""A forked process that may be killed: cheap, for what needs neither torch nor other threads."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable


def in_a_process(action: Callable[[], None], *, kill_after_s: float | None = None) -> int:
    """Run in a forked process; returns its status, negative for a signal."""
    child = os.fork()
    if not child:
        try:
            action()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a forked test process must end here
            traceback.print_exc()
            os._exit(1)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
