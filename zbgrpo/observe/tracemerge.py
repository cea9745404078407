"""The traces of all processes of a run on one clock, and as one file for Perfetto (ui.perfetto.dev, chrome://tracing)."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zbgrpo.errors import RunFolderError
from zbgrpo.observe.clockoffset import Offset, best_offsets, offset_at
from zbgrpo.observe.jsonl import encode_line
from zbgrpo.observe.tracefile import Record, Segment, TraceHeader, old_path, read_segments

TRACE_NAME = "trace.json"
ACCOUNTS_TRACK = "time"
"""Track of the time ledger's intervals."""

_Line = tuple[float, bytes]


class Life(NamedTuple):
    """What one process did in one start of the run, in order of time."""

    header: TraceHeader
    records: list[Record]
    """As in the file, with seconds since 1970 by the hub's clock in place of the monotonic ones."""
    clock: str
    """How its clock was set to the hub's: `same` (it is the same one), `measured`, or `wall` (by the time of day)."""
    error_seconds: float
    """Most that a measured offset can be wrong; 0 for the same clock, infinite by the time of day."""
    num_lost: int
    """Records of this process that were thrown away, over all starts so far."""


def read_trace(log_dir: str | Path) -> list[Life]:
    """All traces of a log folder, the hub's first, then by rank, each by start; empty where there are none.

    Raises RunFolderError, with `file:line`, for a line that is not one of a trace; a torn last line is left out.
    """
    lives: list[tuple[TraceHeader, list[Record], int]] = []
    for path in sorted((Path(log_dir) / "trace").glob("*.jsonl")):
        old = old_path(path)
        lives += _joined([*(read_segments(old) if old.exists() else ()), *read_segments(path)])
    hubs = {header.run: header for header, _, _ in lives if header.role == "hub"}
    done = [_on_hub_clock(header, records, lost, hubs.get(header.run)) for header, records, lost in lives]
    return sorted(done, key=lambda life: (life.header.rank, life.header.wall))


def _joined(segments: Iterable[Segment]) -> Iterator[tuple[TraceHeader, list[Record], int]]:
    """One entry per start: a file may have begun anew in the middle of one."""
    header: TraceHeader | None = None
    records: list[Record] = []
    lost = 0
    for segment in segments:
        if header is not None and segment.header.run != header.run:
            yield header, records, lost
            records = []
        header, lost = segment.header, segment.header.lost
        records += segment.records
        lost += sum(record[2] for record in segment.records if record[0] == "lost")
    if header is not None:
        yield header, records, lost


def _on_hub_clock(header: TraceHeader, records: list[Record], lost: int, hub: TraceHeader | None) -> Life:
    best = best_offsets(Offset(*record[1:4]) for record in records if record[0] == "clock")
    if hub is not None and header.clock and header.clock == hub.clock:
        how, error, base = "same", 0.0, hub.wall - hub.monotonic
    elif hub is not None and best:
        how, error, base = "measured", max(offset.round_trip for offset in best) / 2, hub.wall - hub.monotonic
    else:
        how, error, base = "wall", float("inf"), header.wall - header.monotonic
    moved: list[Record] = []
    for record in records:
        kind, at, *rest = record
        if kind not in ("clock", "lost"):
            shift = offset_at(best, at) if how == "measured" else 0.0
            moved.append([kind, at + shift + base, *rest])
    moved.sort(key=lambda record: record[1])
    return Life(header, moved, how, error, lost)


def merge_trace(log_dir: str | Path, lives: Sequence[Life] | None = None) -> Path:
    """Write the traces of a run as one Chrome trace, `trace/trace.json`, and return its path. `lives`: what
    `read_trace` has read, where it has been called already.

    Every process has a row for each of its tracks; times are microseconds since the first record. Events are in order
    of time. The file appears as a whole or not at all. Raises RunFolderError where there is no trace.
    """
    lives = read_trace(log_dir) if lives is None else lives
    if not lives:
        raise RunFolderError(f"{Path(log_dir) / 'trace'}: no trace; observe.trace was off")
    path = Path(log_dir) / "trace" / TRACE_NAME
    first = min((life.records[0][1] for life in lives if life.records), default=0.0)
    rows = _Rows()
    lines = list(heapq.merge(*(sorted(_events(life, first, rows)) for life in lives)))
    temporary = path.with_name(f"{TRACE_NAME}.tmp-{os.getpid()}")
    notes = {
        "began": first,
        "lost": {life.header.process: life.num_lost for life in lives if life.num_lost},
        "clocks": {life.header.process: life.clock for life in lives},
    }
    try:
        with open(temporary, "wb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":' + encode_line(notes).rstrip() + b',"traceEvents":[\n')
            file.write(b",\n".join([*rows.names(lives), *(line for _, line in lines)]))
            file.write(b"\n]}\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


class _Rows:
    """Numbers of processes and tracks in the Chrome trace."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[int, str], int] = {}

    def track(self, process: int, name: str) -> int:
        """The number of a track; the time ledger's is the first of its process."""
        key = (process, name)
        if key not in self._tracks:
            self._tracks[key] = 0 if name == ACCOUNTS_TRACK else 1 + sum(p == process for p, _ in self._tracks)
        return self._tracks[key]

    def names(self, lives: Sequence[Life]) -> Iterator[bytes]:
        """Metadata events."""
        headers = {life.header.rank: life.header for life in lives}
        for rank, header in headers.items():
            title = header.process if rank < 0 else f"rank {rank}: {header.process}"
            for name, args in (
                ("process_name", {"name": title}),
                ("process_labels", {"labels": header.role}),
                ("process_sort_index", {"sort_index": rank}),
            ):
                yield _line({"ph": "M", "pid": _pid(rank), "tid": 0, "name": name, "args": args})
        for (process, track), number in self._tracks.items():
            for name, args in (("thread_name", {"name": track}), ("thread_sort_index", {"sort_index": number})):
                yield _line({"ph": "M", "pid": process, "tid": number, "name": name, "args": args})


def _events(life: Life, first: float, rows: _Rows) -> Iterator[_Line]:
    """The events of one process as lines of JSON, each with its time."""
    pid = _pid(life.header.rank)
    opened: dict[tuple[str, Any], dict[str, Any]] = {}

    def line(at: float, event: dict[str, Any]) -> _Line:
        stamp = round((at - first) * 1e6, 3)
        return stamp, _line({"pid": pid, "ts": stamp, **event})

    def async_event(phase: str, kind: str, key: Any, args: dict[str, Any]) -> dict[str, Any]:
        name = " ".join([kind, ":".join(map(str, args["uid"]))]) if "uid" in args else kind
        identity = f"{life.header.run[:8]}.{pid}.{kind}.{key}"
        return {"ph": phase, "tid": 0, "cat": kind, "name": name, "id": identity, "args": args}

    for record in life.records:
        kind, at, *rest = record
        if kind == "P":
            seconds, accounts = rest
            tid, duration, name = (
                rows.track(pid, ACCOUNTS_TRACK),
                round(seconds * 1e6, 3),
                max(accounts, key=accounts.get),
            )
            shares = {account: round(part / seconds, 4) for account, part in accounts.items()}
            args = shares if len(shares) > 1 else {}
            yield line(at, {"ph": "X", "tid": tid, "cat": "time", "name": name, "dur": duration, "args": args})
        elif kind == "X":
            seconds, track, name, args = rest
            tid, duration = rows.track(pid, track), round(seconds * 1e6, 3)
            yield line(at, {"ph": "X", "tid": tid, "cat": track, "name": name, "dur": duration, "args": args})
        elif kind == "C":
            yield line(at, {"ph": "C", "tid": 0, "name": rest[0], "args": {"value": rest[1]}})
        elif kind == "i":
            yield line(at, {"ph": "i", "tid": 0, "s": "p", "name": rest[0], "args": rest[1]})
        elif kind == "b" and (rest[0], rest[1]) not in opened:
            opened[rest[0], rest[1]] = rest[2]
            yield line(at, async_event("b", *rest))
        elif kind == "e" and (begun := opened.pop((rest[0], rest[1]), None)) is not None:
            yield line(at, async_event("e", rest[0], rest[1], {**begun, **rest[2]}))
    # What had not ended when the process did ends with it, for there is nothing to show without an end.
    for (kind, key), args in opened.items():
        yield line(life.records[-1][1], async_event("e", kind, key, {**args, "unfinished": True}))


def _pid(rank: int) -> int:
    return rank + 2  # the hub, which has no rank, is 1


def _line(event: dict[str, Any]) -> bytes:
    return encode_line(event).rstrip(b"\n")
