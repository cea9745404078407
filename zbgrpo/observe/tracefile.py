"""The trace of one process on the disk: JSON Lines, of bounded size, readable after a kill.

    trace/rank-2.jsonl       what was written last
    trace/rank-2.jsonl.old   what came before it

A line is a header (an object, one per start of the process and per file) or a record (an array). Every record begins
with its kind and its time, in seconds of the process's monotonic clock:

    ["P", t, seconds, {account: seconds}]     an interval of the time ledger, and who got how much of it
    ["X", t, seconds, track, name, args]      a span
    ["b", t, kind, key, args]                 something begins that may overlap with others of its kind,
    ["e", t, kind, key, args]                 and ends
    ["C", t, name, value]                     a counter has this value from now on
    ["i", t, name, args]                      an instant
    ["clock", t, offset, round trip]          distance to the hub's clock (`clockoffset`)
    ["lost", t, count]                        records that were thrown away because nobody could write them in time

When a file has half of the records that are allowed, it becomes the old one and replaces that; the header of a file
says how many records have been thrown away before it. So the newest half, at least, is always there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from zbgrpo.errors import RunFolderError
from zbgrpo.observe.jsonl import LineFile, encode_line

Record = list[Any]


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes, and how its clock is read."""

    process: str
    """For people: `producer 0`."""
    rank: int
    """-1: the hub."""
    role: str
    run: str
    """Id of the start of the run."""
    clock: str
    """`clockoffset.clock_name`."""
    monotonic: float
    wall: float
    """The same moment by both clocks, in seconds."""
    lost: int = 0
    """Records thrown away so far."""


class Segment(NamedTuple):
    """A header and the records behind it."""

    header: TraceHeader
    records: list[Record]


class TraceFile:
    """Appends to the trace of a process and keeps it below `limit` records. Used by one thread."""

    def __init__(self, path: str | Path, header: TraceHeader, limit: int) -> None:
        """Goes on behind what an earlier start has left. Raises OSError."""
        self.path = Path(path)
        self._half = max(1, limit // 2)
        self._num_records, self._lost = _count(self.path)
        self._header = header
        self._file = LineFile(self.path)
        self._write_header()

    def write(self, records: Sequence[tuple[Any, ...]]) -> None:
        """Append records, at once. Raises OSError."""
        begin = 0
        while begin < len(records):
            if self._num_records >= self._half:
                self._rotate()
            part = records[begin : begin + self._half - self._num_records]
            self._file.append(b"".join(map(encode_line, part)))
            self._num_records += len(part)
            begin += len(part)
        self._file.flush()

    def add_lost(self, count: int) -> None:
        """Records that never came here, for the headers to come."""
        self._lost += count

    def close(self) -> None:
        """May be called again."""
        self._file.close()

    def _write_header(self) -> None:
        self._file.append(encode_line(msgspec.structs.replace(self._header, lost=self._lost)))
        self._file.flush()

    def _rotate(self) -> None:
        self._file.close()
        old = old_path(self.path)
        self._lost += _count(old)[0]
        os.replace(self.path, old)
        self._num_records = 0
        self._file = LineFile(self.path)
        self._write_header()


def old_path(path: Path) -> Path:
    """Where the older half of a trace is."""
    return path.with_name(f"{path.name}.old")


def _count(path: Path) -> tuple[int, int]:
    """Records in a file, and those that its headers and records call lost; a file that is not there has none."""
    num_records = lost = 0
    if path.exists():
        for segment in read_segments(path):
            num_records += len(segment.records)
            lost = segment.header.lost + sum(record[2] for record in segment.records if record[0] == "lost")
    return num_records, lost


def read_segments(path: Path) -> Iterator[Segment]:
    """The parts of one file, in order. A torn last line is left out; another bad one raises RunFolderError, which names
    `file:line`."""
    decode = msgspec.json.Decoder().decode
    segment: Segment | None = None
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                value = decode(line)
                if isinstance(value, dict):
                    if segment is not None:
                        yield segment
                    segment = Segment(msgspec.convert(value, TraceHeader), [])
                    continue
                if segment is None or not isinstance(value[0], str) or not isinstance(value[1], (int, float)):
                    raise ValueError("not a record")
            except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, ValueError) as error:
                raise RunFolderError(f"{path}:{number}: not a line of a trace: {error}") from None
            segment.records.append(value)
    if segment is not None:
        yield segment
