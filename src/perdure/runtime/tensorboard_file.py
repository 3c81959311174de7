"""One TensorBoard event file. Readers drop what older files said (a session start at step 0)."""

# pyright: reportAttributeAccessIssue=false
# (generated protocol classes are created at import)

from __future__ import annotations

import io
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.core.clock import Clock

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


class TensorBoardFile:
    """Scalars keyed by global step. Values reach the file at :meth:`flush`.

    Everything is written in the caller's thread (TensorBoard's own writer has a thread whose
    failures nobody handles), so every method may raise ``OSError``.
    """

    def __init__(self, directory: Path, *, clock: Clock) -> None:
        # TensorBoard takes a quarter of a second to import; runs without it need not pay.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._clock = clock
        stem = f"events.out.tfevents.{int(clock.wall_s()):010d}"
        self._file = (directory / f"{stem}.{socket.gethostname()}.{os.getpid()}").open(
            "ab", buffering=0
        )
        self._queued = io.BytesIO()
        self._writer = RecordWriter(self._queued)
        self._write(self._event(0, file_version="brain.Event:2"))
        self._write(self._event(0, session_log=SessionLog(status=SessionLog.START)))

    def add(self, scalars: tuple[int, dict[str, float]]) -> None:
        """Queue the values of one global step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        global_step, values = scalars
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._write(self._event(global_step, summary=summary))

    def flush(self) -> None:
        """Hand what is queued to the operating system."""
        rest = memoryview(self._queued.getvalue())
        while rest:
            rest = rest[self._file.write(rest) :]
        self._queued.seek(0)
        self._queued.truncate()

    def close(self) -> None:
        """Close the file; what was not flushed is dropped."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())

    def _event(self, global_step: int, **content: object) -> Event:
        from tensorboard.compat.proto.event_pb2 import Event

        return Event(wall_time=self._clock.wall_s(), step=global_step, **content)
