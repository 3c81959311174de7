"""One TensorBoard event file. Readers drop what older files said (a session start at step 0)."""

# pyright: reportAttributeAccessIssue=false
# (generated protocol classes are created at import)

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from perdure.core.clock import Clock

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


class TensorBoardFile:
    """Scalars keyed by global step. Values reach the file at :meth:`flush`."""

    def __init__(self, directory: Path, *, clock: Clock) -> None:
        # TensorBoard takes a quarter of a second to import; runs without it need not pay.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._clock = clock
        self._writer = EventFileWriter(str(directory))
        self._writer.add_event(self._event(0, session_log=SessionLog(status=SessionLog.START)))

    def add(self, scalars: tuple[int, dict[str, float]]) -> None:
        """Queue the values of one global step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        global_step, values = scalars
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._writer.add_event(self._event(global_step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _event(self, global_step: int, **content: object) -> Event:
        from tensorboard.compat.proto.event_pb2 import Event

        return Event(wall_time=self._clock.wall_s(), step=global_step, **content)
