"""What each optimizer step of a consumer rank was made of, written down so that it can be trained again.

    LOG_DIR/steps/rank-R-from-V.bin     of the start that went on from version V; replaced if a run goes on from V again

A file is a sequence of records, each a length (4 bytes, little-endian), a crc32 of what follows (4 bytes), and one
msgpack message: `Start` first, then `Minibatch` and `Commit` as they happened. A record that is cut off ends the file:
what a killed run has written up to there counts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Union

import msgspec
import torch
from isal.isal_zlib import crc32

from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import RunFolderError
from zbgrpo.transport.messages import GroupHeader
from zbgrpo.transport.plan_stream import TrainGroup
from zbgrpo.transport.wire import payload_frame, payload_from_frame

_FRAME = struct.Struct("<II")
FORMAT = 2
"""Raised with every change that would make other code misread a file."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """What the trainer was made with, beside the configuration."""

    version: int
    """It has gone on from."""
    num_threads: int
    """Of torch: sums of floating-point numbers depend on it."""
    num_schedule_rows: int
    format: int = 1
    """Of the records, see `FORMAT`."""


class Minibatch(msgspec.Struct, frozen=True, tag="minibatch"):
    """This rank's groups of one minibatch, in order."""

    version: int
    """That they train; the step makes the next one."""
    temperatures: list[float]
    headers: list[GroupHeader]
    frames: list[bytes]

    def groups(self) -> list[TrainGroup]:
        """As the trainer got them. Raises `ProtocolError` if a payload contradicts its header."""
        pairs = zip(self.headers, self.frames, strict=True)
        return [TrainGroup(header, payload_from_frame(header, bytearray(frame))) for header, frame in pairs]


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """The step has happened."""

    version: int
    """That it made."""
    skipped: bool


Record = Union[Start, Minibatch, Commit]
_decoder = msgspec.msgpack.Decoder(Record)


class StepLog:
    """The writing end, for one start of one rank. What it is told of a step is on the disk's way when the step ends."""

    def __init__(self, path: Path, start: Start) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb")  # noqa: SIM115, closed by `close`
        self._write(start)

    def minibatch(self, version: int, groups: Sequence[TrainGroup], temperatures: Sequence[float]) -> None:
        """These groups train `version`."""
        headers = [group.header for group in groups]
        self._write(Minibatch(version, list(temperatures), headers, [payload_frame(g.payload) for g in groups]))

    def commit(self, version: int, skipped: bool) -> None:
        """The step that makes `version` has happened."""
        self._write(Commit(version, skipped))
        self._file.flush()

    def close(self) -> None:
        """Write what is left."""
        self._file.close()

    def _write(self, record: Record) -> None:
        content = msgspec.msgpack.encode(record)
        self._file.write(_FRAME.pack(len(content), crc32(content)))
        self._file.write(content)


def open_step_log(config: RunConfig, log_dir: Path, rank: int, version: int, num_schedule_rows: int) -> StepLog | None:
    """The log of a start that goes on from `version`; None unless it is asked for (observe.record_steps)."""
    if not config.observe.record_steps:
        return None
    return StepLog(
        step_log_path(log_dir, rank, version), Start(version, torch.get_num_threads(), num_schedule_rows, FORMAT)
    )


def step_log_path(log_dir: Path, rank: int, version: int) -> Path:
    """Where the log of a rank lies, of the start that went on from this version."""
    return log_dir / "steps" / f"rank-{rank}-from-{version}.bin"


def starts_of(log_dir: Path) -> list[int]:
    """Versions from which rank 0 has gone on with a log, ascending. Raises `RunFolderError` if there is none."""
    files = (log_dir / "steps").glob("rank-0-from-*.bin")
    versions = sorted(int(file.stem.rpartition("-")[2]) for file in files)
    if not versions:
        raise RunFolderError(f"{log_dir}: no steps are recorded there; start the run with observe.record_steps=true")
    return versions


def read_step_log(path: Path) -> Iterator[Record]:
    """The records of a file. Raises `RunFolderError` if it is missing or damaged, or if other code has written it."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{path}: {error.strerror}") from error
    position = 0
    while position + _FRAME.size <= len(content):
        length, crc = _FRAME.unpack_from(content, position)
        position += _FRAME.size
        record = content[position : position + length]
        position += length
        if len(record) < length:
            return  # cut off
        if crc32(record) != crc:
            raise RunFolderError(f"{path} is damaged: the checksum of the record before byte {position} is wrong")
        decoded = _decoder.decode(record)
        if isinstance(decoded, Start) and decoded.format != FORMAT:
            raise RunFolderError(
                f"{path}: recorded by a version of zbgrpo that writes format {decoded.format}; this one reads {FORMAT}"
            )
        yield decoded
