"""Each promise about the groups of a run, once its logs break it, is reported by its name and in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_logs import Event, World, check, finished
from zbgrpo.engine.check_ledger import INVARIANTS


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


# The invariant that is broken, what the report says of it, and how.
LIES: list[tuple[str, str, Callable[[World], Any]]] = [
    ("once", "lease 19 (uid 0:4, attempt 0): the uid is live or has ended already", _lease_settled_uid),
    ("once", "lease 1 (uid 0:0, attempt 0): the uid is live or has ended already", _lease_live_uid),
    ("once", "uid 0:2 is consumed again", _consume_twice),
    ("accounting", "the summary has", _drop("hub", "filtered")),
    ("accounting", "what is known is lease 2 (uid 0:2, attempt 0), leased", _drop("hub", "buffered", lease=2)),
    (
        "accounting",
        "lease 7 (uid 0:5, attempt 0), but it was returned 1 times",
        _set("hub", "leased", where={"lease": 7}, attempt=0),
    ),
    (
        "accounting",
        "lease 40 (uid 0:14, attempt 0) comes after 18 others",
        _set("hub", "leased", where={"lease": 18}, lease=40),
    ),
    (
        "accounting",
        "lease 21 (uid 1:3, attempt 0): there are 1 episodes",
        _set("hub", "leased", where={"lease": 21}, uid=[1, 3]),
    ),
    (
        "accounting",
        "lease 3 (uid 0:30, attempt 0) is consumed, but what is known is lease 3 (uid 0:3",
        _set("hub", "consumed", where={"lease": 3}, uid=[0, 30]),
    ),
    (
        "accounting",
        "is consumed by step 0 with checksum 5; it was planned for 0 with 1003",
        _set("hub", "consumed", where={"lease": 3}, crc=5),
    ),
    (
        "accounting",
        "is consumed by step 1 with checksum 1003; it was planned for 0 with 1003",
        _set("hub", "consumed", where={"lease": 3}, step=1),
    ),
    ("accounting", "the summary has", _miscount),
    ("admission", "place 8 is not below (0 + 1 + 1) x 4", _set("hub", "leased", where={"lease": 6}, place=8)),
    ("admission", "place 5, but 6 are taken", _set("hub", "leased", where={"lease": 6}, place=5)),
    ("admission", "granted for version 1, producer 0 holds 0", _set("hub", "leased", where={"lease": 6}, applied=1)),
    ("plan", "entry 5 comes where 1 is due", _set("hub", "plan", 1, sequence=5)),
    ("plan", "entry 5 comes where 0 is due", _set("hub", "plan", where={"version": 2, "entry": "train"}, sequence=5)),
    ("plan", "entry 1 is of step 1, open is 0", _set("hub", "plan", 1, version=1)),
    (
        "plan",
        "entry 0 shares out [2, 0] groups, not 1 to each of 2 data-parallel ranks",
        _set("hub", "plan", ranks=[[0, 1], []]),
    ),
    ("plan", "step 0 has 2 groups of 4, closed: True", _set("hub", "plan", closes=True)),
    ("plan", "step 0 has 4 groups of 4, closed: False", _set("hub", "plan", 1, closes=False)),
    ("plan", "entry 0 names lease 99, which is not in the buffer", _set("hub", "plan", ranks=[[0], [99]])),
    (
        "delivery",
        "sent lease 0 (uid 0:0, attempt 0) with (5, 0), the hub has (1000, 0)",
        _set(2, "sent", where={"lease": 0}, crc=5),
    ),
    (
        "delivery",
        "sent lease 0, uid [0, 1]; the hub knows lease 0 (uid 0:0",
        _set(2, "sent", where={"lease": 0}, uid=[0, 1]),
    ),
    (
        "delivery",
        "sent lease 0 (uid 0:0, attempt 0) as attempt 1; the lease was rank 2's",
        _set(2, "sent", where={"lease": 0}, attempt=1),
    ),
    ("delivery", "with (1017, 0), the hub has (1017, 2)", _set(3, "sent", where={"lease": 17}, oldest=0)),
    ("delivery", "is consumed: its producer says nothing, not ['sent']", _drop(2, "sent", lease=0)),
    ("delivery", "rank 3: sent lease 0 (uid 0:0, attempt 0) as attempt 0; the lease was rank 2's", _sent_by_another),
    ("delivery", "its producer says ['sent', 'sent'], not ['sent']", _sent_twice),
    ("outcomes", "is filtered: its producer says nothing, not ['filtered']", _drop(2, "filtered")),
    ("outcomes", "with 0.5, the hub has 1.0", _set(2, "filtered", accuracy=0.5)),
    ("outcomes", "with non_finite, the hub has reward_error", _set(2, "dropped", reason="non_finite")),
    ("outcomes", "is dropped: its producer says nothing, not ['dropped']", _drop(2, "dropped")),
    ("outcomes", "is returned: its producer says nothing, not ['returned']", _drop(3, "returned")),
    ("outcomes", "is taken back: its producer says ['sent'], not nothing", _line_of_a_lease_taken_back),
    (
        "training",
        "in step 0 with checksum 5, the hub has step 0 and 1000",
        _set(0, "trained", where={"lease": 0}, crc=5),
    ),
    (
        "training",
        "trained lease 0, uid [0, 1]; the hub knows lease 0 (uid 0:0",
        _set(0, "trained", where={"lease": 0}, uid=[0, 1]),
    ),
    ("training", "lease 1 (uid 0:1, attempt 0) was trained by ranks [], not [1]", _drop(1, "trained", lease=1)),
    ("training", "was trained by ranks [0, 0], not [0]", _trained_twice),
    ("training", "rank 1: trained lease 0 (uid 0:0, attempt 0) of data-parallel rank 0", _trained_by_the_wrong_rank),
    ("training", "trained lease 77, uid [0, 0]; the hub knows no such lease", _leased_by_nobody),
    (
        "training",
        "in step 1 with checksum 1000, the hub has step 0 and 1000",
        _set(0, "trained", where={"lease": 0}, step=1),
    ),
    (
        "steps",
        "rank 0: trained lease 0 in step 1 while version 0 was open",
        _set(0, "trained", where={"lease": 0}, step=1),
    ),
    ("steps", "version 3 follows 1", _drop("hub", "commit", 1)),
    ("steps", "rank 1: version 3 follows 1", _drop(1, "commit", 1)),
    ("steps", "rank 1: committed 2 of 3 versions", _drop(1, "commit", 2)),
    ("steps", "rank 1: version 2 follows 0", lambda world: _move_behind(world, "commit", 1, 0, 1)),
    ("steps", "rank 1: commits version 1 (skipped: True), the hub says False", _set(1, "commit", skipped=True)),
    (
        "steps",
        "step 0 consumes the leases [0, 1, 3], the plan names [0, 1, 2, 3], S is 4",
        _drop("hub", "consumed", lease=2),
    ),
    ("staleness", "lease 0 with versions 0 to 1 trained in step 0", _set(0, "trained", where={"lease": 0}, newest=1)),
    ("staleness", "lease 15 with versions 2 to 0 trained in step 2", _set(0, "trained", where={"lease": 15}, newest=0)),
    (
        "token-lag",
        "step 0: the lag reached 0, the bound is 3, but 3.0 tokens were left out",
        lambda world: world.metrics[0].update({"staleness/tokens_left_out": 3.0}),
    ),
    (
        "token-lag",
        "step 1: the metrics have a lag of 0, the consumers trained 1",
        lambda world: world.metrics[1].update({"staleness/max": 0}),
    ),
    ("versions", "producer 0 went from version 1 to 0", lambda world: _move_behind(world, "applied", "hub", 0, 2)),
    ("versions", "rank 2: went from version 1 to 0", lambda world: _move_behind(world, "applied", 2, 0, 1)),
    ("versions", "rank 2: went from version 0 to 0", _set(2, "applied", 1, version=0, digest="digest-0")),
    (
        "versions",
        "lease 0 was sampled with versions 0 to 1, applied so far are up to 0",
        _set(2, "sent", where={"lease": 0}, newest=1),
    ),
    (
        "weights",
        "rank 2: the hub has version 0 applied with digest x, the producer digest-0",
        _set("hub", "applied", digest="x"),
    ),
    ("weights", "rank 2: applied version 0 has digest x, published was digest-0", _set(2, "applied", digest="x")),
    ("weights", "rank 3: live version 1 has digest x, published was digest-1", _set(3, "live_digest", 1, digest="x")),
    ("weights", "applied version 1 has digest digest-1, published was None", _drop(0, "published", 1)),
    ("weights", "version 2 was published with digest digest-2 and again with x", _set(0, "published", 3, digest="x")),
    ("weights", "the hub has version 1 applied with digest digest-1, the producer None", _drop(2, "applied", 1)),
    ("resume", "a new start behind a line of kind 'plan', not behind the snapshot of version 2", _forget_snapshot),
    ("resume", "a start from version 1, but 2 is committed", _set("hub", "started", 1, version=1)),
    ("resume", "snapshot of 1, committed is 2", _set("hub", "snapshot", version=1)),
    ("end", "1 leases are live after the end; the first: lease 21 (uid 0:21", _leave_one_live),
    ("end", "the plan ends with step 4, the hub committed 3", _end_without_last_commit),
]


@pytest.mark.parametrize(("name", "text", "lie"), LIES, ids=[f"{name}: {text}" for name, text, _ in LIES])
def test_lie_is_reported_by_its_name(tmp_path: Path, name: str, text: str, lie: Callable[[World], Any]) -> None:
    world = finished()
    lie(world)
    report = check(world, tmp_path)
    assert not report.ok
    invariant = next(invariant for invariant in report.invariants if invariant.name == name)
    assert invariant.num_violations >= len(invariant.violations) > 0
    assert [violation for violation in invariant.violations if text in violation], invariant.violations


def test_every_invariant_has_a_lie() -> None:
    assert {name for name, _, _ in LIES} == set(INVARIANTS)
