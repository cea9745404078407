"""What the ledger's rules cost: idle shares and lags in a simulated run, against the figures they were chosen for.

8 producers with 16 slots each, rates balanced, lognormal lengths with sigma 1: 128 groups are under way at a time,
which is half of S = 256 and twice S = 64. Ranges are wide: they say of what kind the figures are.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from tests.support.simulation import Balanced, play
from zbgrpo.planner.scenario import Figures

HALF = Balanced(groups_per_step=256, max_staleness=2, groups_per_minibatch=64)
TWICE = Balanced(groups_per_step=64, max_staleness=2, groups_per_minibatch=16, steps=120, warmup_steps=16)


@cache
def figures(scenario: Balanced) -> Figures:
    return play(scenario)


def test_with_half_a_step_under_way_the_default_staleness_idles_nobody() -> None:
    result = figures(HALF)
    assert abs(result.consumers.bubble) < 0.02
    assert abs(result.producers.bubble) < 0.02


def test_with_half_a_step_under_way_lags_are_small() -> None:
    result = figures(HALF)
    assert 0.7 < result.mean_token_lag < 1.5
    assert result.tokens_above(2) < 0.1
    assert result.tokens_above(8) < 0.01
    assert result.responses_within(4) > 0.98


def test_slow_responses_are_trained_late_instead_of_awaited() -> None:
    assert figures(HALF).max_response_lag > HALF.max_staleness


def test_with_two_steps_under_way_the_default_staleness_idles_a_few_percent() -> None:
    assert 0.005 < figures(TWICE).consumers.bubble < 0.15


def test_zero_bubble_needs_a_staleness_of_groups_in_flight_over_step_plus_one() -> None:
    # 128 / 64 + 1 = 3; one more than that leaves some room.
    idle = {
        staleness: figures(dataclasses.replace(TWICE, max_staleness=staleness)).consumers.bubble
        for staleness in (1, 2, 3, 4)
    }
    assert idle[1] > idle[2] > idle[3]
    assert idle[1] > 0.2
    assert idle[3] < 0.05
    assert idle[4] < 0.03


@pytest.mark.parametrize("max_staleness", [2, 4])
@pytest.mark.parametrize("scenario", [HALF, TWICE], ids=["half", "twice"])
def test_the_strict_mode_idles_much_and_keeps_every_lag_in_bounds(scenario: Balanced, max_staleness: int) -> None:
    result = figures(dataclasses.replace(scenario, max_staleness=max_staleness, stale="wait"))
    assert 0.2 < result.consumers.bubble < 0.95
    assert result.max_response_lag <= max_staleness


@pytest.mark.parametrize("scenario", [HALF, TWICE], ids=["half", "twice"])
def test_the_synchronous_mode_idles_most_and_has_no_lag(scenario: Balanced) -> None:
    result = figures(dataclasses.replace(scenario, max_staleness=0, steps=24))
    assert 0.5 < result.consumers.bubble < 0.97
    assert result.max_response_lag == 0


def test_the_filter_costs_samples_not_time() -> None:
    # Filtered groups free their places, so that admission does not run dry; the consumer is slower by the share.
    result = figures(dataclasses.replace(HALF, filtered_share=0.5))
    assert result.consumers.bubble < 0.05
    assert result.producers.bubble < 0.05


def test_more_leases_than_slots_keep_slots_busy_while_a_group_waits_for_its_last_response() -> None:
    # 16 slots are 4 groups of 4 responses: with 4 leases a slow response idles the slots of its group.
    four = dataclasses.replace(HALF, microbatch_groups=4, generations=4, groups_per_minibatch=32)
    few = figures(dataclasses.replace(four, leases_per_producer=4))
    many = figures(dataclasses.replace(four, leases_per_producer=16))
    assert few.producers.bubble > 0.2
    assert many.producers.bubble < 0.05


def test_the_same_scenario_gives_the_same_figures() -> None:
    assert play(TWICE) == figures(TWICE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stale", ["mask", "wait"])
def test_no_step_and_buffer_size_gets_stuck(stale: str, seed: int) -> None:
    for groups_per_step, minibatch, buffer_limit in ((8, 8, 8), (8, 2, 2), (48, 16, 16)):
        scenario = Balanced(
            groups_per_step,
            max_staleness=1,
            stale="mask" if stale == "mask" else "wait",
            groups_per_minibatch=minibatch,
            buffer_limit=buffer_limit,
            leases_per_producer=3,
            num_producers=4,
            microbatch_groups=2,
            generations=2,
            filtered_share=0.3,
            seed=seed,
        )
        assert play(scenario).step_seconds > 0
