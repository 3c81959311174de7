"""Entry point of the ``perdure`` command: it can be stopped before anything heavy is imported."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


def main() -> None:
    """Run the command line. Until a command asks for more, Ctrl-C ends it at once and quietly."""
    signal.signal(signal.SIGINT, _quit)
    from perdure.cli.main import main as run

    run()


def _quit(signum: int, frame: object) -> None:
    """End the process. Nothing is lost by it: perdure may be killed at any instruction."""
    del signum, frame
    os._exit(INTERRUPTED)
