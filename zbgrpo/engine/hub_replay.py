"""The hub's log, replayed line by line: what became of every lease, and whether the log agrees with itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zbgrpo.config.schema import RunConfig

Event = dict[str, Any]

_NUM_SHOWN = 5
_ENDS = ("consumed", "filtered", "dropped", "returned")


@dataclass
class Invariant:
    """One promise: how often it was checked, and the first violations in words."""

    name: str
    statement: str
    num_checked: int = 0
    num_violations: int = 0
    violations: list[str] = field(default_factory=list)

    def expect(self, holds: bool, text: str, *values: Any) -> bool:
        """Count one check; when it fails, keep `text.format(*values)`. Returns `holds`."""
        self.num_checked += 1
        if not holds:
            self.num_violations += 1
            if len(self.violations) < _NUM_SHOWN:
                self.violations.append(text.format(*values))
        return holds


@dataclass
class Lease:
    """What the logs say of one lease.

    States: leased -> buffered -> planned -> consumed; leased -> filtered, returned; dropped from all of the first
    three; and from these three also taken back, when a resume makes the group pending again.
    """

    lease_id: int
    uid: tuple[int, int]
    attempt: int
    producer_rank: int
    applied: int
    """The version that its producer held, as the lease says."""
    life: int
    line: int
    """Of the hub's log, where the state was reached."""
    state: str = "leased"
    crc: int | None = None
    """None until the payload has arrived."""
    oldest: int = -1
    step: int = -1
    """The version that trains it, -1 until it is planned; so is `dp_index`."""
    dp_index: int = -1
    end: Event = field(default_factory=dict)
    verdicts: list[Event] = field(default_factory=list)
    """Lines of producers about it: sent, filtered, dropped, returned."""
    trained_by: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"lease {self.lease_id} (uid {self.uid[0]}:{self.uid[1]}, attempt {self.attempt})"


def uid_of(event: Event) -> tuple[int, int]:
    """The uid that an event names."""
    episode, row = event["uid"]
    return episode, row


class HubReplay:
    """Keeps the hub's books again. A life is the time from one start to the next; a run that never stopped has one.

    Call `handle` with every event in order, then `finish`. `invariants` collects what is wrong.
    """

    def __init__(self, config: RunConfig, invariants: dict[str, Invariant]) -> None:
        self.config, self._invariants = config, invariants
        self.leases: dict[int, Lease] = {}
        self.counts: Counter[str] = Counter()
        """Lines by kind, and `taken back`."""
        self.version = self.life = self.line = self.life_line = 0
        self.restored: list[int] = []
        """Versions that a resume began with."""
        self.commits: dict[int, bool] = {}
        """Version -> skipped."""
        self.snapshots: dict[int, int] = {}
        """Version -> line."""
        self.applied: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        """Rank of the producer -> (line, version, digest)."""
        self.run = ""
        """Id of the last start."""
        self.state = "open"
        """`end` or `stop` once that is planned; `open` before it, and after a failure."""
        self._live: dict[int, Lease] = {}
        self._settled: set[tuple[int, int]] = set()
        self._consumed: set[tuple[int, int]] = set()
        self._returned: Counter[tuple[int, int]] = Counter()
        self._in_step: dict[int, list[int]] = defaultdict(list)
        self._consumed_now: list[int] = []
        self._last_kind = ""
        self._handlers: dict[str, Callable[[Event], None]] = {
            "started": self._start,
            "hello": self._hello,
            "applied": self._apply,
            "leased": self._lease,
            "buffered": self._buffer,
            "plan": self._plan,
            "consumed": self._consume,
            "filtered": self._finish_lease,
            "dropped": self._finish_lease,
            "returned": self._finish_lease,
            "commit": self._commit,
            "snapshot": self._snapshot,
            "failed": self._fail,
        }
        self._begin_life()

    @property
    def totals(self) -> dict[str, int]:
        """Leases: leased, consumed, filtered, dropped, returned, taken back (live when a resume began), live."""
        kinds = ("leased", *_ENDS, "taken back")
        return {kind: self.counts[kind] for kind in kinds} | {"live": len(self._live)}

    @property
    def first_live(self) -> Lease | None:
        """The oldest lease that has not ended."""
        return next(iter(self._live.values()), None)

    @property
    def planned_version(self) -> int:
        """The version that stands when every planned step has committed."""
        return self._step

    def handle(self, event: Event) -> None:
        """Take the next line."""
        self.line += 1
        kind = event["kind"]
        self.counts[kind] += 1
        if (handler := self._handlers.get(kind)) is not None:
            handler(event)
        self._last_kind = kind

    def finish(self) -> None:
        """All lines have been read: hold the numbers of lines against each other."""
        totals = self.totals
        accounted = sum(totals.values()) - totals["leased"]
        self._expect("accounting", totals["leased"] == accounted, "the lines do not add up: {}", totals)

    def _expect(self, name: str, holds: bool, text: str, *values: Any) -> bool:
        return self._invariants[name].expect(holds, "hub, line {}: " + text, self.line, *values)

    # ---------------------------------------------------------------- starts

    def _begin_life(self) -> None:
        self._ranks: dict[str, int] = {}  # by the name of the peer
        self._held: dict[int, int] = {}  # producer -> version
        self._sequence, self._step, self.state = 0, self.version, "open"

    def _start(self, event: Event) -> None:
        self.run = event["run"]
        version, behind = event["version"], self.version
        self._expect("resume", version == behind, "a start from version {}, but {} is committed", version, behind)
        if self.line > 1:
            self._resume()

    def _hello(self, event: Event) -> None:
        self._ranks[event["peer"]] = event["rank"]

    def _resume(self) -> None:
        behind_snapshot = self.snapshots.get(self.version) == self.line - 1
        text = "a new start behind a line of kind {!r}, not behind the snapshot of version {}"
        self._expect("resume", behind_snapshot, text, self._last_kind, self.version)
        self.counts["taken back"] += len(self._live)
        for lease in self._live.values():
            lease.state = "taken back"
        self._live.clear()
        self._consumed_now.clear()
        for step in [step for step in self._in_step if step >= self.version]:
            del self._in_step[step]
        self.restored.append(self.version)
        self.life, self.life_line = self.life + 1, self.line
        self._begin_life()

    def _snapshot(self, event: Event) -> None:
        version = event["version"]
        self._expect("resume", version == self.version, "snapshot of {}, committed is {}", version, self.version)
        self.snapshots[version] = self.line

    def _fail(self, event: Event) -> None:
        self.state = "open"

    def _apply(self, event: Event) -> None:
        producer, version = event["producer"], event["version"]
        before, rank = self._held.get(producer, -1), self._ranks.get(f"producer:{producer}", -1)
        self._expect("versions", version > before, "producer {} went from version {} to {}", producer, before, version)
        self._held[producer] = version
        self.applied[rank].append((self.line, version, event["digest"]))

    # ---------------------------------------------------------------- the way of a lease

    def _lease(self, event: Event) -> None:
        producer, applied, place, uid = event["producer"], event["applied"], event["place"], uid_of(event)
        rank = self._ranks.get(f"producer:{producer}", -1)
        lease = Lease(event["lease"], uid, event["attempt"], rank, applied, self.life, self.line)
        count, returned = len(self.leases), self._returned[uid]
        self._expect("accounting", lease.lease_id == count, "{} comes after {} others", lease, count)
        self._expect("accounting", lease.attempt == returned, "{}, but it was returned {} times", lease, returned)
        in_range = 0 <= uid[0] < self.config.data.num_episodes
        self._expect("accounting", in_range, "{}: there are {} episodes", lease, self.config.data.num_episodes)
        taken = uid in self._settled or any(other.uid == uid for other in self._live.values())
        self._expect("once", not taken, "{}: the uid is live or has ended already", lease)

        size, bound, held = self.config.groups_per_step, self.config.ledger.max_staleness, self._held.get(producer, -1)
        occupied = self.version * size + len(self._live)
        text = "{}: granted for version {}, producer {} holds {}"
        self._expect("admission", applied == held, text, lease, applied, producer, held)
        self._expect("admission", place == occupied, "{}: place {}, but {} are taken", lease, place, occupied)
        text = "{}: place {} is not below ({} + 1 + {}) x {}"
        self._expect("admission", place < (applied + 1 + bound) * size, text, lease, place, applied, bound, size)
        self.leases[lease.lease_id] = self._live[lease.lease_id] = lease

    def _move(self, event: Event, before: tuple[str, ...], after: str) -> Lease | None:
        """The lease in its new state; None when the log has no right to move it there, which is a violation."""
        lease_id, uid = event["lease"], uid_of(event)
        lease = self._live.get(lease_id)
        legal = lease is not None and lease.state in before and (lease.uid, lease.attempt) == (uid, event["attempt"])
        known = self.leases.get(lease_id)
        text = "lease {} (uid {}:{}, attempt {}) is {}, but what is known is {}, {}"
        state = known.state if known else "never leased"
        self._expect("accounting", legal, text, lease_id, *uid, event["attempt"], event["kind"], known, state)
        if lease is None or not legal:
            return None
        lease.state, lease.line = after, self.line
        return lease

    def _buffer(self, event: Event) -> None:
        lease = self._move(event, ("leased",), "buffered")
        if lease is not None:
            lease.crc, lease.oldest = event["crc"], event["oldest"]

    def _consume(self, event: Event) -> None:
        uid = uid_of(event)
        self._expect("once", uid not in self._consumed, "uid {}:{} is consumed again", *uid)
        self._consumed.add(uid)
        lease = self._move(event, ("planned",), "consumed")
        if lease is None:
            return
        text = "{} is consumed by step {} with checksum {}; it was planned for {} with {}"
        same = (event["step"], event["crc"], event["oldest"]) == (lease.step, lease.crc, lease.oldest)
        self._expect("accounting", same, text, lease, event["step"], event["crc"], lease.step, lease.crc)
        self._consumed_now.append(lease.lease_id)
        self._close(lease, event)

    def _finish_lease(self, event: Event) -> None:
        at_end = event["kind"] == "dropped" and event["reason"] == "end"
        lease = self._move(event, ("buffered", "planned") if at_end else ("leased",), event["kind"])
        if lease is not None:
            self._close(lease, event)

    def _close(self, lease: Lease, event: Event) -> None:
        del self._live[lease.lease_id]
        lease.end = event
        if event["kind"] == "returned":
            self._returned[lease.uid] += 1
        else:
            self._settled.add(lease.uid)

    # ---------------------------------------------------------------- plan and steps

    def _plan(self, event: Event) -> None:
        number, step, kind = event["sequence"], event["version"], event["entry"]
        self._expect("plan", number == self._sequence, "entry {} comes where {} is due", number, self._sequence)
        self._expect("plan", step == self._step, "entry {} is of step {}, open is {}", number, step, self._step)
        self._sequence = number + 1
        if kind in ("end", "stop"):
            self.state = kind
        if kind != "train":
            return
        share, dp_size = self.config.trainer.train_minibatch_size, self.config.dp_size
        shares = [len(lease_ids) for lease_ids in event["ranks"]]
        text = "entry {} shares out {} groups, not {} to each of {} data-parallel ranks"
        self._expect("plan", shares == [share] * dp_size, text, number, shares, share, dp_size)
        for dp_index, lease_ids in enumerate(event["ranks"]):
            for lease_id in lease_ids:
                self._plan_group(event, lease_id, dp_index)
        size, count = self.config.groups_per_step, len(self._in_step[step])
        full = count == size if event["closes"] else count < size
        self._expect("plan", full, "step {} has {} groups of {}, closed: {}", step, count, size, event["closes"])
        if event["closes"]:
            self._step = step + 1

    def _plan_group(self, event: Event, lease_id: int, dp_index: int) -> None:
        self._in_step[event["version"]].append(lease_id)
        lease = self._live.get(lease_id)
        buffered = lease is not None and lease.state == "buffered"
        text = "entry {} names lease {}, which is not in the buffer"
        self._expect("plan", buffered, text, event["sequence"], lease_id)
        if lease is not None and buffered:
            lease.state, lease.step, lease.dp_index, lease.line = "planned", event["version"], dp_index, self.line

    def _commit(self, event: Event) -> None:
        version, size = event["version"], self.config.groups_per_step
        self._expect("steps", version == self.version + 1, "version {} follows {}", version, self.version)
        planned, consumed = sorted(self._in_step[version - 1]), sorted(self._consumed_now)
        text = "step {} consumes the leases {}, the plan names {}, S is {}"
        exact = planned == consumed and len(consumed) == size
        self._expect("steps", exact, text, version - 1, consumed, planned, size)
        self._consumed_now.clear()
        self.version, self.commits[version] = version, event["skipped"]
