"""An orderly stop: SIGTERM and Ctrl-C are requests that take effect where nothing is half done.

Generation is given up, since its finished sessions are in the log. An update that has begun is
finished, so that the state can be saved. A second signal stops at once: redo covers what is missing
then, as after a kill.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from perdure.core.errors import InterruptError, StoppedError

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


@dataclass(slots=True)
class StopRequest:
    """Whether and how one incarnation is asked to stop. Belongs to the thread of its event loop.

    Attributes:
        signum: The first signal that came; None as long as none has.
        at_once: A second one came: nothing more is saved.
        complete: The training is over, so that there is nothing left to stop.
    """

    signum: int | None = None
    at_once: bool = False
    complete: bool = False
    _task: asyncio.Task[object] | None = field(default=None, repr=False)
    _finishing: bool = False

    @contextmanager
    def listening(self) -> Generator[None]:
        """Signals are requests for the length of the body, which runs the event loop.

        Around the loop, not inside it: a second signal tears the loop down from the outside, and
        what stood before has to be put back after that.
        """
        before: dict[int, object] = {}
        try:
            for signum in _NAMES:
                before[signum] = signal.signal(signum, self._arrived)
        except ValueError:
            # Only the main thread may: somebody else looks after the signals then.
            before.clear()
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)  # pyright: ignore[reportArgumentType]

    def attach(self) -> None:
        """From here on a request cancels the current task; one that came before does so now."""
        self._task = asyncio.current_task()
        asyncio.get_running_loop().set_exception_handler(self._report)
        if self.signum is not None:
            self._cancel()

    @asynccontextmanager
    async def finishing(self) -> AsyncGenerator[None]:
        """The body is not cut short; a request that comes meanwhile takes effect behind it."""
        if self.signum is not None:
            # A cancellation that is on its way arrives here, where nothing has begun.
            await asyncio.sleep(0)
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
        if self.signum is not None:
            self._cancel()
            await asyncio.sleep(0)

    def error(self, run_dir: Path) -> StoppedError:
        """What the run ends with, after a signal has come."""
        assert self.signum is not None
        by = InterruptError if self.signum == signal.SIGINT else StoppedError
        return by(
            f"stopped by {_NAMES[signal.Signals(self.signum)]}; nothing acknowledged is lost",
            where=str(run_dir),
            way_out=f"go on with `perdure resume {run_dir}`",
        )

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.complete and self.signum is None:
            self.signum = signum
        elif self.signum is not None:
            self.at_once = True
            raise KeyboardInterrupt
        else:
            self.signum = signum
            if not self._finishing:
                self._cancel()

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What nobody has fetched is reported; a second signal strikes whichever task runs."""
        if not (self.at_once and isinstance(context.get("exception"), KeyboardInterrupt)):
            loop.default_exception_handler(context)

    def _cancel(self) -> None:
        if self._task is None or self._task.done():
            return
        self._task.cancel()
        # A loop that waits for input does not look at what a signal handler has done.
        self._task.get_loop().call_soon_threadsafe(lambda: None)
