"""Order of episodes: every row once, fixed by seed and episode on every machine."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zbgrpo.data.order import episode_order, permutation


@given(st.integers(0, 300), st.integers(0, 50), st.integers(0, 2**64 - 1))
def test_every_row_comes_once(num_rows: int, episode: int, seed: int) -> None:
    order = episode_order(num_rows, episode, seed)
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(num_rows))
    assert (order == episode_order(num_rows, episode, seed)).all()


def test_episodes_and_seeds_differ() -> None:
    orders = {tuple(episode_order(100, episode, seed).tolist()) for episode in range(5) for seed in range(5)}
    assert len(orders) == 25


def test_order_is_pinned() -> None:
    # A change here reshuffles the data of every run that is resumed with a newer release.
    assert episode_order(12, 0, 42).tolist() == PINNED_EPISODE_0
    assert episode_order(12, 1, 42).tolist() == PINNED_EPISODE_1


def test_places_are_even() -> None:
    # Where row 0 lands, over 4,000 seeds: chi-squared with 9 degrees of freedom stays below its 99.99 % point.
    places = [int(np.flatnonzero(permutation(10, seed, 0) == 0)[0]) for seed in range(4000)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 400) ** 2 / 400).sum() < 33.7


PINNED_EPISODE_0 = [6, 8, 5, 7, 11, 2, 0, 4, 9, 1, 3, 10]
PINNED_EPISODE_1 = [9, 2, 6, 3, 8, 7, 10, 0, 1, 11, 4, 5]
