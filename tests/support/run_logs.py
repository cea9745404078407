"""Event logs of made-up runs, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zbgrpo.config.load import dump_yaml, load_yaml
from zbgrpo.engine.check_ledger import LedgerReport, check_logs

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
        self.run = f"0a1b{len(self.hub):04x}"
        self.hub.append({"kind": "started", "run": self.run, "version": self.version})
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
        self.summary = {
            "run": self.run,
            "exit_reason": "finished",
            "steps": self.version,
            "ledger": {**totals, "live": 0},
        }

    def line(self, log: int | str, kind: str, number: int = 0, **where: Any) -> Event:
        """The `number`-th line of that kind (and with those values) in the hub's or a rank's log."""
        return [e for e in self.log(log) if e["kind"] == kind and where.items() <= e.items()][number]

    def remove(self, log: int | str, kind: str, number: int = 0, **where: Any) -> Event:
        line = self.line(log, kind, number, **where)
        events = self.log(log)
        del events[next(n for n, event in enumerate(events) if event is line)]
        return line

    def log(self, log: int | str) -> list[Event]:
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
