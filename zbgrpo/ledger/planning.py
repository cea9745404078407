"""Which buffered groups form the next minibatch, and which data-parallel rank trains which. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from zbgrpo.ledger.records import LiveGroup
from zbgrpo.types import Uid


class OpenStep:
    """The step that is being planned: its version, its groups so far, and the tokens of each rank in it.

    Example: S = 4 in minibatches of 2: the second `add` returns closes = True.
    """

    def __init__(self, version: int, groups_per_step: int, dp_size: int) -> None:
        self.version = version
        self.num_groups = self.num_minibatches = 0
        self._groups_per_step = groups_per_step
        self._tokens = [0] * dp_size

    @property
    def num_missing(self) -> int:
        return self._groups_per_step - self.num_groups

    def add(self, groups: Sequence[LiveGroup]) -> tuple[list[list[int]], bool]:
        """Take the groups of the next minibatch: lease ids by rank, and whether they complete the step."""
        ranks = balance(groups, self._tokens)
        tokens = {group.lease.lease_id: group.num_tokens for group in groups}
        for rank, lease_ids in enumerate(ranks):
            self._tokens[rank] += sum(tokens[lease_id] for lease_id in lease_ids)
        for group in groups:
            group.step = self.version
        self.num_groups += len(groups)
        self.num_minibatches += 1
        return ranks, self.num_missing == 0


def balance(groups: Sequence[LiveGroup], loads: Sequence[int]) -> list[list[int]]:
    """Deal groups to ranks, the same number to each, so that tokens even out: lists of lease ids by rank.

    `loads` are the tokens each rank already has in the open step. Deterministic: longest group first (ties by order),
    each to the rank with the fewest tokens that still has room. Example: tokens 9, 5, 4, 2 to two idle ranks gives
    (9, 2) and (5, 4).
    """
    num_ranks = len(loads)
    room = [len(groups) // num_ranks] * num_ranks
    tokens = list(loads)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for group in sorted(groups, key=lambda g: -g.num_tokens):
        rank = min((r for r in range(num_ranks) if room[r]), key=lambda r: tokens[r])
        ranks[rank].append(group.lease.lease_id)
        tokens[rank] += group.num_tokens
        room[rank] -= 1
    return ranks


def in_arrival_order(buffered: Iterable[LiveGroup], count: int) -> list[LiveGroup] | None:
    """The `count` groups that arrived first, or None while there are fewer."""
    taken = []
    for group in buffered:
        taken.append(group)
        if len(taken) == count:
            return taken
    return None


def in_uid_order(
    buffered: Iterable[LiveGroup], leased: Iterable[LiveGroup], count: int, place: Callable[[Uid], tuple[int, int]]
) -> list[LiveGroup] | None:
    """The `count` groups first in data order, or None while one that is still generated could come before them."""
    taken = sorted(buffered, key=lambda g: place(g.lease.uid))[:count]
    if len(taken) < count:
        return None
    last = place(taken[-1].lease.uid)
    return None if any(place(g.lease.uid) < last for g in leased) else taken


def by_deadline(
    buffered: Sequence[LiveGroup],
    leased: Sequence[LiveGroup],
    count: int,
    *,
    filled_places: int,
    groups_per_step: int,
    max_staleness: int,
) -> list[LiveGroup] | None:
    """The `count` groups whose last chance comes first, or None while taking them could make another one too late.

    A group's last chance is the step that trains version oldest_version + max_staleness. Steps 0..d have
    (d + 1) x S places, of which `filled_places` (consumed and planned) are gone. Taking the groups is right when
    afterwards, for every step d, the live groups whose last chance is at or before d still fit the places left
    through d. Example: S = 2, one place left in step 5, a buffered group with last chance 6 and one still being
    generated with last chance 5: the planner waits, because the place belongs to the second.
    """
    if len(buffered) < count:
        return None
    ordered = sorted(buffered, key=lambda g: g.oldest_version)
    taken, rest = ordered[:count], ordered[count:]
    filled = filled_places + count
    deadlines = sorted(g.oldest_version + max_staleness for g in [*rest, *leased])
    for number, deadline in enumerate(deadlines, start=1):
        if number > (deadline + 1) * groups_per_step - filled:
            return None
    return taken
