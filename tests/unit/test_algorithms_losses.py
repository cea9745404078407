"""The losses against an independent reference: lists and the math module, one response after the other."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zbgrpo.algorithms.losses import LossConfig, LossSums, policy_loss

GRPO = LossConfig(clip_low=0.2, clip_high=0.2, kl_coeff=0.01, token_mean=False, skip_threshold=20.0)
DAPO = LossConfig(clip_low=0.2, clip_high=0.28, kl_coeff=0.0, token_mean=True, skip_threshold=20.0)
DAPO_WITH_KL = replace(DAPO, kl_coeff=0.3)
CONFIGS = [GRPO, DAPO, DAPO_WITH_KL]
config_of_name = pytest.mark.parametrize("config", CONFIGS, ids=["grpo", "dapo", "dapo_with_kl"])


@dataclass
class Response:
    new: list[float]
    old: list[float]
    ref: list[float]
    mask: list[bool]
    advantage: float


def clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def reference(responses: list[Response], config: LossConfig) -> dict[str, float]:
    """What the loss is by its definition, one token at a time."""
    names = ["loss", "policy_loss", "kl", "clipped", "ratio", "ratio_sq", "num_tokens", "num_responses"]
    names += ["responses_skipped", "tokens_skipped", "tokens_left_out"]
    sums = dict.fromkeys(names, 0.0)
    for response in responses:
        tokens = [position for position, counted in enumerate(response.mask) if counted]
        ratios = {t: math.exp(clamp(response.new[t] - response.old[t], -20, 20)) for t in tokens}
        if any(ratio > config.skip_threshold for ratio in ratios.values()):
            sums["responses_skipped"] += 1
            sums["tokens_skipped"] += len(tokens)
            tokens = []
        sums["tokens_left_out"] += len(response.mask) - len(tokens)
        if not tokens:
            continue
        policy = divergence = 0.0
        for t in tokens:
            bounded = clamp(ratios[t], 1 - config.clip_low, 1 + config.clip_high)
            policy -= min(ratios[t] * response.advantage, bounded * response.advantage)
            log_ratio = clamp(response.ref[t] - response.new[t], -20, 20)
            divergence += math.exp(log_ratio) - log_ratio - 1
            sums["clipped"] += bounded * response.advantage < ratios[t] * response.advantage
            sums["ratio"] += ratios[t]
            sums["ratio_sq"] += ratios[t] ** 2
        sums["kl"] += divergence
        sums["num_tokens"] += len(tokens)
        sums["num_responses"] += 1
        share = 1.0 if config.token_mean else 1 / len(tokens)
        sums["policy_loss"] += policy * share
        sums["loss"] += (policy + config.kl_coeff * divergence) * share
    sums["denominator"] = sums["num_tokens"] if config.token_mean else sums["num_responses"]
    return sums


def reference_gradient(responses: list[Response], config: LossConfig) -> list[float]:
    """Central differences of the reference in each new log-prob."""
    step = 1e-5
    gradient = []
    for response in responses:
        for t, value in enumerate(response.new):
            ends = []
            for moved in (value + step, value - step):
                response.new[t] = moved
                ends.append(reference(responses, config)["loss"])
            response.new[t] = value
            gradient.append((ends[0] - ends[1]) / (2 * step))
    return gradient


def run(
    responses: list[Response],
    config: LossConfig,
    dtype: torch.dtype = torch.float64,
    with_ref: bool = True,
    order: list[int] | None = None,
) -> tuple[LossSums, torch.Tensor]:
    """Sums and gradient in the new log-probs (in the order of the responses) of one microbatch."""

    def flat(name: str, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.tensor([value for response in responses for value in getattr(response, name)], dtype=of)

    new = flat("new").requires_grad_()
    index = torch.tensor([i for i, response in enumerate(responses) for _ in response.new], dtype=torch.int64)
    taken = torch.tensor(order if order is not None else range(len(new)), dtype=torch.int64)
    sums = policy_loss(
        new[taken],
        flat("old")[taken],
        torch.tensor([response.advantage for response in responses], dtype=dtype),
        index[taken],
        flat("mask", torch.bool)[taken],
        len(responses),
        config,
        flat("ref")[taken] if with_ref else None,
    )
    sums.loss.backward()
    assert new.grad is not None
    return sums, new.grad


def make_response(rng: random.Random, length: int, spread: float = 0.5) -> Response:
    new = [rng.uniform(-4, -0.01) for _ in range(length)]
    return Response(
        new,
        [value + rng.gauss(0, spread) for value in new],
        [value + rng.gauss(0, spread) for value in new],
        [rng.random() < 0.8 for _ in range(length)],
        rng.choice([-1.7, -0.3, 0.0, 0.4, 2.1]),
    )


def make_batch(seed: int, num_responses: int = 8) -> list[Response]:
    """Responses of very different lengths; one skipped, one without any counted token, one of length 0."""
    rng = random.Random(seed)
    responses = [make_response(rng, rng.randint(2, 12)) for _ in range(num_responses)]
    skipped, masked = make_response(rng, 5), make_response(rng, 4)
    skipped.mask, skipped.old[3] = [True] * 5, skipped.new[3] - 3.5
    masked.mask = [False] * 4
    return [*responses, skipped, masked, Response([], [], [], [], 1.0)]


@config_of_name
@pytest.mark.parametrize("seed", range(5))
def test_sums_and_gradient_are_those_of_the_reference(config: LossConfig, seed: int) -> None:
    responses = make_batch(seed)
    expected = reference(responses, config)
    sums, gradient = run(responses, config)
    got = {name: value.item() for name, value in sums.stats.items()}
    got |= {"loss": sums.loss.item(), "denominator": sums.denominator.item()}
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert all(value.dtype == torch.float64 and not value.requires_grad for value in sums.stats.values())
    assert expected["clipped"] > 0
    assert expected["responses_skipped"] == 1
    assert gradient.tolist() == pytest.approx(reference_gradient(responses, config), rel=1e-6, abs=1e-8)
    assert gradient.count_nonzero() > 5


@config_of_name
def test_float32_inputs(config: LossConfig) -> None:
    responses = make_batch(7)
    sums, gradient = run(responses, config, dtype=torch.float32)
    assert gradient.dtype == torch.float32
    assert sums.loss.item() == pytest.approx(reference(responses, config)["loss"], rel=1e-6, abs=1e-5)
    assert gradient.tolist() == pytest.approx(reference_gradient(responses, config), rel=1e-4, abs=1e-6)


def test_means_by_hand() -> None:
    """On policy a token costs -A. Responses of 1 and 3 tokens: -(2 - 1) / 2 by responses, -(2 - 3) / 4 by tokens."""
    responses = [
        Response([-1.0] * n, [-1.0] * n, [-1.0] * n, [True] * n, advantage) for n, advantage in [(1, 2.0), (3, -1.0)]
    ]
    grpo, gradient = run(responses, GRPO)
    assert (grpo.loss / grpo.denominator).item() == pytest.approx(-0.5)
    assert gradient.tolist() == pytest.approx([-2.0, 1 / 3, 1 / 3, 1 / 3])
    dapo, gradient = run(responses, DAPO)
    assert (dapo.loss / dapo.denominator).item() == pytest.approx(0.25)
    assert gradient.tolist() == pytest.approx([-2.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "cost", "slope"),
    [
        (1.27, 1.0, -1.27, -1.27),
        (1.29, 1.0, -1.28, 0.0),
        (0.79, 1.0, -0.79, -0.79),
        (0.81, -1.0, 0.81, 0.81),
        (0.79, -1.0, 0.8, 0.0),
        (1.29, -1.0, 1.29, 1.29),
    ],
)
def test_both_clips_and_the_sides_on_which_they_act(ratio: float, advantage: float, cost: float, slope: float) -> None:
    sums, gradient = run([Response([-1.0], [-1.0 - math.log(ratio)], [-1.0], [True], advantage)], DAPO)
    assert sums.loss.item() == pytest.approx(cost)
    assert gradient.tolist() == pytest.approx([slope])
    assert sums.stats["clipped"].item() == (slope == 0)


def test_gradient_on_policy_is_not_zero_though_the_loss_is() -> None:
    responses = [Response([-1.0], [-1.0], [-1.0], [True], advantage) for advantage in (1.0, -1.0)]
    sums, gradient = run(responses, GRPO)
    assert sums.loss.item() == 0
    assert gradient.tolist() == [-1.0, 1.0]


@config_of_name
def test_groups_without_variance_count_but_pull_nowhere(config: LossConfig) -> None:
    responses = make_batch(3)
    for response in responses:
        response.advantage = 0.0
    sums, gradient = run(responses, replace(config, kl_coeff=0.0))
    assert sums.loss.item() == 0
    assert not gradient.any()
    assert sums.denominator.item() == reference(responses, config)["denominator"] > 0


@config_of_name
def test_no_effective_token_gives_zero_and_stays_attached(config: LossConfig) -> None:
    responses = make_batch(4)
    for response in responses:
        response.mask = [False] * len(response.mask)
    for batch in (responses, [], [Response([], [], [], [], 1.0)]):
        sums, gradient = run(batch, config)
        assert sums.loss.item() == sums.denominator.item() == 0
        assert not gradient.any()
        assert all(value.item() == 0 for name, value in sums.stats.items() if name != "tokens_left_out")


@config_of_name
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_nothing_outside_the_mask_is_looked_at(config: LossConfig, garbage: float) -> None:
    responses = make_batch(5)
    expected, expected_gradient = run(responses, config)
    for response in responses:
        for t, counted in enumerate(response.mask):
            if not counted:
                response.new[t] = response.old[t] = response.ref[t] = garbage
        if not any(response.mask):
            response.advantage = garbage
    sums, gradient = run(responses, config)
    assert sums.loss.item() == expected.loss.item()
    assert torch.equal(gradient, expected_gradient)
    assert sums.stats == expected.stats


@config_of_name
@pytest.mark.parametrize("field", ["new", "old", "advantage"])
def test_nan_that_counts_is_not_hidden(config: LossConfig, field: str) -> None:
    response = Response([-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [True, True], 1.0)
    setattr(response, field, math.nan if field == "advantage" else [math.nan, -1.0])
    assert math.isnan(run([response], config)[0].loss.item())


@pytest.mark.parametrize("side", [-1e4, -math.inf, 1e4, math.inf])
@pytest.mark.parametrize("of", ["old", "ref"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_log_ratios(side: float, of: str, advantage: float) -> None:
    response = Response([-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [True, True], advantage)
    getattr(response, of)[0] += side
    sums, gradient = run([response], DAPO_WITH_KL)
    never_skip = replace(DAPO_WITH_KL, skip_threshold=math.inf)
    sums_kept, gradient_kept = run([response], never_skip)
    assert math.isfinite(sums.loss.item())
    assert sums_kept.loss.item() == pytest.approx(reference([response], never_skip)["loss"], rel=1e-12)
    assert gradient_kept[0] == (0.0 if of == "old" else -advantage)  # only the token's other term has a gradient
    assert gradient_kept[1] == -advantage
    skipped = of == "old" and side < 0
    assert sums.stats["responses_skipped"].item() == skipped
    assert gradient.tolist() == ([0.0, 0.0] if skipped else gradient_kept.tolist())


def test_skip_threshold_is_on_the_ratio_and_leaves_the_response_out_of_everything() -> None:
    def with_ratio(ratio: float) -> Response:
        return Response([-1.0, -2.0], [-1.0, -2.0 - math.log(ratio)], [-1.0, -2.0], [True, True], -1.0)

    kept, dropped = with_ratio(19.9), with_ratio(20.1)
    other = make_response(random.Random(1), 6)
    for config in CONFIGS:
        alone, alone_gradient = run([other], config)
        sums, gradient = run([other, dropped], config)
        assert sums.loss.item() == pytest.approx(alone.loss.item(), rel=1e-14)
        assert sums.denominator.item() == alone.denominator.item()
        assert gradient.tolist() == [*alone_gradient.tolist(), 0.0, 0.0]
        assert sums.stats["responses_skipped"].item() == 1
        assert sums.stats["tokens_skipped"].item() == 2
        assert run([other, kept], config)[0].stats["responses_skipped"].item() == 0
    dropped.mask[1] = False  # the extreme token does not count, so the response does
    assert run([dropped], DAPO)[0].stats["num_tokens"].item() == 1


@pytest.mark.parametrize("token_mean", [False, True])
def test_more_weight_on_kl_means_a_higher_loss(token_mean: bool) -> None:
    responses = make_batch(6)
    losses = [run(responses, replace(GRPO, kl_coeff=c, token_mean=token_mean))[0].loss.item() for c in (0, 0.1, 1)]
    assert losses[0] < losses[1] < losses[2]


@pytest.mark.parametrize("difference", [-0.5, 0.5])
def test_kl_pulls_the_policy_towards_the_reference(difference: float) -> None:
    response = Response([-2.0], [-2.0], [-2.0 + difference], [True], 0.0)
    _, gradient = run([response], replace(GRPO, kl_coeff=1.0))
    assert gradient.item() == pytest.approx(1 - math.exp(difference))
    assert -gradient.item() * difference > 0  # a descent step goes towards the reference


def test_kl_of_tiny_differences_does_not_cancel() -> None:
    response = Response([-2.0], [-2.0], [-2.0 + 1e-7], [True], 0.0)
    difference = response.ref[0] - response.new[0]
    assert run([response], GRPO)[0].stats["kl"].item() == pytest.approx(difference**2 / 2, rel=1e-6, abs=0)


def test_without_kl_no_reference_is_needed_and_the_loss_is_the_same() -> None:
    responses = make_batch(8)
    config = replace(GRPO, kl_coeff=0.0)
    with_ref, gradient_with_ref = run(responses, config)
    without, gradient_without = run(responses, config, with_ref=False)
    assert without.loss.item() == with_ref.loss.item() == with_ref.stats["policy_loss"].item()
    assert torch.equal(gradient_without, gradient_with_ref)
    assert without.stats["kl"].item() == 0 < with_ref.stats["kl"].item()
    assert without.stats.keys() == with_ref.stats.keys()
    with pytest.raises(ValueError, match="ref_logprobs"):
        run(responses, GRPO, with_ref=False)


@st.composite
def partitioned_batches(draw: st.DrawFn) -> tuple[list[Response], list[list[int]], random.Random]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=9))
    spread = draw(st.sampled_from([0.1, 0.5, 3.0]))
    responses = [make_response(rng, length, spread) for length in lengths]
    owners = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return responses, [[i for i, owner in enumerate(owners) if owner == part] for part in range(4)], rng


@config_of_name
@settings(max_examples=60, deadline=None)
@given(partitioned_batches())
def test_any_split_into_microbatches_gives_the_same_sums(
    config: LossConfig, case: tuple[list[Response], list[list[int]], random.Random]
) -> None:
    responses, partition, rng = case
    whole, whole_gradient = run(responses, config)
    gradients: dict[int, list[float]] = {}
    loss = denominator = 0.0
    stats = dict.fromkeys(whole.stats, 0.0)
    for part in partition:
        microbatch = [responses[i] for i in part]
        num_tokens = sum(len(response.new) for response in microbatch)
        sums, gradient = run(microbatch, config, order=rng.sample(range(num_tokens), num_tokens))
        loss, denominator = loss + sums.loss.item(), denominator + sums.denominator.item()
        stats = {name: value + sums.stats[name].item() for name, value in stats.items()}
        pieces = gradient.split([len(response.new) for response in microbatch])
        gradients |= {i: piece.tolist() for i, piece in zip(part, pieces, strict=True)}
    # Terms of both signs may cancel in the total, so the scale is that of the terms.
    scale = sum(abs(reference([response], config)["loss"]) for response in responses)
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-12 * scale)
    assert denominator == whole.denominator.item()
    expected = {name: value.item() for name, value in whole.stats.items()}
    assert stats == pytest.approx(expected, rel=1e-12, abs=1e-12 * scale)
    assert [g for i in range(len(responses)) for g in gradients[i]] == pytest.approx(whole_gradient.tolist(), rel=1e-12)


def test_wrong_shapes_and_dtypes_are_errors() -> None:
    tokens, index, mask = torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    advantages = torch.zeros(1)
    policy_loss(tokens, tokens, advantages, index, mask, 1, DAPO)
    with pytest.raises(ValueError, match="old_logprobs"):
        policy_loss(tokens, tokens[:1], advantages, index, mask, 1, DAPO)
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_loss(tokens, tokens, advantages, index, mask, 1, DAPO, ref_logprobs=tokens[:1])
    with pytest.raises(ValueError, match="advantages"):
        policy_loss(tokens, tokens, tokens, index, mask, 1, DAPO)
    with pytest.raises(ValueError, match="bool"):
        policy_loss(tokens, tokens, advantages, index, mask.long(), 1, DAPO)
    with pytest.raises(ValueError, match="new_logprobs"):
        policy_loss(tokens[None], tokens, advantages, index, mask, 1, DAPO)
