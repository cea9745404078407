"""Which uid is leased next: episodes in order, retried uids first, settled ones (after a resume) skipped."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zbgrpo.types import Uid


class DataOrder:
    """A cursor over episodes x rows. Each uid is handed out once, and again only after `give_back`.

    Invariant: everything behind the cursor is live, settled or in the heap of retried uids; everything at or ahead of
    it has not been handed out in this process. Example: order (2, 0, 1) hands out rows 2, 0; row 2 is given back and
    comes next, with attempt 1, before row 1.
    """

    def __init__(self, num_rows: int, num_episodes: int, order: Callable[[int], Sequence[int]]) -> None:
        self.num_rows, self.num_episodes = num_rows, num_episodes
        self._order_of = order
        self._episode, self._position = 0, 0
        self._order = order(0)
        self._retried: list[tuple[int, int, int, int]] = []  # heap of (episode, position, row, attempt)
        self._settled: dict[int, np.ndarray] = {}  # episode -> bool [num_rows]
        self._places: dict[int, np.ndarray] = {}
        self._attempts: dict[Uid, int] = {}  # attempt numbers that a resume carries over

    @property
    def has_next(self) -> bool:
        """Whether anything is left to hand out."""
        return bool(self._retried) or self._episode < self.num_episodes

    @property
    def first_retried(self) -> tuple[int, int] | None:
        """The place of the uid that was given back and comes next; None when none waits."""
        return self._retried[0][:2] if self._retried else None

    def next(self) -> tuple[Uid, int]:
        """The next uid and its attempt."""
        if self._retried:
            episode, _, row, attempt = heapq.heappop(self._retried)
            return Uid(episode, row), attempt
        uid = Uid(self._episode, int(self._order[self._position]))
        self._position += 1
        self._skip_settled()
        return uid, self._attempts.pop(uid, 0)

    def give_back(self, uid: Uid, next_attempt: int) -> None:
        """Hand the uid out again, before anything new."""
        heapq.heappush(self._retried, (*self.place(uid), uid.row, next_attempt))

    def settle(self, uid: Uid) -> None:
        """The uid has ended for good."""
        self._settled.setdefault(uid.episode, np.zeros(self.num_rows, dtype=bool))[uid.row] = True

    def is_settled(self, uid: Uid) -> bool:
        """Whether the uid has ended for good."""
        return uid.episode in self._settled and bool(self._settled[uid.episode][uid.row])

    def place(self, uid: Uid) -> tuple[int, int]:
        """Where a uid stands in the data order: (episode, position)."""
        if uid.episode not in self._places:
            inverse = np.empty(self.num_rows, dtype=np.int64)
            inverse[np.asarray(self._order_of(uid.episode))] = np.arange(self.num_rows)
            self._places[uid.episode] = inverse
        return uid.episode, int(self._places[uid.episode][uid.row])

    def _skip_settled(self) -> None:
        while self._episode < self.num_episodes:
            if self._position >= self.num_rows:
                self._episode, self._position = self._episode + 1, 0
                if self._episode < self.num_episodes:
                    self._order = self._order_of(self._episode)
            elif self.is_settled(Uid(self._episode, int(self._order[self._position]))):
                self._position += 1
            else:
                return

    def snapshot(self, live_attempts: dict[Uid, int]) -> dict[str, Any]:
        """Settled uids and attempt numbers, as plain msgpack types; live uids count as not handed out."""
        attempts = {Uid(e, r): a for e, _, r, a in self._retried} | self._attempts | live_attempts
        return {
            "settled": {str(e): np.packbits(bits).tobytes() for e, bits in self._settled.items()},
            "attempts": [[*uid, attempt] for uid, attempt in sorted(attempts.items()) if attempt],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take a snapshot; only on a fresh object with the same order."""
        for episode, packed in state["settled"].items():
            bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=self.num_rows)
            self._settled[int(episode)] = bits.astype(bool)
        self._attempts = {Uid(episode, row): attempt for episode, row, attempt in state["attempts"]}
        self._skip_settled()
