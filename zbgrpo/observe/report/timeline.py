"""The trace of a run, made small enough for a page: rows of intervals in whole microseconds.

What is too much is grouped: all intervals within a step of time become one, with what each account got of the step, so
that every sum stays what it was.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zbgrpo.observe.timeledger import ACCOUNTS
from zbgrpo.observe.trace import WORK
from zbgrpo.observe.tracemerge import Life

MAX_INTERVALS = 120_000
"""Of the time ledgers, on the whole page: about two megabytes."""
MAX_SPANS = 40_000
MAX_POINTS = 2_000
"""Of one counter."""
EVALUATION = "evaluation"

_PLACE_OF = {name: number for number, name in enumerate(ACCOUNTS)}
_NUMBERED_BY = ("step", "version")


class Interval(NamedTuple):
    """Part of a rank's time, and how much of it each account got (by its place in ACCOUNTS), in seconds."""

    begin: float
    seconds: float
    accounts: dict[int, float]


class Span(NamedTuple):
    """Something that a rank did, in seconds; `number` is its step or version, -1 for none."""

    begin: float
    seconds: float
    name: str
    number: int


def timelines(trace: Sequence[Life]) -> list[dict[str, Any]]:
    """One timeline per start of the run, in order; empty without a trace.

    Of a row, `accounts` are flat: gap before the interval, length, number of accounts, and for each of them its place
    and its share in thousandths. So are the spans of each track: gap, length, index of the name, number. Times are
    in microseconds; a gap is negative where spans overlap.
    """
    by_run: dict[str, list[Life]] = defaultdict(list)
    for life in trace:
        if life.records:
            by_run[life.header.run].append(life)
    starts = sorted(by_run.values(), key=lambda lives: min(life.records[0][1] for life in lives))
    num_rows = sum(len(lives) for lives in starts)
    return [_timeline(lives, MAX_INTERVALS // num_rows, MAX_SPANS // num_rows) for lives in starts]


def account_seconds(life: Life) -> dict[str, float]:
    """Seconds by account of one process, from its trace; all accounts are there."""
    seconds = dict.fromkeys(ACCOUNTS, 0.0)
    for interval in _intervals(life):
        for place, part in interval.accounts.items():
            seconds[ACCOUNTS[place]] += part
    return seconds


def _timeline(lives: Sequence[Life], max_intervals: int, max_spans: int) -> dict[str, Any]:
    first = min(life.records[0][1] for life in lives)
    last = max(_end(life) for life in lives)
    names: dict[str, int] = {}
    rows = []
    for life in lives:
        if life.header.role == "hub":
            continue
        intervals, step_seconds = grouped(list(_intervals(life)), max_intervals)
        tracks, num_left_out = _tracks(life, first, names, max_spans)
        rows.append(
            {
                "rank": life.header.rank,
                "name": life.header.process,
                "role": life.header.role,
                "accounts": _flat_intervals(intervals, first),
                "grouped_ms": round(step_seconds * 1e3, 3),
                "tracks": tracks,
                "spans_left_out": num_left_out,
                "lost": life.num_lost,
                "clock": life.clock,
                "error_ms": None if math.isinf(life.error_seconds) else round(life.error_seconds * 1e3, 3),
            }
        )
    hub = next((life for life in lives if life.header.role == "hub"), None)
    return {
        "began": first,
        "length": _micro(last - first),
        "rows": rows,
        "names": list(names),
        "counters": {} if hub is None else _counters(hub, first),
        "commits": [] if hub is None else _commits(hub, first),
    }


def _end(life: Life) -> float:
    spans = (record[1] + record[2] for record in life.records if record[0] in ("P", "X"))
    return max(spans, default=life.records[-1][1])


def _intervals(life: Life) -> Iterator[Interval]:
    for record in life.records:
        if record[0] == "P":
            _, begin, seconds, accounts = record
            yield Interval(begin, seconds, {_PLACE_OF[name]: part for name, part in accounts.items()})


def grouped(intervals: list[Interval], limit: int) -> tuple[list[Interval], float]:
    """At most about `limit` intervals with the same sums by account, and the length of the steps of time, in seconds,
    within which they had to be put together; 0 if they had not."""
    if len(intervals) <= limit:
        return intervals, 0.0
    first, last = intervals[0].begin, intervals[-1].begin + intervals[-1].seconds
    step = _round_up((last - first) / limit)
    sums: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for begin, seconds, accounts in intervals:
        at, end = begin, begin + seconds
        number = int((begin - first) / step)
        while at < end:
            share = max(0.0, min(end, first + (number + 1) * step) - at) / seconds
            for place, part in accounts.items():
                sums[number][place] += part * share
            number, at = number + 1, first + (number + 1) * step
    made = [Interval(first + number * step, sum(parts.values()), dict(parts)) for number, parts in sorted(sums.items())]
    return made, step


def _round_up(seconds: float) -> float:
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= seconds)


def _tracks(life: Life, first: float, names: dict[str, int], limit: int) -> tuple[list[dict[str, Any]], int]:
    """Spans by track, the main thread's first, and how many of the shortest have no place."""
    spans: dict[str, list[Span]] = {WORK: []}
    opened: dict[int, Span] = {}
    for record in life.records:
        kind, at, *rest = record
        if kind == "X":
            seconds, track, name, args = rest
            spans.setdefault(track, []).append(Span(at, seconds, name, _number(args)))
        elif kind in "be" and rest[0] == EVALUATION:
            key = rest[1]
            if kind == "b":
                opened.setdefault(key, Span(at, 0.0, EVALUATION, key))
            elif (begun := opened.pop(key, None)) is not None:
                spans.setdefault(EVALUATION, []).append(begun._replace(seconds=at - begun.begin))
    for begun in opened.values():
        spans.setdefault(EVALUATION, []).append(begun._replace(seconds=_end(life) - begun.begin))
    lengths = sorted((span.seconds for track in spans.values() for span in track), reverse=True)
    shortest = lengths[limit - 1] if len(lengths) > limit else 0.0
    tracks = []
    for name, every in spans.items():
        kept = [span for span in sorted(every) if span.seconds >= shortest]
        if kept:
            tracks.append({"name": name, "spans": _flat_spans(kept, first, names)})
    return tracks, max(0, len(lengths) - limit)


def _number(args: dict[str, Any]) -> int:
    return next((args[key] for key in _NUMBERED_BY if isinstance(args.get(key), int)), -1)


def _flat_intervals(intervals: Iterable[Interval], first: float) -> list[int]:
    flat: list[int] = []
    end = 0
    for begin, seconds, accounts in intervals:
        start, stop = _micro(begin - first), _micro(begin + seconds - first)
        # At least one: whatever is too little to be seen, something took all of the time.
        shares = [(place, round(1000 * part / seconds)) for place, part in accounts.items()]
        shown = [pair for pair in shares if pair[1]] or [max(shares, key=lambda pair: pair[1])]
        flat += (start - end, stop - start, len(shown), *(number for pair in shown for number in pair))
        end = stop
    return flat


def _flat_spans(spans: Iterable[Span], first: float, names: dict[str, int]) -> list[int]:
    flat: list[int] = []
    end = 0
    for begin, seconds, name, number in spans:
        start, stop = _micro(begin - first), _micro(begin + seconds - first)
        flat += (start - end, stop - start, names.setdefault(name, len(names)), number)
        end = stop
    return flat


def _counters(hub: Life, first: float) -> dict[str, list[list[float]]]:
    """Points [microsecond, value] of each of the hub's counters; of too many, the last of every step of time."""
    points: dict[str, list[list[float]]] = defaultdict(list)
    for record in hub.records:
        if record[0] == "C":
            points[record[2]].append([_micro(record[1] - first), record[3]])
    return {name: _thinned(values) for name, values in points.items()}


def _thinned(points: list[list[float]]) -> list[list[float]]:
    if len(points) <= MAX_POINTS:
        return points
    step = max(1.0, (points[-1][0] - points[0][0]) / MAX_POINTS)
    return list({int(point[0] / step): point for point in points}.values())


def _commits(hub: Life, first: float) -> list[list[int]]:
    """[microsecond, version] of every commit."""
    commits = (record for record in hub.records if record[0] == "i" and record[2] == "commit")
    return [[_micro(record[1] - first), record[3]["version"]] for record in commits]


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
