"""JSON Lines files that survive a kill: whole lines per write, torn tails cut, replacement by rename."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np


def _plain(value: Any) -> Any:
    """What msgspec cannot encode by itself: NumPy scalars and arrays, zero-dimensional tensors, paths."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(item := getattr(value, "item", None)):
        return item()
    raise NotImplementedError(f"cannot write a value of type {type(value).__name__} as JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def encode_line(record: Any) -> bytes:
    """One JSON line with its newline. Non-finite floats become null. Raises TypeError for what JSON cannot hold."""
    try:
        return _ENCODER.encode(record) + b"\n"
    except NotImplementedError as error:
        raise TypeError(str(error)) from None


def encode_lines(records: Sequence[Any]) -> bytes:
    """The lines of all records, in order; see `encode_line`."""
    try:
        return _ENCODER.encode_lines(records)
    except NotImplementedError as error:
        raise TypeError(str(error)) from None


def replace_file(path: Path, data: bytes) -> None:
    """Make `path` hold exactly `data`, atomically and durably: a reader or a crash sees the old file or the new."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class LineFile:
    """Append-only file of lines with one writer. Thread safe.

    Lines wait in memory until `flush`, or until `buffer_bytes` of them wait; they then go out in one `write` call, so
    that a reader, or a file left by a kill, has whole lines except perhaps the last. A torn last line that an
    earlier process left is cut off on opening. Raises OSError when the file cannot be opened or written.
    """

    def __init__(self, path: str | Path, buffer_bytes: int = 1 << 16) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._buffer_bytes = buffer_bytes
        self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _cut_torn_line(self._descriptor)

    def append(self, line: bytes) -> None:
        """Queue one line, or several (each with its newline). Raises ValueError after `close`."""
        with self._lock:
            if self._descriptor is None:
                raise ValueError(f"{self.path} is closed")
            self._waiting += line
            if len(self._waiting) >= self._buffer_bytes:
                self._write(self._descriptor)

    def flush(self) -> None:
        """Hand every queued line to the operating system; they survive a kill of this process from then on."""
        with self._lock:
            if self._descriptor is not None:
                self._write(self._descriptor)

    def close(self) -> None:
        """Flush and close; may be called again."""
        with self._lock:
            if self._descriptor is not None:
                try:
                    self._write(self._descriptor)
                finally:
                    os.close(self._descriptor)
                    self._descriptor = None

    def _write(self, descriptor: int) -> None:
        # After a short write (full disk) the rest stays queued, so that a later flush goes on inside the same line.
        while self._waiting:
            written = os.write(descriptor, self._waiting)
            del self._waiting[:written]


def _cut_torn_line(descriptor: int) -> None:
    """Truncate the file to its last newline."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(0, end - (1 << 16))
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)
