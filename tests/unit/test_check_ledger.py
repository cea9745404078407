"""Logs of made-up runs: a right one passes every check, and each promise, once broken, is reported by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zbgrpo.config.load import dump_yaml, load_yaml
from zbgrpo.engine.check_ledger import INVARIANTS, LedgerReport, check_logs
from zbgrpo.errors import ConfigError, RunFolderError

Event = dict[str, Any]

CONSUMERS, PRODUCERS = (0, 1), (2, 3)
S = 4  # two data-parallel ranks, two groups each per step, in two minibatches
CONFIG = """
cluster: {num_trainers: 2, num_inferencer: 2}
trainer: {train_batch_size: 2, train_minibatch_size: 1}
ledger: {max_staleness: 1, max_token_lag: 3, stale: STALE}
"""


class World:
    """A run that writes its logs by the book; tests then falsify them. Lease n is of row n unless told otherwise."""

    def __init__(self, stale: str = "mask") -> None:
        self.config = load_yaml(CONFIG.replace("STALE", stale))
        self.hub: list[Event] = []
        self.ranks: dict[int, list[Event]] = {rank: [] for rank in (*CONSUMERS, *PRODUCERS)}
        self.metrics: list[Event] = []
        self.summary: Event | None = None
        self.leases: dict[int, Event] = {}
        self.live: list[int] = []
        self.planned: list[int] = []
        self.version = self.sequence = self.taken_back = self.next_lease = 0
        self.held = dict.fromkeys(PRODUCERS, -1)
        self.start()

    def start(self) -> None:
        peers = [(f"consumer:{rank}", rank) for rank in CONSUMERS] + [("producer:0", 2), ("producer:1", 3)]
        for peer, rank in peers:
            self.hub.append({"kind": "hello", "peer": peer, "rank": rank, "node": 0})
        self.publish()

    def publish(self) -> None:
        """The source sends the newest version, and everybody applies it."""
        line = {"version": self.version, "digest": f"digest-{self.version}"}
        self.ranks[0].append({"kind": "published", **line})
        for rank in PRODUCERS:
            self.held[rank] = self.version
            self.ranks[rank] += [{"kind": "applied", **line}, {"kind": "live_digest", **line}]
            self.hub.append({"kind": "applied", "producer": rank - 2, **line})

    def lease(self, rank: int, row: int | None = None, attempt: int = 0) -> int:
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        names = {"lease": lease_id, "uid": [0, lease_id if row is None else row], "attempt": attempt}
        self.leases[lease_id] = {**names, "rank": rank, "oldest": self.held[rank], "crc": 1000 + lease_id}
        place = self.version * S + len(self.live)
        granted = {"producer": rank - 2, "applied": self.held[rank], "place": place}
        self.hub.append({"kind": "leased", **names, **granted})
        self.live.append(lease_id)
        return lease_id

    def names(self, lease_id: int) -> Event:
        return {key: self.leases[lease_id][key] for key in ("lease", "uid", "attempt")}

    def send(self, lease_id: int) -> None:
        lease, names = self.leases[lease_id], self.names(lease_id)
        lease["newest"] = self.held[lease["rank"]]
        figures = {key: lease[key] for key in ("crc", "oldest")}
        self.ranks[lease["rank"]].append({"kind": "sent", **names, **figures, "newest": lease["newest"]})
        self.hub.append({"kind": "buffered", **names, **figures, "tokens": 10})

    def close(self, lease_id: int, kind: str, **fields: Any) -> None:
        """The producer reports how a lease ended, and the hub books it."""
        line = {"kind": kind, **self.names(lease_id), **fields}
        self.ranks[self.leases[lease_id]["rank"]].append(line)
        self.hub.append(dict(line))
        self.live.remove(lease_id)

    def plan(self, entry: str, version: int, ranks: list[list[int]] | None = None, closes: bool = False) -> None:
        line = {"kind": "plan", "sequence": self.sequence, "entry": entry, "version": version, "minibatch": 0}
        self.hub.append({**line, "closes": closes, "ranks": ranks or []})
        self.sequence += 1

    def train(self, first: int, second: int, closes: bool = False) -> None:
        self.plan("train", self.version, [[first], [second]], closes)
        for rank, lease_id in zip(CONSUMERS, (first, second), strict=True):
            figures = {key: self.leases[lease_id][key] for key in ("lease", "uid", "crc", "oldest", "newest")}
            self.ranks[rank].append({"kind": "trained", **figures, "step": self.version})
        self.planned += [first, second]

    def step(self, lease_ids: list[int]) -> None:
        """Train four groups that have arrived, commit, and publish the new version."""
        self.train(*lease_ids[:2])
        self.train(*lease_ids[2:], closes=True)
        step, lags = self.version, [self.version - self.leases[i]["oldest"] for i in self.planned]
        for lease_id in self.planned:
            figures = {key: self.leases[lease_id][key] for key in ("crc", "oldest")}
            self.hub.append({"kind": "consumed", **self.names(lease_id), "step": step, **figures})
            self.live.remove(lease_id)
        self.planned, self.version = [], step + 1
        for log in (self.hub, *(self.ranks[rank] for rank in CONSUMERS)):
            log.append({"kind": "commit", "version": self.version, "skipped": False})
        left_out = 5.0 if max(lags) > 3 else 0.0
        self.metrics.append({"step": step + 1, "staleness/max": max(lags), "staleness/tokens_left_out": left_out})
        self.publish()

    def save(self) -> None:
        self.plan("save", self.version)
        self.hub.append({"kind": "snapshot", "version": self.version})
        for rank in CONSUMERS:
            self.ranks[rank].append({"kind": "saved", "version": self.version})

    def resume(self) -> None:
        """Right behind `save`: live groups are pending again, and nobody has a line of them any more."""
        for lease_id in self.live:
            mine = self.ranks[self.leases[lease_id]["rank"]]
            mine[:] = [event for event in mine if event.get("lease") != lease_id]
        self.taken_back += len(self.live)
        self.live, self.sequence, self.held = [], 0, dict.fromkeys(PRODUCERS, -1)
        self.start()

    def end(self) -> None:
        for lease_id in list(self.live):
            self.hub.append({"kind": "dropped", **self.names(lease_id), "reason": "end", "detail": ""})
            self.live.remove(lease_id)
        self.plan("end", self.version)
        kinds = ("leased", "consumed", "filtered", "dropped", "returned")
        totals = {kind: sum(event["kind"] == kind for event in self.hub) for kind in kinds}
        totals["leased"] -= self.taken_back
        self.summary = {"exit_reason": "finished", "steps": self.version, "ledger": {**totals, "live": 0}}

    def line(self, log: int | str, kind: str, number: int = 0, **where: Any) -> Event:
        """The `number`-th line of that kind (and with those values) in the hub's or a rank's log."""
        return [e for e in self._log(log) if e["kind"] == kind and where.items() <= e.items()][number]

    def remove(self, log: int | str, kind: str, number: int = 0, **where: Any) -> Event:
        line = self.line(log, kind, number, **where)
        events = self._log(log)
        del events[next(n for n, event in enumerate(events) if event is line)]
        return line

    def _log(self, log: int | str) -> list[Event]:
        return self.hub if log == "hub" else self.ranks[int(log)]

    def write(self, folder: Path) -> Path:
        (folder / "events").mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_yaml(self.config))
        files = {"metrics.jsonl": self.metrics, "events/hub.jsonl": self.hub}
        files |= {f"events/rank-{rank}.jsonl": events for rank, events in self.ranks.items()}
        for name, events in files.items():
            (folder / name).write_text("".join(json.dumps(event) + "\n" for event in events))
        if self.summary is not None:
            (folder / "summary.json").write_text(json.dumps(self.summary))
        return folder


def killed(stale: str = "mask") -> World:
    """Two steps, a saved state, one more step and half of another. Lease 4 is filtered, 5 comes back, 6 has no reward.

    Leases and the steps that train them: 0-3 in 0; 7-10 in 1 (7 is the second attempt of 5's row); 11-14 in 2; 15, 16
    in the open step 3.
    """
    world = World(stale)
    for n in range(7):
        world.lease(2 + n % 2)
    for n in (1, 0, 3, 2):
        world.send(n)
    world.close(4, "filtered", accuracy=1.0)
    world.close(5, "returned", detail="a worker was lost")
    world.close(6, "dropped", reason="reward_error", detail="")
    world.lease(2, row=5, attempt=1)
    for _ in range(3):
        world.lease(3)
    world.step([0, 1, 2, 3])
    for n in (7, 8, 9, 10):
        world.send(n)
    for _ in range(4):
        world.lease(2)
    world.step([7, 8, 9, 10])
    world.save()
    for n in (11, 12, 13, 14):
        world.send(n)
    world.step([11, 12, 13, 14])
    for _ in range(3):
        world.send(world.lease(3))
    world.train(15, 16)
    return world


def finished(stale: str = "mask") -> World:
    """A run that was saved after step 1 with four live groups, killed, resumed, and ended in the middle of step 3."""
    world = killed(stale)
    cut = world.hub.index({"kind": "snapshot", "version": 2}) + 1
    # What the next start would move aside: everything behind the snapshot.
    del world.hub[cut:]
    for rank in CONSUMERS:
        world.ranks[rank] = [e for e in world.ranks[rank] if e.get("step", 0) < 2 and e.get("version", 0) <= 2]
    for rank in PRODUCERS:
        world.ranks[rank] = [e for e in world.ranks[rank] if e.get("lease", 0) < 11 and e.get("version", 0) <= 2]
    del world.metrics[2:]
    world.version, world.planned, world.next_lease, world.live = 2, [], 15, [11, 12, 13, 14]
    world.resume()
    for row in (11, 12, 13, 14):
        world.send(world.lease(2 + row % 2, row=row))
    world.step([15, 16, 17, 18])
    for row in (19, 20, 21):
        world.send(world.lease(2, row=row))
    world.train(19, 20)
    world.end()
    return world


def check(world: World, tmp_path: Path) -> LedgerReport:
    return check_logs(world.write(tmp_path / "run"))


def violated(report: LedgerReport) -> set[str]:
    return {invariant.name for invariant in report.invariants if invariant.num_violations}


@pytest.mark.parametrize("stale", ["mask", "wait"])
def test_right_logs_pass_and_everything_is_checked(tmp_path: Path, stale: str) -> None:
    report = check(finished(stale), tmp_path)
    assert violated(report) == set() and report.ok
    assert [invariant.name for invariant in report.invariants] == list(INVARIANTS)
    assert all(invariant.num_checked for invariant in report.invariants)
    assert (report.state, report.version, report.num_starts, report.num_unconfirmed) == ("end", 3, 2, 0)
    assert report.totals == {
        "leased": 22, "consumed": 12, "filtered": 1, "dropped": 4, "returned": 1, "taken back": 4, "live": 0
    }  # fmt: skip


def _move_behind(world: World, kind: str, log: str | int, first: int, second: int) -> None:
    """Exchange two lines of a kind."""
    a, b = world.line(log, kind, first), world.line(log, kind, second)
    copy = dict(a)
    a.update(b)
    b.update(copy)


def _lease_settled_uid(world: World) -> None:
    world.line("hub", "leased", lease=19)["uid"] = [0, 4]


def _lease_live_uid(world: World) -> None:
    world.line("hub", "leased", lease=1)["uid"] = [0, 0]


def _consume_twice(world: World) -> None:
    line = world.line("hub", "consumed", lease=2)
    world.hub.insert(world.hub.index(line), dict(line))


def _be_too_old(world: World) -> None:
    """A group of step 2 that was sampled with version 0, all logs agreed."""
    for log in ("hub", 0, 1, 2, 3):
        for event in world._log(log):
            if event.get("lease") == 15 and "oldest" in event:
                event["oldest"] = 0
    world.metrics[2]["staleness/max"] = 2


def _sent_by_another(world: World) -> None:
    world.ranks[3].append(world.remove(2, "sent", lease=0))


def _sent_twice(world: World) -> None:
    world.ranks[3].append(dict(world.line(2, "sent", lease=0)))


def _trained_twice(world: World) -> None:
    line = world.line(0, "trained", lease=0)
    world.ranks[0].insert(world.ranks[0].index(line), dict(line))


def _trained_by_the_wrong_rank(world: World) -> None:
    line = world.remove(0, "trained", lease=0)
    world.ranks[1].insert(0, line)


def _leased_by_nobody(world: World) -> None:
    world.ranks[0].insert(1, {**world.line(0, "trained", lease=0), "lease": 77})


def _forget_snapshot(world: World) -> None:
    world.remove("hub", "snapshot")


def _line_of_a_lease_taken_back(world: World) -> None:
    world.ranks[2].append({"kind": "sent", **world.names(11), "crc": 1011, "oldest": 1, "newest": 2})


def _leave_one_live(world: World) -> None:
    world.remove("hub", "dropped", lease=21)
    assert world.summary is not None
    world.summary["ledger"] |= {"dropped": 3, "live": 1}


def _end_without_last_commit(world: World) -> None:
    world.line("hub", "plan", -2)["closes"] = True  # step 3 now closes, and never commits
    world.line("hub", "plan", -1)["version"] = 4
    assert world.summary is not None
    world.summary["steps"] = 4


def _miscount(world: World) -> None:
    assert world.summary is not None
    world.summary["ledger"]["consumed"] += 1


def _set(log: int | str, kind: str, number: int = 0, /, where: Event | None = None, **values: Any) -> Any:
    """A falsification: other values in one line."""
    return lambda world: world.line(log, kind, number, **(where or {})).update(values)


def _drop(log: int | str, kind: str, number: int = 0, /, **where: Any) -> Any:
    """A falsification: one line less."""
    return lambda world: world.remove(log, kind, number, **where)


LIES: list[tuple[str, str, Callable[[World], Any]]] = [
    ("once", "leased after its end", _lease_settled_uid),
    ("once", "live twice", _lease_live_uid),
    ("once", "consumed twice", _consume_twice),
    ("accounting", "end that is missing", _drop("hub", "filtered")),
    ("accounting", "arrival that is missing", _drop("hub", "buffered", lease=2)),
    ("accounting", "attempt", _set("hub", "leased", where={"lease": 7}, attempt=0)),
    ("accounting", "lease number", _set("hub", "leased", where={"lease": 18}, lease=40)),
    ("accounting", "episode", _set("hub", "leased", where={"lease": 21}, uid=[1, 3])),
    ("accounting", "uid of an end", _set("hub", "consumed", where={"lease": 3}, uid=[0, 30])),
    ("accounting", "consumed with another checksum", _set("hub", "consumed", where={"lease": 3}, crc=5)),
    ("accounting", "consumed by another step", _set("hub", "consumed", where={"lease": 3}, step=1)),
    ("accounting", "totals of the summary", _miscount),
    ("admission", "place beyond the bound", _set("hub", "leased", where={"lease": 6}, place=8)),
    ("admission", "place that is not the next", _set("hub", "leased", where={"lease": 6}, place=5)),
    ("admission", "version that is not held", _set("hub", "leased", where={"lease": 6}, applied=1)),
    ("plan", "number", _set("hub", "plan", 1, sequence=5)),
    ("plan", "number after a resume", _set("hub", "plan", where={"version": 2, "entry": "train"}, sequence=5)),
    ("plan", "step", _set("hub", "plan", 1, version=1)),
    ("plan", "uneven shares", _set("hub", "plan", ranks=[[0, 1], []])),
    ("plan", "step that closes early", _set("hub", "plan", closes=True)),
    ("plan", "step that does not close", _set("hub", "plan", 1, closes=False)),
    ("plan", "group that is not there", _set("hub", "plan", ranks=[[0], [99]])),
    ("delivery", "checksum", _set(2, "sent", where={"lease": 0}, crc=5)),
    ("delivery", "uid", _set(2, "sent", where={"lease": 0}, uid=[0, 1])),
    ("delivery", "attempt", _set(2, "sent", where={"lease": 0}, attempt=1)),
    ("delivery", "oldest version", _set(3, "sent", where={"lease": 17}, oldest=0)),
    ("delivery", "never sent", _drop(2, "sent", lease=0)),
    ("delivery", "sent by another producer", _sent_by_another),
    ("delivery", "sent by two producers", _sent_twice),
    ("outcomes", "never filtered", _drop(2, "filtered")),
    ("outcomes", "accuracy", _set(2, "filtered", accuracy=0.5)),
    ("outcomes", "reason", _set(2, "dropped", reason="non_finite")),
    ("outcomes", "never dropped", _drop(2, "dropped")),
    ("outcomes", "never returned", _drop(3, "returned")),
    ("outcomes", "taken back, and yet in a log", _line_of_a_lease_taken_back),
    ("training", "checksum", _set(0, "trained", where={"lease": 0}, crc=5)),
    ("training", "uid", _set(0, "trained", where={"lease": 0}, uid=[0, 1])),
    ("training", "never trained", _drop(1, "trained", lease=1)),
    ("training", "trained twice", _trained_twice),
    ("training", "trained by the wrong rank", _trained_by_the_wrong_rank),
    ("training", "lease that nobody knows", _leased_by_nobody),
    ("training", "trained in another step", _set(0, "trained", where={"lease": 0}, step=1)),
    ("steps", "trained in another step", _set(0, "trained", where={"lease": 0}, step=1)),
    ("steps", "hub skips a version", _drop("hub", "commit", 1)),
    ("steps", "consumer skips a version", _drop(1, "commit", 1)),
    ("steps", "consumer misses the last version", _drop(1, "commit", 2)),
    ("steps", "order of versions", lambda world: _move_behind(world, "commit", 1, 0, 1)),
    ("steps", "skipped gradient", _set(1, "commit", skipped=True)),
    ("steps", "group that is missing", _drop("hub", "consumed", lease=2)),
    ("staleness", "newer than its step", _set(0, "trained", where={"lease": 0}, newest=1)),
    ("staleness", "newest before oldest", _set(0, "trained", where={"lease": 15}, newest=0)),
    ("token-lag", "nothing was too old", lambda world: world.metrics[0].update({"staleness/tokens_left_out": 3.0})),
    ("token-lag", "another lag", lambda world: world.metrics[1].update({"staleness/max": 0})),
    ("versions", "hub: back", lambda world: _move_behind(world, "applied", "hub", 0, 2)),
    ("versions", "producer: back", lambda world: _move_behind(world, "applied", 2, 0, 1)),
    ("versions", "producer: twice, without a resume", _set(2, "applied", 1, version=0, digest="digest-0")),
    ("versions", "sampled with a version to come", _set(2, "sent", where={"lease": 0}, newest=1)),
    ("weights", "digest of the hub", _set("hub", "applied", digest="x")),
    ("weights", "digest of a producer", _set(2, "applied", digest="x")),
    ("weights", "digest of the live parameters", _set(3, "live_digest", 1, digest="x")),
    ("weights", "never published", _drop(0, "published", 1)),
    ("weights", "published twice, differently", _set(0, "published", 3, digest="x")),
    ("weights", "applied for the hub only", _drop(2, "applied", 1)),
    ("resume", "no snapshot", _forget_snapshot),
    ("resume", "snapshot of another version", _set("hub", "snapshot", version=1)),
    ("end", "live group", _leave_one_live),
    ("end", "step that never committed", _end_without_last_commit),
]


@pytest.mark.parametrize(("name", "lie"), [pytest.param(n, lie, id=f"{n}: {what}") for n, what, lie in LIES])
def test_lie_is_reported_by_its_name(tmp_path: Path, name: str, lie: Callable[[World], Any]) -> None:
    world = finished()
    lie(world)
    report = check(world, tmp_path)
    assert not report.ok
    assert name in violated(report)
    assert all(invariant.violations for invariant in report.invariants if invariant.num_violations)


def test_every_invariant_has_a_lie() -> None:
    assert {name for name, _, _ in LIES} == set(INVARIANTS)


def test_violation_names_the_place(tmp_path: Path) -> None:
    world = finished()
    world.line(0, "trained", lease=0)["crc"] = 5
    report = check(world, tmp_path)
    (training,) = [invariant for invariant in report.invariants if invariant.num_violations]
    assert training.violations == [
        "rank 0: trained lease 0 (uid 0:0, attempt 0) in step 0 with checksum 5, the hub has step 0 and 1000"
    ]


def test_only_the_first_violations_are_kept(tmp_path: Path) -> None:
    world = finished()
    for event in world.ranks[0]:
        if event["kind"] == "trained":
            event["crc"] = 5
    training = next(i for i in check(world, tmp_path).invariants if i.name == "training")
    assert (training.num_violations, len(training.violations)) == (7, 5)


@pytest.mark.parametrize(("stale", "expected"), [("mask", set()), ("wait", {"staleness"})])
def test_group_may_be_older_than_max_staleness_unless_strict(tmp_path: Path, stale: str, expected: set[str]) -> None:
    world = finished(stale)
    _be_too_old(world)
    assert violated(check(world, tmp_path)) == expected


def test_tokens_beyond_the_lag_must_be_left_out(tmp_path: Path) -> None:
    world = finished()
    world.config = load_yaml(CONFIG.replace("STALE", "mask").replace("max_token_lag: 3", "max_token_lag: 0"))
    report = check(world, tmp_path)
    assert violated(report) == {"token-lag"}
    assert "the lag reached 1, the bound is 0, but 0.0 tokens were left out" in str(report.invariants)


# ------------------------------------------------------------------------------------------ unfinished runs


def test_killed_run_may_miss_lines_behind_its_last_state(tmp_path: Path) -> None:
    world = killed()
    for rank in CONSUMERS:
        del world.ranks[rank][world.ranks[rank].index({"kind": "saved", "version": 2}) + 1 :]
    sent = world.line(2, "sent", lease=11)
    del world.ranks[2][world.ranks[2].index(sent) :]
    report = check(world, tmp_path)
    assert violated(report) == set()
    assert (report.state, report.version) == ("open", 3)
    assert report.num_unconfirmed > 0


def test_killed_hub_may_know_less_than_the_ranks(tmp_path: Path) -> None:
    world = killed()
    del world.hub[world.hub.index({"kind": "snapshot", "version": 2}) + 1 :]
    report = check(world, tmp_path)
    assert violated(report) == set()
    assert (report.state, report.version, report.totals["live"]) == ("open", 2, 4)


def test_killed_run_must_agree_up_to_its_last_state(tmp_path: Path) -> None:
    world = killed()
    world.remove(2, "sent", lease=0)
    world.remove(0, "trained", lease=7)
    assert violated(check(world, tmp_path)) == {"delivery", "training"}


def test_killed_run_must_not_contradict_itself_behind_its_last_state(tmp_path: Path) -> None:
    world = killed()
    world.line(2, "sent", lease=11)["crc"] = 5
    world.line(0, "trained", lease=15)["crc"] = 5
    assert violated(check(world, tmp_path)) == {"delivery", "training"}


def test_lines_of_a_state_that_was_not_completed_are_not_required(tmp_path: Path) -> None:
    world = killed()
    for rank in CONSUMERS:  # killed while the state was written
        del world.ranks[rank][world.ranks[rank].index({"kind": "saved", "version": 2}) :]
    world.remove(2, "sent", lease=0)
    assert violated(check(world, tmp_path)) == set()


def test_stopped_run(tmp_path: Path) -> None:
    world = killed()
    world.plan("stop", 3)
    world.hub.append({"kind": "snapshot", "version": 3})
    report = check(world, tmp_path)
    assert report.ok
    assert (report.state, report.totals["live"]) == ("stop", 3)


def test_failure_after_the_planned_end_is_no_end(tmp_path: Path) -> None:
    world = finished()
    world.hub.append({"kind": "failed", "error": "rank 1 is gone", "origin": 1})
    assert check(world, tmp_path).state == "open"


def test_planned_end_without_its_summary_is_no_end(tmp_path: Path) -> None:
    world = finished()
    assert world.summary is not None
    world.summary["steps"] = 2  # of an earlier, shorter run
    report = check(world, tmp_path)
    assert (report.state, report.ok) == ("open", True)


def test_group_dropped_after_its_last_attempt(tmp_path: Path) -> None:
    world = finished()
    world.ranks[2].append({"kind": "returned", **world.names(6), "detail": ""})
    world.remove(2, "dropped", lease=6)
    world.line("hub", "dropped", lease=6)["reason"] = "infrastructure"
    assert violated(check(world, tmp_path)) == set()


# ------------------------------------------------------------------------------------------ files


def test_void_files_are_not_read(tmp_path: Path) -> None:
    folder = finished().write(tmp_path / "run")
    (folder / "events" / "rank-2.jsonl.void-2-ab12").write_text("not even JSON\n")
    (folder / "events" / "hub.jsonl.void-2-ab12").write_text('{"kind":"leased"}\n')
    assert check_logs(folder).ok


def test_torn_last_line_of_a_killed_run(tmp_path: Path) -> None:
    folder = killed().write(tmp_path / "run")
    with open(folder / "events" / "rank-1.jsonl", "a") as file:
        file.write('{"kind":"trai')
    report = check_logs(folder)
    assert report.ok and report.num_unconfirmed == 1


def test_missing_log_of_a_rank(tmp_path: Path) -> None:
    folder = finished().write(tmp_path / "run")
    (folder / "events" / "rank-3.jsonl").unlink()
    assert {"delivery", "outcomes", "weights"} <= violated(check_logs(folder))
    (folder / "events" / "rank-1.jsonl").unlink()
    assert {"training", "steps"} <= violated(check_logs(folder))


def test_folder_without_logs(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"config\.yaml: no such file; give the log folder of a run"):
        check_logs(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_yaml(finished().config))
    with pytest.raises(RunFolderError, match=r"hub\.jsonl: no such file"):
        check_logs(tmp_path)


@pytest.mark.parametrize("line", ['{"kind":"trained","lease":1}', '{"kind":"trained"}', "{}"])
def test_line_that_is_no_event(tmp_path: Path, line: str) -> None:
    folder = finished().write(tmp_path / "run")
    path = folder / "events" / "rank-0.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(RunFolderError, match=r"rank-0\.jsonl:1: not an event of this program"):
        check_logs(folder)


def test_damaged_configuration_and_summary(tmp_path: Path) -> None:
    folder = finished().write(tmp_path / "run")
    (folder / "summary.json").write_text('{"steps": 3}')
    with pytest.raises(RunFolderError, match=r"summary\.json: not a summary"):
        check_logs(folder)
    (folder / "config.yaml").write_text("nonsense: 3")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        check_logs(folder)
