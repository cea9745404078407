"""Event logs of the hub and of every rank: one JSON object per line, joined later by `zbgrpo check-ledger`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from zbgrpo.errors import RunFolderError
from zbgrpo.observe.jsonl import LineFile, encode_line, encode_lines, replace_file

logger = logging.getLogger(__name__)

_DECODER = msgspec.json.Decoder(dict[str, Any])


class EventLog:
    """Append-only log of events with one writing process. Thread safe.

    States: open -> closed. Events keep the order of the `append` calls. An event is safe from a kill of the process
    once `flush` has returned, or 64 KiB of later events exist; flush before telling others what an event says.

        log = EventLog(folder / "hub.jsonl")
        log.append("planned", step=3, uids=[(0, 17), (0, 4)])
        log.flush()   # {"kind":"planned","time":1760000000.1,"step":3,"uids":[[0,17],[0,4]]}
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        """Opens `path` for appending and creates its folder; a torn last line of an earlier process is cut."""
        self._clock = clock
        self._file = LineFile(path)

    @property
    def path(self) -> Path:
        return self._file.path

    def append(self, kind: str, **fields: Any) -> None:
        """Queue one event. `kind` and `time` (seconds since 1970, for people; nothing is ordered by it) come first.

        NumPy scalars, enums, tuples and named tuples are fine; a non-finite float is written as null.
        """
        self._file.append(encode_line({"kind": kind, "time": round(self._clock(), 6), **fields}))

    def extend(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Queue events that have their `kind` in them, all with the time of now; see `append`."""
        now = round(self._clock(), 6)
        self._file.append(encode_lines([{"kind": event["kind"], "time": now, **event} for event in events]))

    def flush(self) -> None:
        """Write what is queued, in one call."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close; may be called again."""
        self._file.close()


def iter_events(path: str | Path, on_torn: Callable[[str], None] | None = None) -> Iterator[dict[str, Any]]:
    """The events of a file, in order, without holding them all.

    A torn last line (without its newline, or not a JSON object) is dropped and reported, once, to `on_torn` (the
    module's logger when left out). Any other bad line raises RunFolderError with `file:line`.
    """
    for _, event in _parsed_lines(Path(path), on_torn or logger.warning):
        yield event


def read_events(path: str | Path, on_torn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """All events of a file; see `iter_events`."""
    return list(iter_events(path, on_torn))


def void_path(path: str | Path, suffix: str) -> Path:
    """Where `void_later` moves lines: `hub.jsonl` -> `hub.jsonl.void-7`, which no `*.jsonl` pattern matches."""
    path = Path(path)
    return path.with_name(f"{path.name}.{suffix}")


def void_later(path: str | Path, keep: Callable[[dict[str, Any]], bool], suffix: str) -> int:
    """Move the lines for which `keep` is false to `void_path(path, suffix)`; returns how many were moved.

    Kept lines stay byte for byte. Both files are replaced by rename, the void file first: a crash leaves every line in
    at least one of them, and calling again with the same suffix finishes the move without doubling lines. An existing
    void file of that suffix is added to. A file that does not exist has nothing to move. No writer may have it open.
    """
    path = Path(path)
    if not path.exists():
        return 0
    kept: list[bytes] = []
    moved: list[bytes] = []
    for line, event in _parsed_lines(path, logger.warning):
        (kept if keep(event) else moved).append(line)
    if not moved:
        return 0
    target = void_path(path, suffix)
    earlier = target.read_bytes() if target.exists() else b""
    voided = b"".join(moved)
    # An equal end means that a crash came between the two renames.
    if not earlier.endswith(voided):
        replace_file(target, earlier + voided)
    replace_file(path, b"".join(kept))
    return len(moved)


def _parsed_lines(path: Path, report: Callable[[str], None]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line as it is in the file, and what it says; the rules of `iter_events`."""
    for number, line, is_last in _numbered_lines(path):
        torn = not line.endswith(b"\n")
        if not torn:
            try:
                event = _DECODER.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if not is_last:
                    raise RunFolderError(f"{path}:{number}: not a JSON object: {error}") from None
                torn = True
        if torn:
            report(f"{path}:{number}: torn last line dropped ({len(line)} bytes)")
            return
        yield line, event


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(1-based number, line with its newline, whether it is the last)."""
    with open(path, "rb") as file:
        number = 0
        previous: bytes | None = None
        for line in file:
            if previous is not None:
                yield number, previous, False
            number += 1
            previous = line
        if previous is not None:
            yield number, previous, True
