"""Scalars as TensorBoard event files, through tensorboard's own writer: neither torch nor TensorFlow is needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

_FLUSH_SECONDS = 10


class TensorBoardSink:
    """Writes scalars on a background thread. The constructor raises ImportError where tensorboard is not installed."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Later steps of an earlier life of the run, from `first_step` on, are declared void."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_SECONDS)
        # TensorBoard drops what it has read of these steps when it meets a START with a step.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)),
        )

    def close(self) -> None:
        self._writer.close()
