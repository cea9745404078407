"""Random numbers of responses, and drawing tokens with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from zbgrpo.inference.sampling import sample, stream, uniforms
from zbgrpo.types import Uid

LARGEST_DRAW = 1 - 2.0**-53


def chi_square_is_plausible(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Within five standard deviations of what the statistic is for draws from `expected`."""
    assert (expected > 5).all(), "too few draws for the test"
    freedom = len(expected) - 1
    return float(((observed - expected) ** 2 / expected).sum()) < freedom + 5 * math.sqrt(2 * freedom)


def draw(weights: torch.Tensor, draws: np.ndarray, top_k: int | None = None, top_p: float = 1.0) -> np.ndarray:
    """Tokens for these draws, all from one distribution given by unnormalised weights."""
    logits = weights.log()[None].expand(len(draws), -1)
    return sample(logits, np.ones(len(draws)), draws, top_k, top_p)[0].numpy()


# ------------------------------------------------------------------------------------------------ uniforms


def test_uniforms_are_a_pure_function() -> None:
    streams, positions = np.array([7, 7, 2**64 - 1], np.uint64), np.array([0, 1, 100_000])
    together = uniforms(streams, positions)
    alone = [uniforms(streams[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3
    assert together.tolist() == uniforms(streams, positions).tolist()


def test_uniforms_are_those_of_splitmix64() -> None:
    # First outputs of the published generator with seed 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    values = uniforms(np.full(4, 1234567, np.uint64), np.arange(4))
    assert values.tolist() == [(n >> 11) * 2.0**-53 for n in expected]


@pytest.mark.parametrize("axis", ["positions", "streams", "neighbouring streams"])
def test_uniforms_are_uniform_along_every_axis(axis: str) -> None:
    num = 40_000
    if axis == "positions":
        values = uniforms(np.full(num, stream(1, "train", Uid(0, 0), 0, 0), np.uint64), np.arange(num))
    elif axis == "streams":
        streams = np.array([stream(1, "train", Uid(0, n), 0, 3) for n in range(num)], np.uint64)
        values = uniforms(streams, np.zeros(num, np.int64))
    else:
        values = uniforms(np.arange(num).astype(np.uint64), np.full(num, 5))
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert chi_square_is_plausible(counts, np.full(100, num / 100))
    pairs = np.histogram2d(values[:-1], values[1:], bins=10, range=[[0, 1], [0, 1]])[0].ravel()
    assert chi_square_is_plausible(pairs, np.full(100, (num - 1) / 100))


def test_streams_differ_in_every_argument() -> None:
    base = (1, "train", Uid(2, 3), 4, 5)
    others = [
        (2, "train", Uid(2, 3), 4, 5),
        (1, "evaluation/x", Uid(2, 3), 4, 5),
        (1, "train", Uid(3, 2), 4, 5),
        (1, "train", Uid(2, 4), 4, 5),
        (1, "train", Uid(2, 3), 5, 4),
        (1, "train", Uid(2, 3), 4, 6),
    ]
    names = {stream(*arguments) for arguments in (base, *others)}
    assert len(names) == 7 and all(0 <= n < 2**64 for n in names)
    assert stream(*base) == stream(*base)


# ------------------------------------------------------------------------------------------------ drawing


@pytest.mark.parametrize("vocabulary", [5, 256, 257, 700])
def test_frequencies_follow_the_probabilities(vocabulary: int) -> None:
    generator = np.random.default_rng(vocabulary)
    probabilities = generator.random(vocabulary) + 0.2
    probabilities /= probabilities.sum()
    num = 50 * vocabulary
    tokens = draw(torch.tensor(probabilities), uniforms(np.full(num, 11, np.uint64), np.arange(num)))
    assert chi_square_is_plausible(np.bincount(tokens, minlength=vocabulary), probabilities * num)


@pytest.mark.parametrize("vocabulary", [3, 256, 600, 1000])
@pytest.mark.parametrize("value", [0.0, 2.0**-53, 0.25, 0.5, 1 - 2.0**-30, LARGEST_DRAW])
def test_never_an_index_of_probability_zero(vocabulary: int, value: float) -> None:
    generator = np.random.default_rng(vocabulary)
    for _ in range(20):
        weights = torch.tensor(generator.random(vocabulary) * (generator.random(vocabulary) < 0.05))
        weights[int(generator.integers(vocabulary))] = 1.0
        if value in (0.0, LARGEST_DRAW):  # zeros on both ends, whole blocks of them in the larger ones
            weights[: vocabulary // 3] = weights[-(vocabulary // 3) :] = 0.0
            weights[vocabulary // 2] = 1.0
        token = int(draw(weights, np.array([value]))[0])
        assert weights[token] > 0
        positive = torch.nonzero(weights)[:, 0].tolist()
        if value == 0.0:
            assert token == positive[0]
        if value == LARGEST_DRAW:
            assert token == positive[-1]


def test_a_draw_at_the_edge_of_a_block_falls_on_no_zero_behind_it() -> None:
    """Sums in another order round otherwise: the target may lie above a block's own sum and below the next block."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        weights = 10.0 ** generator.uniform(-14, 0, 512)  # so far apart that float64 sums round
        weights[250:262] = 0.0
        logits = torch.tensor(weights, dtype=torch.float32).log()[None]
        blocks = torch.log_softmax(logits, -1).exp().view(2, 256).sum(-1, dtype=torch.float64).cumsum(0)
        edge = float(blocks[0] / blocks[1])
        draws = edge + np.arange(-8, 9) * np.spacing(edge)
        tokens = sample(logits.expand(len(draws), -1), np.ones(len(draws)), draws, None, 1.0)[0].numpy()
        assert (weights[tokens] > 0).all()


def test_every_index_is_drawn_at_the_middle_of_its_interval() -> None:
    generator = np.random.default_rng(3)
    weights = torch.tensor(generator.random(1000) + 0.01)
    ends = (weights / weights.sum()).cumsum(0)
    middles = (ends - weights / weights.sum() / 2).numpy()
    assert draw(weights, middles).tolist() == list(range(1000))


def test_the_tail_of_a_large_vocabulary_is_reachable() -> None:
    """One token with nearly all the mass in front of 100 000 with 1e-9 each: running float32 sums would lose them."""
    vocabulary = 100_000
    weights = torch.full((vocabulary,), 1e-9, dtype=torch.float64)
    weights[0] = 1 - 1e-9 * (vocabulary - 1)
    wanted = np.array([1, 2, 255, 256, 257, 50_000, 99_998, 99_999])
    draws = float(weights[0]) + (wanted - 0.5) * 1e-9
    tokens = draw(weights, draws)
    # The float32 probabilities are not exactly these: a tail token may be off by rounding, but it is a tail token.
    assert np.abs(tokens - wanted).max() <= 8
    assert draw(weights, np.array([0.0, LARGEST_DRAW])).tolist() == [0, vocabulary - 1]


def test_logprob_is_that_of_the_full_softmax_at_the_temperature_of_the_row() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 50, generator=generator)
    temperatures = np.array([1.0, 0.7, 2.0, 0.0])
    tokens, logprobs = sample(logits, temperatures, np.array([0.1, 0.9, 0.5, 0.5]), 5, 0.8)
    for row, temperature in enumerate(temperatures):
        expected = torch.log_softmax(logits[row].double() / (temperature or 1.0), 0)[tokens[row]]
        assert float(logprobs[row]) == pytest.approx(float(expected), abs=1e-5)
    assert int(tokens[3]) == int(logits[3].argmax())


def test_top_k_and_top_p_narrow_the_choice_and_nothing_else() -> None:
    weights = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    num = 4000
    draws = uniforms(np.full(num, 5, np.uint64), np.arange(num))

    def frequencies(top_k: int | None, top_p: float) -> np.ndarray:
        return np.bincount(draw(weights, draws, top_k, top_p), minlength=5)

    assert chi_square_is_plausible(frequencies(2, 1.0)[[1, 3]], np.array([4, 3]) / 7 * num)
    assert frequencies(2, 1.0)[[0, 2, 4]].sum() == 0
    # 0.4 + 0.3 = 0.7 is short of 0.71, so that the third is needed; 0.69 needs two.
    assert chi_square_is_plausible(frequencies(None, 0.71)[[1, 3, 2]], np.array([40, 30, 15]) / 85 * num)
    assert np.flatnonzero(frequencies(None, 0.71)).tolist() == [1, 2, 3]
    assert np.flatnonzero(frequencies(None, 0.69)).tolist() == [1, 3]
    assert np.flatnonzero(frequencies(None, 1e-6)).tolist() == [1]
    assert np.flatnonzero(frequencies(1, 0.5)).tolist() == [1]
    assert np.flatnonzero(frequencies(99, 1.0)).tolist() == [0, 1, 2, 3, 4]
    # top_p acts on what top_k has left: 0.4 / 0.7 is below 0.6.
    assert np.flatnonzero(frequencies(2, 0.6)).tolist() == [1, 3]
    assert np.flatnonzero(frequencies(2, 0.5)).tolist() == [1]
