"""What the ledger keeps and hands out: options, leases, live groups, plan entries."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from zbgrpo.errors import ConfigError
from zbgrpo.types import Uid


class PlanKind(str, enum.Enum):
    """Kinds of entries of the plan stream."""

    TRAIN = "train"
    SAVE = "save"
    EVAL = "eval"
    STOP = "stop"
    END = "end"


class Lease(Struct, frozen=True):
    """Permission to generate one group now. `lease_id` is unique in a run; (uid, attempt) names the random numbers."""

    lease_id: int
    episode: int
    row: int
    attempt: int

    @property
    def uid(self) -> Uid:
        return Uid(self.episode, self.row)


class PlanEntry(Struct, frozen=True):
    """One line of the plan stream; every consumer acts on the same entries in the same order.

    TRAIN: train `ranks[dp_index]` (lease ids) as minibatch `minibatch` of the step that trains `version`; when
    `closes_step`, the optimizer step follows and makes version + 1, which is kept for an evaluation if `pin_version`.
    SAVE, EVAL: `version` is the version to be saved or evaluated. STOP: save the last commit and end. END: all done.
    """

    sequence: int
    kind: PlanKind
    version: int
    minibatch: int = 0
    closes_step: bool = False
    pin_version: bool = False
    ranks: list[list[int]] = []


@dataclass(slots=True)
class LiveGroup:
    """A group between its lease and its end. `oldest_version` is that of the lease until the group has arrived."""

    lease: Lease
    producer: int
    oldest_version: int
    num_tokens: int = 0
    crc: int = 0
    step: int = -1
    """The version that trains it, once planned."""


@dataclass(frozen=True)
class LedgerOptions:
    """Numbers that decide order, admission and planning. S = groups_per_step."""

    num_rows: int
    num_episodes: int
    groups_per_step: int
    groups_per_minibatch: int
    dp_size: int
    num_producers: int
    leases_per_producer: int
    buffer_limit: int
    order: Callable[[int], Sequence[int]]
    """Order of the rows in an episode."""
    max_staleness: int = 2
    stale: Literal["mask", "wait"] = "mask"
    max_steps: int | None = None
    plan_ahead: int = 2
    """TRAIN entries that may be planned and not yet trained: one in work, the others on their way."""
    save_interval: int | None = None
    eval_interval: int | None = None
    max_attempts: int = 3

    def __post_init__(self) -> None:
        if self.num_rows * self.num_episodes < self.groups_per_step:
            raise ConfigError(
                f"too few rows: {self.num_rows} usable rows x {self.num_episodes} episodes give "
                f"{self.num_rows * self.num_episodes} groups, one optimizer step needs {self.groups_per_step} "
                "(-tbs x data-parallel size); add rows, raise -e or lower -tbs"
            )
        if self.buffer_limit < self.groups_per_minibatch:
            raise ConfigError(f"buffer limit {self.buffer_limit} is below one minibatch ({self.groups_per_minibatch})")

    @property
    def synchronous(self) -> bool:
        """max_staleness 0: leases go out in rounds, plans are in uid order, runs repeat bit by bit."""
        return self.max_staleness == 0

    @property
    def strict(self) -> bool:
        """No group may train with a lag above max_staleness."""
        return self.synchronous or self.stale == "wait"

    @property
    def total_steps(self) -> int:
        """Steps of a run in which every group is effective; fewer happen when the filter drops groups."""
        steps = self.num_rows * self.num_episodes // self.groups_per_step
        return steps if self.max_steps is None else min(steps, self.max_steps)
