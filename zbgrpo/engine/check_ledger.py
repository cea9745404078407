"""Checks what a run promises about its groups, from its logs alone: `zbgrpo check-ledger LOG_DIR`.

Three logs, written independently, are joined by lease, uid and payload checksum: the hub's, which is replayed first
(`hub_replay`), every consumer's and every producer's.

After a resume the logs go on behind what was restored; later lines are in `.void-...` files, which are not read. The
hub's log then has a snapshot and right behind it the next start: groups that were live there are pending again, plan
entries and the versions of producers begin anew. All logs must agree up to there, line by line. Behind the
last saved state of a run that did not finish, which is what the next resume would move aside, a line may be missing in
one log, but never contradict another.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbgrpo.config.load import load_yaml
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine.hub_replay import Event, HubReplay, Invariant, Lease, uid_of
from zbgrpo.errors import RunFolderError
from zbgrpo.observe.events import iter_events
from zbgrpo.observe.metrics import read_metrics

__all__ = ["INVARIANTS", "Invariant", "LedgerReport", "check_logs"]

INVARIANTS = {
    "once": "no uid is consumed twice, live twice, or leased again after its end",
    "accounting": "leased = consumed + filtered + dropped + returned + live, and each lease goes a legal way",
    "admission": "every lease has a place below (applied + 1 + max_staleness) x S",
    "plan": "plan entries have consecutive numbers; those of a step name S groups, shared out evenly",
    "delivery": "every group the hub got was sent once, by the producer that had the lease, with the same checksum",
    "outcomes": "every group filtered, dropped or returned was so by the producer that had the lease",
    "training": "every consumed group was trained once by each rank of its data-parallel group, same checksum and step",
    "steps": "hub and consumers commit versions 1, 2, 3, ..., each made of the S groups that the plan names",
    "staleness": "no group is newer than the step that trains it, nor too old in a strict mode",
    "token-lag": "tokens are left out of the loss when, and only when, their lag is above max_token_lag",
    "versions": "producers never go back to an older version, and sample only with versions they have applied",
    "weights": "every applied version was published, and its parameters have the digest of what was published",
    "resume": "a resumed log goes on right behind the snapshot of the version that it started from",
    "end": "after a finished run nothing is live and every planned step has committed",
}
"""Name and statement of everything that is checked."""


@dataclass(frozen=True)
class LedgerReport:
    """Outcome of `check_logs`."""

    invariants: tuple[Invariant, ...]
    """In the order of `INVARIANTS`."""
    state: str
    """`end`: finished, and the summary says so; `stop`: asked to stop; `open`: killed, failed or still running."""
    version: int
    """Committed steps by the hub's log."""
    num_starts: int
    totals: dict[str, int]
    """Leases: leased, consumed, filtered, dropped, returned, live, and taken back (live when a resume began)."""
    num_unconfirmed: int
    """Facts behind the last saved state of an unfinished run that only one of two logs has."""

    @property
    def ok(self) -> bool:
        """Whether nothing is violated."""
        return not any(invariant.num_violations for invariant in self.invariants)


def check_logs(log_dir: Path) -> LedgerReport:
    """Check the logs of one run, `logs/<project>`.

    Raises RunFolderError when there are no logs, or a line (named as `file:line`) is not an event; ConfigError when
    config.yaml is damaged. Holds one small record per group in memory.
    """
    config_path, folder = log_dir / "config.yaml", log_dir / "events"
    for path in (config_path, folder / "hub.jsonl"):
        if not path.is_file():
            raise RunFolderError(f"{path}: no such file; give the log folder of a run, such as logs/GRPO")
    config = load_yaml(config_path.read_text(encoding="utf-8"), str(config_path))
    invariants = {name: Invariant(name, statement) for name, statement in INVARIANTS.items()}
    hub = HubReplay(config, invariants)
    torn: list[str] = []
    _read(folder / "hub.jsonl", hub.handle, torn)
    hub.finish()
    state = _check_end(hub, _finished_totals(log_dir, hub), invariants)
    join = _Join(config, hub, invariants, finished=state == "end")
    num_consumers = config.cluster.num_trainers or 0
    for rank in range(num_consumers):
        consumer = _ConsumerLog(join, rank)
        _read(folder / f"rank-{rank}.jsonl", consumer.handle, torn)
        join.consumer_versions.append(consumer.version)
    for rank in sorted({*_ranks_in(folder), *hub.applied} - set(range(num_consumers))):
        producer = _ProducerLog(join, rank)
        _read(folder / f"rank-{rank}.jsonl", producer.handle, torn)
        producer.finish()
    join.finish()
    _check_token_lag(invariants["token-lag"], config, join.max_lag, read_metrics(log_dir))
    return LedgerReport(
        invariants=tuple(invariants.values()),
        state=state,
        version=hub.version,
        num_starts=hub.life + 1,
        totals=hub.totals,
        num_unconfirmed=join.num_unconfirmed + len(torn),
    )


def _read(path: Path, handle: Callable[[Event], None], torn: list[str]) -> None:
    """Hand every event of a file over; a file that does not exist has none."""
    if not path.exists():
        return
    for number, event in enumerate(iter_events(path, torn.append), start=1):
        try:
            handle(event)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{path}:{number}: not an event of this program: {error!r}") from error


def _finished_totals(log_dir: Path, hub: HubReplay) -> dict[str, int] | None:
    """The totals of summary.json; None unless it tells of the end that the hub has planned.

    The plan alone proves nothing: END is planned while the last steps are still being trained.
    """
    path = log_dir / "summary.json"
    if hub.state != "end" or not path.exists():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        finished = summary["exit_reason"] == "finished" and summary["run"] == hub.run
        return dict(summary["ledger"]) if finished else None
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path}: not a summary of this program: {error!r}") from error


def _check_end(hub: HubReplay, summary: dict[str, int] | None, invariants: dict[str, Invariant]) -> str:
    """What must hold at the end of a run, if it came there; the state of the report."""
    if summary is None:
        return "open" if hub.state == "end" else hub.state
    live = hub.totals["live"]
    invariants["end"].expect(not live, "{} leases are live after the end; the first: {}", live, hub.first_live)
    text = "the plan ends with step {}, the hub committed {}"
    invariants["end"].expect(hub.planned_version == hub.version, text, hub.planned_version, hub.version)
    # A snapshot counts live groups as not leased, so the hub's totals leave out what a resume took back.
    totals = {**hub.totals, "leased": hub.totals["leased"] - hub.totals["taken back"]}
    agree = all(summary.get(kind, count) == count for kind, count in totals.items())
    invariants["accounting"].expect(agree, "the summary has {}, the hub's log {}", summary, totals)
    return "end"


def _ranks_in(folder: Path) -> list[int]:
    names = (re.fullmatch(r"rank-(\d+)\.jsonl", path.name) for path in folder.iterdir())
    return [int(name[1]) for name in names if name]


class _Join:
    """What all logs together say. Logs of ranks are read after the hub's, consumers first, then `finish`."""

    def __init__(self, config: RunConfig, hub: HubReplay, invariants: dict[str, Invariant], *, finished: bool) -> None:
        self.config, self.hub, self.invariants, self.finished = config, hub, invariants, finished
        self.published: dict[int, dict[int, str]] = {}
        """Version -> pipeline stage -> digest."""
        self.saved_version = hub.restored[-1] if hub.restored else 0
        self.consumer_versions: list[int] = []
        self.max_lag: dict[int, int] = {}
        """Step -> versions between it and the oldest token that it trained."""
        self.num_unconfirmed = 0

    def expect(self, name: str, holds: bool, text: str, *values: Any) -> bool:
        """See `Invariant.expect`."""
        return self.invariants[name].expect(holds, text, *values)

    def tolerates(self, holds_back: bool) -> bool:
        """Whether one log may lack what another has: only behind the last saved state of an unfinished run."""
        tolerated = holds_back and not self.finished
        self.num_unconfirmed += tolerated
        return tolerated

    def is_unsaved(self, line: int) -> bool:
        """Whether the next resume would move this line of the hub's log aside."""
        return line > max(self.hub.life_line, self.hub.snapshots.get(self.saved_version, 0))

    def ranks_of(self, dp_index: int) -> list[int]:
        """Consumer ranks of a data-parallel group."""
        size = self.config.trainer.tensor_parallel_size * self.config.trainer.pipeline_parallel_size
        return list(range(dp_index * size, (dp_index + 1) * size))

    def lease_of(self, rank: int, event: Event, invariant: str) -> Lease | None:
        """The lease that a line of a rank is about, if the hub knows it by this uid."""
        lease, lease_id = self.hub.leases.get(event["lease"]), event["lease"]
        if lease is None and self.tolerates(lease_id >= len(self.hub.leases)):
            return None
        same = lease is not None and lease.uid == uid_of(event)
        text = "rank {}: {} lease {}, uid {}; the hub knows {}"
        self.expect(invariant, same, text, rank, event["kind"], lease_id, event["uid"], lease or "no such lease")
        return lease if same else None

    def finish(self) -> None:
        """All logs have been read."""
        for lease in self.hub.leases.values():
            self._check_trained(lease)
            self._check_verdict(lease)
        for rank, version in enumerate(self.consumer_versions):
            last = self.hub.version
            if version < last and self.tolerates(version >= self.saved_version):
                continue
            self.expect("steps", version >= last, "rank {}: committed {} of {} versions", rank, version, last)

    def _check_trained(self, lease: Lease) -> None:
        wanted = self.ranks_of(lease.dp_index) if lease.state == "consumed" else sorted(set(lease.trained_by))
        missing = Counter(wanted) - Counter(lease.trained_by)
        if missing and self.tolerates(self.is_unsaved(lease.line)):
            return
        exact = sorted(lease.trained_by) == wanted
        self.expect("training", exact, "{} was trained by ranks {}, not {}", lease, lease.trained_by, wanted)

    def _check_verdict(self, lease: Lease) -> None:
        verdicts = [verdict["kind"] for verdict in lease.verdicts]
        if lease.state == "leased":
            self.expect("outcomes", len(verdicts) <= 1, "{}: its producer says {}", lease, verdicts)
            return
        wanted = _verdict_behind(lease)
        if not verdicts and wanted and self.tolerates(self.is_unsaved(lease.line)):
            return
        text = "{} is {}: its producer says {}, not {}"
        name = "delivery" if wanted == ["sent"] else "outcomes"
        self.expect(name, verdicts == wanted, text, lease, lease.state, verdicts or "nothing", wanted or "nothing")


def _verdict_behind(lease: Lease) -> list[str]:
    """What the producer must have written down for the hub to come to this state."""
    if lease.state in ("filtered", "returned"):
        return [lease.state]
    if lease.state == "dropped" and lease.end["reason"] != "end":
        # The last of several attempts that were returned drops the group.
        return ["returned" if lease.end["reason"] == "infrastructure" else "dropped"]
    return [] if lease.state == "taken back" else ["sent"]


class _ConsumerLog:
    """Reads the log of one consumer rank."""

    def __init__(self, join: _Join, rank: int) -> None:
        self.join, self.rank = join, rank
        self.version = 0

    def handle(self, event: Event) -> None:
        match event["kind"]:
            case "trained":
                self._trained(event)
            case "commit":
                self._commit(event["version"], event["skipped"])
            case "published":
                version, digest = event["version"], event["digest"]
                known = self.join.published.setdefault(version, {}).setdefault(event.get("stage", 0), digest)
                text = "version {} was published with digest {} and again with {}"
                self.join.expect("weights", digest == known, text, version, known, digest)
            case "saved" if self.rank == 0 and event["version"] in self.join.hub.snapshots:
                self.join.saved_version = max(self.join.saved_version, event["version"])

    def _trained(self, event: Event) -> None:
        join, step, oldest, newest = self.join, event["step"], event["oldest"], event["newest"]
        text = "rank {}: trained lease {} in step {} while version {} was open"
        join.expect("steps", step == self.version, text, self.rank, event["lease"], step, self.version)
        lag, bound = step - oldest, join.config.ledger.max_staleness
        strict = bound == 0 or join.config.ledger.stale == "wait"
        ordered = 0 <= oldest <= newest <= step
        text = "rank {}: lease {} with versions {} to {} trained in step {}"
        join.expect("staleness", ordered, text, self.rank, event["lease"], oldest, newest, step)
        if strict:
            text = "rank {}: lease {} trained {} versions late, the strict mode allows {}"
            join.expect("staleness", lag <= bound, text, self.rank, event["lease"], lag, bound)
        join.max_lag[step] = max(join.max_lag.get(step, 0), lag)

        lease = join.lease_of(self.rank, event, "training")
        if lease is None:
            return
        lease.trained_by.append(self.rank)
        if lease.state in ("leased", "buffered") and join.tolerates(True):
            return  # the hub was killed before it wrote the plan down
        planned = lease.state in ("consumed", "planned") or (lease.state == "dropped" and lease.step >= 0)
        text = "rank {}: trained {}, which is {}"
        join.expect("training", planned, text, self.rank, lease, lease.state)
        text = "rank {}: trained {} in step {} with checksum {}, the hub has step {} and {}"
        same = (step, event["crc"], oldest) == (lease.step, lease.crc, lease.oldest)
        join.expect("training", same, text, self.rank, lease, step, event["crc"], lease.step, lease.crc)
        mine = self.rank in join.ranks_of(lease.dp_index)
        join.expect("training", mine, "rank {}: trained {} of data-parallel rank {}", self.rank, lease, lease.dp_index)

    def _commit(self, version: int, skipped: bool) -> None:
        join, commits = self.join, self.join.hub.commits
        text = "rank {}: version {} follows {}"
        join.expect("steps", version == self.version + 1, text, self.rank, version, self.version)
        self.version = version
        if version in commits or not join.tolerates(version > join.hub.version):
            text = "rank {}: commits version {} (skipped: {}), the hub says {}"
            known = commits.get(version)
            join.expect("steps", skipped is known, text, self.rank, version, skipped, known)


class _ProducerLog:
    """Reads the log of one producer rank; consumers' logs must have been read."""

    def __init__(self, join: _Join, rank: int) -> None:
        self.join, self.rank = join, rank
        self.version = -1
        self.applied: dict[int, str] = {}

    def handle(self, event: Event) -> None:
        match event["kind"]:
            case "applied":
                self._applied(event["version"], event["digest"])
            case "live_digest":
                self._check_digest("live", event["version"], event["digest"], event.get("stage", 0))
            case "sent" | "filtered" | "dropped" | "returned":
                self._verdict(event)

    def finish(self) -> None:
        """Hold what the producer told the hub against what it has written down itself."""
        for line, version, digest in self.join.hub.applied.get(self.rank, []):
            if version not in self.applied and self.join.tolerates(self.join.is_unsaved(line)):
                continue
            text = "rank {}: the hub has version {} applied with digest {}, the producer {}"
            own = self.applied.get(version)
            self.join.expect("weights", own == digest, text, self.rank, version, digest, own)

    def _applied(self, version: int, digest: str) -> None:
        again = version == self.version and version in self.join.hub.restored
        text = "rank {}: went from version {} to {}"
        self.join.expect("versions", version > self.version or again, text, self.rank, self.version, version)
        self.version, self.applied[version] = version, digest
        self._check_digest("applied", version, digest)

    def _check_digest(self, what: str, version: int, digest: str, stage: int | None = None) -> None:
        """The digest of a stage, or of all of them."""
        published = self.join.published
        if version not in published and self.join.tolerates(version > max(published, default=-1)):
            return
        text = "rank {}: {} version {} has digest {}, published was {}"
        parts = published.get(version, {})
        known = parts.get(stage) if stage is not None else "+".join(parts[s] for s in sorted(parts)) or None
        self.join.expect("weights", digest == known, text, self.rank, what, version, digest, known)

    def _verdict(self, event: Event) -> None:
        join, kind = self.join, event["kind"]
        name = "delivery" if kind == "sent" else "outcomes"
        if kind == "sent":
            versions = (event["oldest"], event["newest"])
            held = all(version in self.applied for version in versions)
            text = "rank {}: lease {} was sampled with versions {} to {}, applied so far are up to {}"
            join.expect("versions", held, text, self.rank, event["lease"], *versions, self.version)
        lease = join.lease_of(self.rank, event, name)
        if lease is None:
            return
        lease.verdicts.append(event)
        mine = lease.producer_rank == self.rank and lease.attempt == event["attempt"]
        text = "rank {}: {} {} as attempt {}; the lease was rank {}'s"
        join.expect(name, mine, text, self.rank, kind, lease, event["attempt"], lease.producer_rank)
        text = "rank {}: {} {} with {}, the hub has {}"
        if kind == "sent" and lease.crc is not None:
            own, hubs = (event["crc"], event["oldest"]), (lease.crc, lease.oldest)
        elif kind == lease.state == "filtered":
            own, hubs = event["accuracy"], lease.end["accuracy"]
        elif kind == lease.state == "dropped":
            own, hubs = event["reason"], lease.end["reason"]
        else:
            return
        join.expect(name, own == hubs, text, self.rank, kind, lease, own, hubs)


def _check_token_lag(
    invariant: Invariant, config: RunConfig, max_lag: dict[int, int], metrics: list[dict[str, Any]]
) -> None:
    """Hold the trainer's own figures against the versions that the consumers wrote down."""
    bound = config.ledger.max_token_lag
    for record in metrics:
        step, lag, left_out = record["step"] - 1, record["staleness/max"], record["staleness/tokens_left_out"]
        if lag is None or step not in max_lag:
            continue
        text = "step {}: the metrics have a lag of {}, the consumers trained {}"
        invariant.expect(lag == max_lag[step], text, step, lag, max_lag[step])
        text = "step {}: the lag reached {}, the bound is {}, but {} tokens were left out"
        invariant.expect((left_out > 0) == (lag > bound), text, step, lag, bound, left_out)
