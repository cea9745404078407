"""The temperature of a group: linear through the first episode, the same for every rank that asks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.models import logprobs_of, random_group, tiny_model
from zbgrpo.algorithms.packing import PackingRules, pack
from zbgrpo.algorithms.temperature import TemperatureSchedule
from zbgrpo.config.schema import InferenceConfig
from zbgrpo.data.order import episode_order
from zbgrpo.types import Uid


def test_it_stays_where_it_is_without_an_end() -> None:
    schedule = TemperatureSchedule(InferenceConfig(temperature=0.7), 5, 1)
    assert {schedule.at(Uid(episode, row)) for episode in range(3) for row in range(5)} == {0.7}


def test_the_example_of_the_class() -> None:
    schedule = TemperatureSchedule(InferenceConfig(temperature=1.0, temperature_end=0.8), 3, 42)
    order = episode_order(3, 0, 42).tolist()
    assert [schedule.at(Uid(0, row)) for row in order] == pytest.approx([1.0, 0.9, 0.8])
    assert {schedule.at(Uid(1, row)) for row in range(3)} == {0.8}


def test_it_may_rise_and_one_row_is_enough() -> None:
    rising = TemperatureSchedule(InferenceConfig(temperature=0.5, temperature_end=1.5), 101, 7)
    values = [rising.at(Uid(0, int(row))) for row in episode_order(101, 0, 7)]
    assert values == pytest.approx(np.linspace(0.5, 1.5, 101).tolist())
    assert TemperatureSchedule(InferenceConfig(temperature=0.5, temperature_end=1.5), 1, 7).at(Uid(0, 0)) == 0.5


def test_a_microbatch_keeps_every_groups_temperature() -> None:
    model, generator = tiny_model(), np.random.default_rng(3)
    heats = [0.7, 1.0, 1.6]
    groups = [random_group(model, generator, num_responses=3, temperature=heat, version=1) for heat in heats]
    (batch,) = pack(groups, 1, PackingRules(100, 8, False), heats)
    assert isinstance(batch.temperature, torch.Tensor)
    expected = np.repeat(heats, [len(group.response_ids) for group in groups])
    np.testing.assert_allclose(batch.temperature.numpy(), expected, rtol=1e-6)
    assert batch.stats["temperature"] == pytest.approx(3 * sum(heats))
    # What was recorded is the log-prob at just that temperature.
    first = groups[2].response_ids[: groups[2].lengths[0]]
    with torch.no_grad():
        again = logprobs_of(model.double(), groups[2].prompt_ids, first, heats[2])
    np.testing.assert_allclose(groups[2].logprobs[: len(first)], again.numpy(), atol=1e-5)


def test_one_temperature_is_one_number() -> None:
    model, generator = tiny_model(), np.random.default_rng(3)
    groups = [random_group(model, generator, num_responses=2, temperature=0.9, version=1) for _ in range(3)]
    batches = pack(groups, 1, PackingRules(4, 8, False), [0.9] * 3)
    assert [batch.temperature for batch in batches] == [0.9, 0.9]
