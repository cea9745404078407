"""The trace: what is written, how little, on whose clock, and what Perfetto gets."""

from __future__ import annotations

import json
import logging
import threading
import time
import timeit
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbgrpo.errors import RunFolderError
from zbgrpo.ledger.ledger import Ledger
from zbgrpo.ledger.records import LedgerOptions
from zbgrpo.observe import clockoffset, timeledger, tracefile
from zbgrpo.observe import trace as tracing
from zbgrpo.observe.clockoffset import ClockOffset, Offset, best_offsets, offset_at
from zbgrpo.observe.timeledger import BUSY, EVAL, STARTUP, STARVED, UNBOOKED, TimeLedger
from zbgrpo.observe.trace import HubTrace, Trace
from zbgrpo.observe.tracefile import TraceFile, TraceHeader, read_segments
from zbgrpo.observe.tracemerge import merge_trace, read_trace
from zbgrpo.transport.channel import Channel, Timing
from zbgrpo.transport.server import Server
from zbgrpo.transport.wire import Sender

RUN = "0123456789abcdef"


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def header(process: str = "producer 0", rank: int = 1, **fields: Any) -> TraceHeader:
    values = {"role": process.partition(" ")[0], "run": RUN, "clock": "one", "monotonic": 0.0, "wall": 1000.0, **fields}
    return TraceHeader(process=process, rank=rank, **values)


def write(folder: Path, made: TraceHeader, *records: tuple[Any, ...]) -> None:
    name = "hub" if made.rank < 0 else f"rank-{made.rank}"
    file = TraceFile(folder / "trace" / f"{name}.jsonl", made, 10_000)
    file.write(records)
    file.close()


def records_of(path: Path) -> list[list[Any]]:
    return [record for segment in read_segments(path) for record in segment.records]


# ------------------------------------------------------------------------------------------ writing


def test_what_happens_is_in_the_file(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "trace" / "rank-1.jsonl"
    trace = Trace(clock=clock, wall_clock=lambda: 1760.0)
    trace.counter("slots in use", 3)  # before it is open: kept
    trace.open(path, "producer 0", 1, "producer", RUN, 1000)
    with trace.span("apply") as noted:
        clock.pass_(0.5)
        noted["version"] = 4
    trace.counter("slots in use", 3)  # unchanged: no record
    trace.begin("lease", 7, uid=[0, 17])
    clock.pass_(1.5)
    trace.end("lease", 7, outcome="sent")
    trace.ended("broadcast", 0.25, "broadcast", version=5)
    trace.instant("commit", version=5)
    trace.close()
    trace.close()
    (segment,) = read_segments(path)
    assert (segment.header.process, segment.header.rank, segment.header.run) == ("producer 0", 1, RUN)
    assert (segment.header.monotonic, segment.header.wall) == (100.0, 1760.0)
    assert segment.records == [
        ["C", 100.0, "slots in use", 3],
        ["X", 100.0, 0.5, "work", "apply", {"version": 4}],
        ["b", 100.5, "lease", 7, {"uid": [0, 17]}],
        ["e", 102.0, "lease", 7, {"outcome": "sent"}],
        ["X", 101.75, 0.25, "broadcast", "broadcast", {"version": 5}],
        ["i", 102.0, "commit", {"version": 5}],
    ]


def test_a_thread_writes_without_being_asked(tmp_path: Path) -> None:
    path, trace = tmp_path / "rank-0.jsonl", Trace()
    trace.open(path, "consumer 0", 0, "consumer", RUN, 1000)
    trace.instant("commit", version=1)
    deadline = time.monotonic() + 30
    while not records_of(path):
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    trace.close()


def test_switched_off_it_costs_and_leaves_nothing(tmp_path: Path) -> None:
    trace = Trace(enabled=False)
    assert trace.on_span is None
    trace.open(tmp_path / "trace" / "rank-0.jsonl", "consumer 0", 0, "consumer", RUN, 1000)
    with trace.span("commit", step=1) as noted:
        noted["more"] = 1
    trace.begin("lease", 1)
    trace.end("lease", 1)
    trace.counter("slots", 1)
    trace.instant("commit")
    trace.ended("broadcast", 1.0)
    trace.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_made_is_a_warning_and_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trace").write_text("not a folder")
    trace = Trace()
    trace.open(tmp_path / "trace" / "rank-0.jsonl", "consumer 0", 0, "consumer", RUN, 1000)
    trace.instant("commit")
    trace.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no trace" in caplog.text


def test_a_full_disk_is_a_warning_and_the_end_of_the_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TraceFile, records: Any) -> None:
        raise OSError(28, "No space left on device")

    trace = Trace()
    trace.open(tmp_path / "rank-0.jsonl", "consumer 0", 0, "consumer", RUN, 1000)
    monkeypatch.setattr(TraceFile, "write", full)
    trace.instant("commit")
    trace.flush()
    trace.instant("commit")
    trace.close()
    assert caplog.text.count("No space left") == 1
    assert not trace.enabled


def test_records_that_nobody_writes_in_time_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_WAITING", 5)
    trace = Trace(clock=Clock())
    for number in range(8):
        trace.instant("commit", version=number)
    trace.open(tmp_path / "rank-0.jsonl", "consumer 0", 0, "consumer", RUN, 1000)
    trace.close()
    records = records_of(tmp_path / "rank-0.jsonl")
    assert [record[3]["version"] for record in records if record[0] == "i"] == [0, 1, 2, 3, 4]
    assert records[-1] == ["lost", 100.0, 3]


# ------------------------------------------------------------------------------------------ bounded size


def test_the_newest_records_stay_and_the_others_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "rank-1.jsonl"
    file = TraceFile(path, header(), limit=100)
    for number in range(1030):
        file.write([("i", float(number), "n", {"number": number})])
    file.close()
    (life,) = read_trace(tmp_path)
    numbers = [record[3]["number"] for record in life.records]
    assert 50 <= len(numbers) <= 100
    assert numbers == list(range(1030 - len(numbers), 1030))
    assert life.num_lost == 1030 - len(numbers)


def test_one_write_of_many_records_is_bounded_too(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace" / "rank-1.jsonl", header(), limit=100)
    file.write([("i", float(number), "n", {}) for number in range(1030)])
    file.close()
    (life,) = read_trace(tmp_path)
    assert life.num_lost + len(life.records) == 1030 and len(life.records) <= 100


def test_a_start_goes_on_behind_the_one_before_and_counts_on(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "rank-1.jsonl"
    for start in range(4):
        file = TraceFile(path, header(run=f"run-{start}"), limit=100)
        file.write([("i", float(number), "n", {}) for number in range(40)])
        file.close()
        with open(path, "ab") as torn:
            torn.write(b'["i",1.0,"cut o')
    lives = read_trace(tmp_path)
    assert [life.header.run for life in lives][-1] == "run-3"
    assert sum(len(life.records) for life in lives) <= 100
    assert sum(len(life.records) for life in lives) + lives[-1].num_lost == 160


@pytest.mark.parametrize("line", ['["i"]', "[]", '{"process":"x"}', "nonsense", '[1,2,"x"]', '["i","now","x",{}]'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path, header(), ("i", 1.0, "commit", {}))
    path = tmp_path / "trace" / "rank-1.jsonl"
    path.write_text(path.read_text() + line + "\n" + '["i",2.0,"commit",{}]\n')
    with pytest.raises(RunFolderError, match=r"rank-1\.jsonl:3: not a line of a trace"):
        read_trace(tmp_path)


# ------------------------------------------------------------------------------------------ the time ledger's part


def test_the_ledger_tells_every_interval() -> None:
    clock: Clock = Clock()
    told: list[timeledger.Interval] = []
    ledger = TimeLedger(clock, started=90.0, on_span=told.append)
    with ledger.phase(STARTUP):
        clock.pass_(2)
    with ledger.phase(BUSY):
        clock.pass_(1)
        with ledger.phase_weighted(BUSY, 0.75, EVAL):
            clock.pass_(4)
    clock.pass_(0.5)
    assert ledger.snapshot()[UNBOOKED] == 0.5
    assert told == [
        (STARTUP, 90.0, 100.0, 1.0, STARTUP),
        (STARTUP, 100.0, 102.0, 1.0, STARTUP),
        (BUSY, 102.0, 103.0, 1.0, BUSY),
        (BUSY, 103.0, 107.0, 0.75, EVAL),
        (UNBOOKED, 107.0, 107.5, 1.0, UNBOOKED),
    ]


def accounts_of(ledger_work: Any, clock: Clock, tmp_path: Path) -> tuple[dict[str, float], list[list[Any]]]:
    """Seconds by account of a time ledger that `ledger_work` has used, and the records of its trace."""
    path = tmp_path / f"rank-{time.monotonic_ns()}.jsonl"
    trace = Trace(clock=clock)
    ledger = TimeLedger(clock, on_span=trace.on_span)
    ledger_work(ledger)
    seconds = ledger.snapshot()
    trace.open(path, "producer 0", 1, "producer", RUN, 100_000)
    trace.close()
    return seconds, [record for record in records_of(path) if record[0] == "P"]


def test_a_loop_of_long_and_short_phases_is_a_record_a_second(tmp_path: Path) -> None:
    clock = Clock(0.0)

    def loop(ledger: TimeLedger) -> None:
        for _ in range(1000):
            with ledger.phase(BUSY):
                clock.pass_(0.0001)
                with ledger.phase_weighted(BUSY, 0.75):
                    clock.pass_(0.03)
            clock.pass_(0.00001)

    seconds, records = accounts_of(loop, clock, tmp_path)
    assert len(records) <= 1.1 * clock.now + 2
    for name, value in seconds.items():
        assert sum(record[3].get(name, 0.0) for record in records) == pytest.approx(value, abs=1e-5)


def test_what_is_long_keeps_its_place(tmp_path: Path) -> None:
    clock = Clock(0.0)

    def work(ledger: TimeLedger) -> None:
        for share in (1.0, 0.5, 1.0):
            with ledger.phase_weighted(BUSY, share):
                clock.pass_(0.125)
            with ledger.phase(STARVED):
                clock.pass_(0.0625)

    _, records = accounts_of(work, clock, tmp_path)
    assert [record[2:] for record in records] == [
        [0.125, {BUSY: 0.125}],
        [0.0625, {STARVED: 0.0625}],
        [0.125, {BUSY: 0.0625, STARVED: 0.0625}],
        [0.0625, {STARVED: 0.0625}],
        [0.125, {BUSY: 0.125}],
        [0.0625, {STARVED: 0.0625}],
    ]


pieces = st.lists(
    st.tuples(
        st.sampled_from([BUSY, STARVED, EVAL]),
        st.sampled_from([1e-6, 1e-4, 2e-3, 0.04, 0.7, 3.0]),
        st.sampled_from([0.0, 0.25, 1.0]),
    ),
    max_size=40,
)


@given(pieces)
def test_records_have_all_of_the_time_and_are_of_one_kind(parts: list[tuple[str, float, float]]) -> None:
    accounts, records = tracing._Accounts(), list[tuple[Any, ...]]()
    now, sums = 50.0, Counter[str]()
    for name, length, share in parts:
        end = now + length
        assert not accounts.add((name, now, end, share, STARVED), records)
        sums[name] += (end - now) * share
        sums[STARVED] += (end - now) * (1 - share)
        now = end
    accounts.end(records)
    for name, value in sums.items():
        assert sum(record[3].get(name, 0.0) for record in records) == pytest.approx(value, abs=1e-5)
    begin = 50.0
    longest = max((length for _, length, _ in parts), default=0.0)
    for _, at, length, seconds in records:
        assert at == pytest.approx(begin, abs=1e-5)
        assert length <= max(1.0, longest) + 1e-6
        assert sum(seconds.values()) == pytest.approx(length, abs=1e-5)
        begin = at + length


def test_missing_intervals_are_noticed() -> None:
    accounts, records = tracing._Accounts(), list[tuple[Any, ...]]()
    assert not accounts.add((BUSY, 1.0, 2.0, 1.0, BUSY), records)
    assert accounts.add((BUSY, 3.0, 4.0, 1.0, BUSY), records)
    accounts.end(records)
    assert [record[1:3] for record in records] == [(1.0, 1.0), (3.0, 1.0)]


def test_what_a_phase_costs() -> None:
    """No assertion: `pytest -s` shows it."""
    trace = Trace()
    ledgers = {"without": TimeLedger(), "with": TimeLedger(on_span=trace.on_span)}

    def phase(ledger: TimeLedger) -> None:
        with ledger.phase(BUSY):
            pass

    number, costs = 20_000, dict.fromkeys(ledgers, float("inf"))
    for _ in range(5):
        for name, ledger in ledgers.items():
            seconds = timeit.timeit(lambda ledger=ledger: phase(ledger), number=number)  # type: ignore[misc]
            costs[name] = min(costs[name], seconds / number)
    print({f"phase {name} a trace, ns": round(1e9 * seconds) for name, seconds in costs.items()})


# ------------------------------------------------------------------------------------------ clocks


def test_an_exchange_gives_offset_and_round_trip() -> None:
    clock = ClockOffset()
    # Sent at 10, there 5 s later by the hub's clock, which is 1000 s ahead; answered 2 s later; 1 s on the way back.
    clock.add(10.0, 1015.0, 1017.0, 18.0)
    assert clock.best == Offset(18.0, 1002.0, 6.0)
    assert abs(clock.best.offset - 1000.0) <= clock.best.round_trip / 2


def test_the_least_round_trip_of_a_window_counts() -> None:
    clock = ClockOffset()
    clock.add(0.0, 100.1, 100.1, 0.4)
    clock.add(1.0, 101.05, 101.05, 1.1)
    clock.add(2.0, 102.3, 102.3, 2.4)
    assert clock.best is not None and clock.best.at == 1.1
    clock.add(400.0, 500.2, 500.2, 400.3)
    assert clock.best.at == 400.3, "a new window"


@pytest.mark.parametrize(
    "times", [(10.0, 5.0, 4.0, 11.0), (10.0, 5.0, 6.0, 9.0), (10.0, 5.0, 9.0, 11.0), (0.0, float("nan"), 1.0, 2.0)]
)
def test_what_cannot_be_is_ignored(times: tuple[float, float, float, float]) -> None:
    clock = ClockOffset()
    clock.add(*times)
    assert clock.best is None


def test_offsets_drift_between_measurements() -> None:
    best = best_offsets([Offset(1000.0, 8.0, 0.1), Offset(0.0, 4.0, 0.2), Offset(5.0, 5.0, 0.4)])
    assert best == [Offset(0.0, 4.0, 0.2), Offset(1000.0, 8.0, 0.1)]
    assert [offset_at(best, at) for at in (-50.0, 0.0, 250.0, 1000.0, 5000.0)] == [4.0, 4.0, 5.0, 8.0, 8.0]


def test_heartbeats_measure_the_distance_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = SimpleNamespace(monotonic=lambda: time.monotonic() + 5000.0, sleep=time.sleep)
    monkeypatch.setattr("zbgrpo.transport.server.time", ahead)
    timing = Timing(heartbeat_seconds=0.02, peer_timeout_seconds=60.0, resend_seconds=5.0)
    server = Server("run-1", None, timing, 1 << 20)
    channel = Channel(server.address, Sender("run-1", "producer:0"), timing, 1 << 20).start()
    try:
        deadline = time.monotonic() + 60.0
        while channel.hub_clock.best is None:
            assert time.monotonic() < deadline
            server.poll(0.01)
            server.tick()
        best = channel.hub_clock.best
        assert abs(best.offset - 5000.0) <= best.round_trip / 2 + 1e-3
    finally:
        channel.close(0.0)
        server.close()


def test_the_clock_of_this_process_has_a_name() -> None:
    assert clockoffset.clock_name() == clockoffset.clock_name() != ""


# ------------------------------------------------------------------------------------------ one clock, one file


def test_ranks_of_other_machines_are_put_on_the_hubs_clock(tmp_path: Path) -> None:
    write(tmp_path, header("hub", -1, monotonic=100.0, wall=5000.0), ("i", 101.0, "commit", {"version": 1}))
    same = header("consumer 0", 0, monotonic=90.0, wall=1.0)  # its time of day is wrong, and does not matter
    write(tmp_path, same, ("i", 102.0, "x", {}), ("clock", 102.0, 0.5, 0.1))
    far = header("producer 0", 1, clock="two", monotonic=7.0, wall=9.0)
    write(tmp_path, far, ("i", 3.0, "x", {}), ("clock", 3.0, 99.0, 0.4), ("clock", 4.0, 100.0, 0.2))
    unknown = header("producer 1", 2, clock="three", monotonic=7.0, wall=5003.0)
    write(tmp_path, unknown, ("i", 8.0, "x", {}))
    lives = read_trace(tmp_path)
    assert [life.header.process for life in lives] == ["hub", "consumer 0", "producer 0", "producer 1"]
    assert [life.records[0][1] for life in lives] == [5001.0, 5002.0, 5003.0, 5004.0]
    assert [life.clock for life in lives] == ["same", "same", "measured", "wall"]
    assert [life.error_seconds for life in lives] == [0.0, 0.0, 0.1, float("inf")]


def test_chrome_trace(tmp_path: Path) -> None:
    write(tmp_path, header("hub", -1), ("C", 10.0, "leased", 4), ("i", 12.0, "commit", {"version": 1}))
    write(
        tmp_path,
        header("producer 0", 1),
        ("X", 11.5, 0.25, "work", "apply", {"version": 1}),
        ("P", 10.0, 2.0, {"busy": 1.5, "starved": 0.5}),
        ("e", 10.0, "lease", 1, {}),  # its beginning is no longer in the trace
        ("b", 10.5, "lease", 2, {"uid": [0, 17]}),
        ("b", 10.6, "lease", 2, {"uid": [0, 17]}),
        ("b", 11.0, "lease", 3, {"uid": [0, 18]}),
        ("e", 11.5, "lease", 2, {"outcome": "sent"}),
        ("X", 11.0, 0.5, "broadcast", "broadcast", {}),
    )
    path = merge_trace(tmp_path)
    assert path == tmp_path / "trace" / "trace.json"
    assert merge_trace(tmp_path) == path, "again, over the old one"
    merged = json.loads(path.read_text())
    events = [event for event in merged["traceEvents"] if event["ph"] != "M"]
    stamps = [event["ts"] for event in events]
    assert stamps == sorted(stamps) and stamps[0] == 0 and stamps[-1] == 2_000_000
    (phase,) = (event for event in events if event.get("cat") == "time")
    assert (phase["name"], phase["dur"], phase["args"]) == ("busy", 2_000_000, {"busy": 0.75, "starved": 0.25})
    leases = [(event["ph"], event["name"], event["args"]) for event in events if event.get("cat") == "lease"]
    assert leases == [
        ("b", "lease 0:17", {"uid": [0, 17]}),
        ("b", "lease 0:18", {"uid": [0, 18]}),
        ("e", "lease 0:17", {"uid": [0, 17], "outcome": "sent"}),
        ("e", "lease 0:18", {"uid": [0, 18], "unfinished": True}),
    ]
    names = {(event["pid"], event["name"]): event["args"] for event in merged["traceEvents"] if event["ph"] == "M"}
    assert names[1, "process_name"] == {"name": "hub"}
    assert names[3, "process_name"] == {"name": "rank 1: producer 0"}
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len(tracks) == 3, "accounts, work and broadcasts have rows of their own"
    assert not list((tmp_path / "trace").glob("*.tmp-*"))


def test_two_starts_are_both_in_it(tmp_path: Path) -> None:
    for run, wall in (("run-1", 1000.0), ("run-2", 2000.0)):
        for process, rank in (("hub", -1), ("producer 0", 1)):
            write(tmp_path, header(process, rank, run=run, wall=wall), ("i", 1.0, "x", {}), ("b", 1.5, "lease", 1, {}))
    events = json.loads(merge_trace(tmp_path).read_text())["traceEvents"]
    assert sorted(event["ts"] for event in events if event["ph"] == "i") == [0, 0, 1e9, 1e9]
    assert len({event["id"] for event in events if event["ph"] == "b"}) == 4, "the same number, other leases"


def test_without_a_trace_there_is_nothing_to_merge(tmp_path: Path) -> None:
    assert read_trace(tmp_path) == []
    with pytest.raises(RunFolderError, match=r"no trace; observe\.trace was off"):
        merge_trace(tmp_path)


# ------------------------------------------------------------------------------------------ the hub's part


def test_the_hub_tells_where_groups_wait(tmp_path: Path) -> None:
    options = LedgerOptions(
        num_rows=8, num_episodes=1, groups_per_step=2, groups_per_minibatch=1, dp_size=1, num_producers=1,
        leases_per_producer=4, buffer_limit=8, order=lambda episode: range(8),
    )  # fmt: skip
    ledger, hub = Ledger(options), HubTrace(str(tmp_path / "events" / "hub.jsonl"), RUN, 1000)

    def turn() -> None:
        hub.turn(ledger)
        ledger.events.clear()

    ledger.apply(0, 0)
    ledger.request(0, 4)
    ids = [lease.lease_id for _, lease in ledger.grant()]
    turn()
    for lease_id in ids[:3]:
        ledger.deliver(lease_id, 10, 0, 1)
    turn()
    for entry in ledger.plan():
        ledger.trained(entry.sequence)
    turn()
    ledger.commit(1)
    turn()
    hub.evaluation(1)
    ledger.events.append({"kind": "evaluated", "version": 1, "rows": 3})
    turn()
    hub.close()
    (life,) = read_trace(tmp_path)
    spans = [(r[0], r[2], r[3]) for r in life.records if r[0] in "be" and r[2] in ("buffered", "planned")]
    first, second, third, _ = ids
    assert spans == [
        *(("b", "buffered", n) for n in (first, second, third)),
        ("e", "buffered", first), ("b", "planned", first), ("e", "buffered", second), ("b", "planned", second),
        ("e", "planned", first), ("e", "buffered", first), ("e", "planned", second), ("e", "buffered", second),
    ]  # fmt: skip
    counters = [(r[2], r[3]) for r in life.records if r[0] == "C"]
    assert counters == [
        ("leased", 4), ("buffered", 0), ("planned", 0), ("leased", 1), ("buffered", 3), ("buffered", 1), ("planned", 2),
        ("planned", 0),
    ]  # fmt: skip
    assert [r[2] for r in life.records if r[0] == "i"] == ["commit"]
    assert [(r[0], r[3]) for r in life.records if r[0] in "be" and r[2] == "evaluation"] == [("b", 1), ("e", 1)]


def test_a_hub_without_a_trace_writes_none(tmp_path: Path) -> None:
    hub = HubTrace(str(tmp_path / "events" / "hub.jsonl"), RUN, 0)
    hub.evaluation(0)
    hub.close()
    assert list(tmp_path.iterdir()) == []


def test_the_format_is_described_where_it_is_written() -> None:
    described = {line.strip()[2] for line in (tracefile.__doc__ or "").splitlines() if line.strip().startswith('["')}
    assert described == {"P", "X", "b", "e", "C", "i", "c", "l"}
