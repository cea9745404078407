"""What a process does when: spans, counters and instants, written beside the work for `zbgrpo report` and Perfetto.

Whoever does something appends one tuple to a queue, in a fraction of a microsecond, from any thread; a thread of the
trace writes what has gathered twice a second. A trace never ends a run and never makes it wait: what cannot be written
is thrown away and counted. After a kill the last half second is missing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from zbgrpo.ledger.ledger import Ledger
from zbgrpo.observe.clockoffset import ClockOffset, Offset, clock_name
from zbgrpo.observe.timeledger import Interval
from zbgrpo.observe.tracefile import TraceFile, TraceHeader

logger = logging.getLogger(__name__)

WORK = "work"
"""Track of what the main thread of a rank does."""
MAX_WAITING = 1 << 16
"""Records that may wait to be written; a disk that is slower than that costs records, not memory."""
_FLUSH_SECONDS = 0.5
_SHORT_SECONDS = 1e-3
_LONG_SECONDS = 1.0


class Trace:
    """The trace of one process. States: waiting (records gather) -> open (they are written) -> closed.

    With `enabled` false nothing is kept, and every call returns at once. All methods may be called from any thread.

        trace = Trace()
        trace.open(folder / "rank-0.jsonl", "consumer 0", 0, "consumer", run_id, 200_000)
        with trace.span("commit", step=3):
            ...
        trace.close()
    """

    def __init__(
        self,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`wall_clock` stamps the file once, for people; everything is ordered by `clock`."""
        self.enabled = enabled
        self._clock, self._wall_clock = clock, wall_clock
        self._records: deque[tuple[Any, ...]] = deque()
        self._counters: dict[str, float] = {}
        self._intervals: deque[Interval] = deque(maxlen=MAX_WAITING)  # of the time ledger
        self._accounts = _Accounts()
        self._num_lost = 0
        self._hub_clock: ClockOffset | None = None
        self._noted: Offset | None = None
        self._file: TraceFile | None = None
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)

    def open(
        self,
        path: str | Path,
        process: str,
        rank: int,
        role: str,
        run: str,
        limit: int,
        hub_clock: ClockOffset | None = None,
    ) -> None:
        """Write to `path` from now on, what has gathered first; at most `limit` records stay in its two files.

        `hub_clock` measures the distance to the hub's clock, where this is not the hub. A file that cannot be opened
        is one warning, and no trace.
        """
        if not self.enabled or self._file is not None:
            return
        header = TraceHeader(
            process=process,
            rank=rank,
            role=role,
            run=run,
            clock=clock_name(),
            monotonic=self._clock(),
            wall=self._wall_clock(),
        )
        self._hub_clock = hub_clock
        try:
            self._file = TraceFile(path, header, limit)
        except OSError as error:
            self._give_up(error)
            return
        self._thread.start()

    # ------------------------------------------------------------------------------------------ what happens

    @property
    def on_span(self) -> Callable[[Interval], None] | None:
        """For the time ledger of this rank: takes its intervals; None when there is no trace."""
        # Nothing but an append in the thread whose time it is; what belongs together is found by the writer.
        return self._intervals.append if self.enabled else None

    def span(self, name: str, track: str = WORK, **args: Any) -> AbstractContextManager[dict[str, Any]]:
        """Context manager: what happens inside is a span; its value is `args`, which may be added to until the end."""
        return _Span(self, track, name, args) if self.enabled else contextlib.nullcontext(args)

    def ended(self, name: str, seconds: float, track: str = WORK, **args: Any) -> None:
        """A span that has taken `seconds` ends now."""
        if self.enabled:
            self._add(("X", self._clock() - seconds, seconds, track, name, args))

    def begin(self, kind: str, key: int, **args: Any) -> None:
        """Something begins that overlaps with others of its kind; `key` is its number among them in this process."""
        if self.enabled:
            self._add(("b", self._clock(), kind, key, args))

    def end(self, kind: str, key: int, **args: Any) -> None:
        """What began under this name ends; nothing happens where nothing did."""
        if self.enabled:
            self._add(("e", self._clock(), kind, key, args))

    def counter(self, name: str, value: float) -> None:
        """A number has this value from now on; one that has not changed costs no record."""
        if self.enabled and self._counters.get(name) != value:
            self._counters[name] = value
            self._add(("C", self._clock(), name, value))

    def instant(self, name: str, **args: Any) -> None:
        """Something without a length."""
        if self.enabled:
            self._add(("i", self._clock(), name, args))

    def _add(self, record: tuple[Any, ...]) -> None:
        # A deque, because appending and taking are atomic each: no lock between the work and the writer.
        if len(self._records) < MAX_WAITING:
            self._records.append(record)
        else:
            self._num_lost += 1

    # ------------------------------------------------------------------------------------------ writing

    def flush(self) -> None:
        """Write what has gathered; returns when the operating system has it."""
        with self._writing:
            if self._file is None or not self.enabled:
                return
            records = [self._records.popleft() for _ in range(len(self._records))]
            for _ in range(len(self._intervals)):
                self._num_lost += self._accounts.add(self._intervals.popleft(), records)
            if self._closing.is_set():
                self._accounts.end(records)
            offset = None if self._hub_clock is None else self._hub_clock.best
            if offset is not None and offset != self._noted:
                self._noted = offset
                records.append(("clock", *offset))
            lost, self._num_lost = self._num_lost, 0
            if lost:
                records.append(("lost", self._clock(), lost))
            try:
                self._file.write(records)
            except OSError as error:
                self._give_up(error)
            self._file.add_lost(lost)

    def close(self) -> None:
        """Write what is left and end; may be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        self.flush()
        self.enabled = False
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._closing.wait(_FLUSH_SECONDS):
            self.flush()

    def _give_up(self, error: OSError) -> None:
        self.enabled = False
        self._records.clear()
        logger.warning("no trace is written from here on: %s", error)


class _Accounts:
    """Makes records of the time ledger's intervals: what is short joins its neighbours.

    A record has one kind (account, share, account of the rest), which all of it is but a millisecond or a fiftieth of
    its length. What each account got is in it, so that sums stay what they are. No record is longer than a second,
    unless it is a single interval, so that a kill costs no more.
    """

    def __init__(self) -> None:
        self._kind: tuple[str, float, str] | None = None
        self._start = self._end = 0.0
        self._foreign = 0.0  # seconds that are not of the kind
        self._seconds: dict[str, float] = {}

    def add(self, interval: Interval, records: list[tuple[Any, ...]]) -> bool:
        """Take the next one; whether others before it are missing."""
        name, start, end, share, rest = interval
        kind, length = (name, share, rest), end - start
        is_gap = self._kind is not None and start > self._end
        so_far = self._end - self._start
        if is_gap or self._kind is None or so_far + length > _LONG_SECONDS:
            self._begin(kind, start, records)
        elif kind != self._kind:
            few = max(_SHORT_SECONDS, (so_far + length) / 50)
            if self._foreign + length <= few:
                self._foreign += length
            elif so_far <= _SHORT_SECONDS:  # all of it becomes what is foreign to this one
                self._kind, self._foreign = kind, so_far
            else:
                self._begin(kind, start, records)
        self._end = end
        self._seconds[name] = self._seconds.get(name, 0.0) + length * share
        if share < 1.0:
            self._seconds[rest] = self._seconds.get(rest, 0.0) + length * (1.0 - share)
        return is_gap

    def end(self, records: list[tuple[Any, ...]]) -> None:
        """Close the record that is open."""
        if self._kind is not None:
            seconds = {name: round(value, 7) for name, value in self._seconds.items()}
            records.append(("P", self._start, round(self._end - self._start, 7), seconds))
        self._kind = None

    def _begin(self, kind: tuple[str, float, str], start: float, records: list[tuple[Any, ...]]) -> None:
        self.end(records)
        self._kind, self._start, self._end, self._foreign, self._seconds = kind, start, start, 0.0, {}


class _Span:
    __slots__ = ("_args", "_name", "_start", "_trace", "_track")

    def __init__(self, trace: Trace, track: str, name: str, args: dict[str, Any]) -> None:
        self._trace, self._track, self._name, self._args = trace, track, name, args

    def __enter__(self) -> dict[str, Any]:
        self._start = self._trace._clock()
        return self._args

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        start, trace = self._start, self._trace
        trace._add(("X", start, trace._clock() - start, self._track, self._name, self._args))


class HubTrace:
    """The hub's trace: what its ledger's events say, turn by turn."""

    def __init__(self, events_path: str, run: str, limit: int) -> None:
        """`limit` 0: no trace. It is written beside the folder of the event log."""
        self.trace = Trace(limit > 0)
        self.trace.open(Path(events_path).parents[1] / "trace" / "hub.jsonl", "hub", -1, "hub", run, limit)

    def evaluation(self, version: int) -> None:
        """The evaluation of this version begins."""
        self.trace.begin("evaluation", version, version=version)

    def turn(self, ledger: Ledger) -> None:
        """The events of one turn of the hub's loop, and the ledger as they have left it."""
        trace = self.trace
        if not trace.enabled:
            return
        for event in ledger.events:
            kind = event["kind"]
            if kind == "buffered":
                trace.begin("buffered", event["lease"], uid=event["uid"], tokens=event["tokens"])
            elif kind == "plan":
                for lease in (lease for rank in event["ranks"] for lease in rank):
                    trace.end("buffered", lease)
                    trace.begin("planned", lease, step=event["version"])
                if not event["ranks"]:
                    trace.instant(f"plan {event['entry']}", version=event["version"])
            elif kind in ("consumed", "dropped"):
                trace.end("planned", event["lease"], outcome=kind)
                trace.end("buffered", event["lease"], outcome=kind)
            elif kind == "evaluated":
                trace.end("evaluation", event["version"], rows=event["rows"])
            elif kind in ("commit", "applied"):
                trace.instant(kind, **{key: event[key] for key in ("version", "producer") if key in event})
        trace.counter("leased", len(ledger.leased))
        trace.counter("buffered", len(ledger.buffered))
        trace.counter("planned", len(ledger.planned))

    def close(self) -> None:
        """Write what is left."""
        self.trace.close()
