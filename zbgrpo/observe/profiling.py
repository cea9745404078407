"""A profile of one rank's work with torch's profiler, as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

MAX_DECODE_STEPS = 200
"""Decode steps after which the profile of a producer ends, so that its file stays small."""


class Profiler:
    """Profiles what the calling thread does during `num_steps` versions, after the first one, and writes it to `path`.

    States: waiting -> recording -> over; over from the beginning where profiling is off.

    The loop calls `advance` with its version before each unit of work: a consumer before each minibatch, a producer
    before each decode step. The first version it works at is warm-up. Recording begins at the first call with
    another version and ends, the file being written, at the call with the `num_steps`-th version after that one, or at
    the call after `max_calls` recorded units of work, whichever comes first. Versions may be skipped: a producer may
    apply 3 after 1. Below 0 is no version yet. Each recorded version is a span `version N` of the trace.

    Example, a consumer that starts at version 0 with num_steps=2, one call per step:

        advance(0)   waiting: step 1 is warm-up
        advance(1)   recording
        advance(2)
        advance(3)   over: the file has steps 2 and 3
    """

    def __init__(self, path: str | Path, enabled: bool, num_steps: int, max_calls: int | None = None) -> None:
        """`path` ends in .json.gz; its folder is made when the file is written. `max_calls` None: no such limit."""
        self.path = Path(path)
        self._max_calls = max_calls
        self._state: Literal["waiting", "recording", "over"] = "waiting" if enabled else "over"
        self._version = -1
        self._versions_left = num_steps
        self._num_calls = 0
        self._profile: Any = None
        self._span: Any = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is going to be recorded any more."""
        return self._state == "over"

    def advance(self, version: int) -> None:
        """The next unit of work is done with `version`. Costs one comparison once the profile is over."""
        if self._state == "over" or version < 0:
            return
        last, self._version = self._version, version
        if self._state == "waiting":
            if last not in (-1, version):
                self._start(version)
        elif version != last:
            self._versions_left -= 1
            if self._versions_left:
                self._open_span(version)
        if self._state == "recording":
            if not self._versions_left or self._num_calls == self._max_calls:
                self.close()
            self._num_calls += 1

    def close(self) -> None:
        """End: write what has been recorded, if anything; may be called again.

        The file appears as a whole or not at all. One that cannot be written is a warning in the log: a run
        does not end for want of its profile.
        """
        recording, self._state = self._state == "recording", "over"
        if not recording:
            return
        started = time.monotonic()
        self._close_span()
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            self._write(profile)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's own writer
            logger.warning("no profile is written: %s: %s", self.path, error)
            return
        logger.info("profile written to %s in %.1f s", self.path, time.monotonic() - started)

    def _start(self, version: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._state = "recording"
        self._open_span(version)

    def _open_span(self, version: int) -> None:
        from torch.profiler import record_function

        self._close_span()
        self._span = record_function(f"version {version}")
        self._span.__enter__()

    def _close_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def _write(self, profile: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        plain = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}.json")
        packed = plain.with_suffix(".gz")
        try:
            profile.export_chrome_trace(str(plain))
            with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.replace(packed, self.path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
