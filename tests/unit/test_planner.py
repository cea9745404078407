"""The planner: its simulation against hand-computed cases and limits, rates from logs, the search, the verb."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.simulation import Balanced, play
from zbgrpo import cli
from zbgrpo.config.load import dump_yaml, load_config, load_yaml
from zbgrpo.errors import ConfigError, RunFolderError
from zbgrpo.observe.decoding import DecodeStatistics
from zbgrpo.planner.events import Clock
from zbgrpo.planner.measure import measure
from zbgrpo.planner.producer import Group, SimulatedProducer
from zbgrpo.planner.rates import (
    DecodeRates,
    LengthRates,
    LengthSource,
    Rates,
    TrainRates,
    WeightRates,
    read_rates,
)
from zbgrpo.planner.scenario import Account, Figures, Scenario
from zbgrpo.planner.search import THROUGHPUT_TOLERANCE, Cluster, _smaller, bound, find_plan
from zbgrpo.planner.simulation import simulate

IDLE_LOOP = 0.02
"""What an idle producer takes at most to notice new weights."""


def rates(decode: float | DecodeRates = 0.01, token: float = 0.0001, length: int = 101, **more: Any) -> Rates:
    """100 decode steps for a response; nothing takes time that is not named."""
    return Rates(
        **{
            "decode": DecodeRates(step_seconds=decode) if isinstance(decode, float) else decode,
            "train": TrainRates(token_seconds=token),
            "lengths": LengthRates(mean_tokens=length),
            "hub_seconds": 0.0,
            **more,
        }
    )


def one_by_one(found: Rates, **more: Any) -> Scenario:
    """A producer with slots for 4 groups of 8, a consumer, 8 groups per step."""
    sizes: dict[str, Any] = {
        "generations": 8, "microbatch_groups": 4, "leases_per_producer": 8, "train_batch": 8, "train_minibatch": 4,
        "train_microbatch": 32, "max_staleness": 2, "steps": 40, "warmup_steps": 10,
    }  # fmt: skip
    return Scenario(rates=found, **{**sizes, **more})


GENERATE = 2 * 100 * 0.01  # seconds to generate a step: 8 groups in slots for 4


# ------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize("token_seconds", [0.0001, 0.00025, 0.001])
def test_beside_each_other_the_slower_role_sets_the_step_time(token_seconds: float) -> None:
    train = 8 * 8 * 101 * token_seconds
    figures = simulate(one_by_one(rates(token=token_seconds)))
    assert figures.step_seconds == pytest.approx(max(GENERATE, train), rel=0.01)
    assert figures.consumers.bubble == pytest.approx(1 - train / max(GENERATE, train), abs=0.01)
    assert figures.producers.bubble == pytest.approx(1 - GENERATE / max(GENERATE, train), abs=0.01)
    assert figures.tokens_per_second == pytest.approx(8 * 8 * 101 / figures.step_seconds)


@pytest.mark.parametrize("token_seconds", [0.0001, 0.00025, 0.001])
def test_in_turns_the_step_time_is_the_sum(token_seconds: float) -> None:
    train = 8 * 8 * 101 * token_seconds
    # The first minibatch is trained while the second is generated.
    figures = simulate(one_by_one(rates(token=token_seconds), max_staleness=0))
    apart = GENERATE + train
    together = min(GENERATE, train) / 2
    assert apart - together <= figures.step_seconds <= apart - together + IDLE_LOOP
    assert simulate(
        one_by_one(rates(token=token_seconds), max_staleness=0, train_minibatch=8)
    ).step_seconds == pytest.approx(apart, abs=IDLE_LOOP)
    assert figures.mean_token_lag == 0


def test_every_cost_of_a_decode_step_is_in_it() -> None:
    decode = DecodeRates(
        step_seconds=0.01, slot_seconds=0.001, prompt_step_seconds=0.1, prompt_seconds=0.2, finish_seconds=0.01,
        response_seconds=0.02, loop_seconds=0.002,
    )  # fmt: skip
    scenario = one_by_one(rates(decode=decode), leases_per_producer=4)
    # 32 responses, of all the leases that there may be, start together, decode 100 steps, and end together.
    batch = 100 * (0.01 + 32 * 0.001 + 0.002) + 0.1 + 4 * 0.2 + 32 * (0.01 + 0.02)
    figures = simulate(scenario)
    assert figures.step_seconds == pytest.approx(2 * batch, rel=0.01)
    assert bound(scenario).generated == pytest.approx(8 / (2 * batch), rel=0.001)


class SilentHub:
    def wants(self, time: float, producer: int, num_leases: int, received: int) -> None: ...

    def has_applied(self, time: float, producer: int, version: int) -> None: ...

    def has_completed(self, time: float, group: Group) -> None: ...


@pytest.mark.parametrize(("arrival", "started_in_step"), [(0.005, 1), (0.03, 1), (0.065, 2)])
def test_a_lease_that_comes_while_the_loop_works_on_responses_is_in_the_next_step(
    arrival: float, started_in_step: int
) -> None:
    """The first step ends after 0.01 s with seven responses, on which the loop works for 0.049 s."""
    decode = DecodeRates(step_seconds=0.01, response_seconds=0.007)
    clock = Clock()
    producer = SimulatedProducer(0, one_by_one(rates(decode=decode)), clock, SilentHub())
    first, second = (Group(n, 0, lengths, False, unfinished=8) for n, lengths in enumerate(([2] * 7 + [50], [5] * 8)))
    clock.at(0.0, producer.take, [first])
    clock.at(arrival, producer.take, [second])
    while len(second.starts) < 8:
        assert clock.step()
    assert second.starts == [started_in_step] * 8
    # Whenever it comes, the loop's time is spent before the next step begins.
    assert clock.now == pytest.approx({1: 0.01 + 0.049, 2: 0.01 + 0.049 + 0.01}[started_in_step])


def test_every_cost_of_a_training_step_is_in_it() -> None:
    train = TrainRates(microbatch_seconds=0.3, token_seconds=0.001, commit_seconds=0.7)
    scenario = one_by_one(rates(train=train, prompt_tokens=10, weights=WeightRates(copy_seconds=0.2)))
    step = 2 * (1 * 0.3 + 0.001 * 4 * (8 * 101 + 10)) + 0.7 + 0.2
    figures = simulate(scenario)
    assert figures.step_seconds == pytest.approx(step, rel=0.001)
    assert figures.consumers.shares()["blocked"] == pytest.approx(0.2 / step, rel=0.01)
    assert bound(scenario).trained == pytest.approx(8 / step, rel=0.001)


def test_what_the_filter_leaves_out_is_generated_for_nothing() -> None:
    figures = simulate(one_by_one(rates(filtered_share=0.5), steps=120))
    assert figures.step_seconds == pytest.approx(2 * GENERATE, rel=0.1)


def test_equal_replicas_have_no_imbalance_and_unequal_ones_do() -> None:
    def imbalance(**lengths: Any) -> float:
        found = rates(token=0.001, lengths=LengthRates(mean_tokens=101, **lengths))
        return simulate(one_by_one(found, num_replicas=4, num_producers=4)).consumers.shares()["imbalance"]

    assert imbalance() == 0
    assert 0.005 < imbalance(sigma=0.8, cap_tokens=2000) < 0.5


def test_a_slow_broadcast_is_replaced_by_newer_versions() -> None:
    slow = simulate(one_by_one(rates(weights=WeightRates(broadcast_seconds=3 * GENERATE)), max_staleness=6))
    quick = simulate(one_by_one(rates(weights=WeightRates(broadcast_seconds=0.1))))
    assert quick.versions_skipped == 0
    assert slow.versions_skipped > 10
    assert slow.mean_token_lag > quick.mean_token_lag + 1


def test_old_tokens_are_left_out() -> None:
    # Responses of 40 steps, begun far ahead, in a run whose steps take less than one of them.
    found = rates(lengths=LengthRates(mean_tokens=200, sigma=1.2, cap_tokens=8000))
    figures = simulate(one_by_one(found, num_producers=4, max_staleness=8, max_token_lag=3, steps=60))
    assert figures.left_out_share == pytest.approx(figures.tokens_above(3))
    assert 0.01 < figures.left_out_share < 0.9


def test_a_whole_run_accounts_for_its_time_from_the_first_minibatch_to_the_end() -> None:
    found = rates(token=0.0001, save_seconds=5.0)
    figures = simulate(one_by_one(found, steps=10, warmup_steps=0, leases_per_producer=4))
    train = 8 * 8 * 101 * 0.0001
    # One batch of 4 groups before the first minibatch; then as long as generation takes.
    assert figures.producers.total == pytest.approx(10 * GENERATE + train / 2 + 5, abs=0.01)
    assert figures.producers.starved == pytest.approx(train / 2 + 5, abs=0.01), "until the consumer has saved"
    assert figures.consumers.total == pytest.approx(figures.producers.total - GENERATE / 2, abs=0.01)
    assert figures.consumers.checkpoint == 5
    assert figures.consumers.busy == pytest.approx(10 * train)


def test_the_bubble_is_over_all_ranks() -> None:
    figures = Figures(1.0, 10.0, Account(busy=8, starved=2), Account(busy=10, blocked=5, imbalance=5))
    assert figures.bubble() == pytest.approx(12 / 30)
    assert figures.bubble(ranks_per_replica=4, ranks_per_producer=2) == pytest.approx((4 * 2 + 2 * 10) / (40 + 40))


# ------------------------------------------------------------------------------------------ limits


def test_a_long_scoring_time_costs_leases() -> None:
    """Little: leases held = groups per second x time that a group takes."""
    found = rates(reward_seconds=3.0)
    scenario = one_by_one(found, leases_per_producer=4, max_staleness=6, buffer_limit=64)
    assert simulate(scenario).step_seconds == pytest.approx(2 * (1.0 + 3.0), rel=0.01)
    enough = dataclasses.replace(scenario, leases_per_producer=16)
    assert simulate(enough).step_seconds == pytest.approx(GENERATE, rel=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_no_run_is_faster_than_its_bound_and_a_free_one_reaches_it(seed: int) -> None:
    generator = random.Random(seed)
    found = rates(
        decode=DecodeRates(step_seconds=generator.uniform(0.001, 0.02), slot_seconds=generator.uniform(0, 0.001)),
        token=generator.choice((0.0001, 0.0003, 0.001)),
        lengths=LengthRates(mean_tokens=100, sigma=0.5, cap_tokens=1000),
    )
    scenario = one_by_one(
        found, num_producers=3, num_replicas=2, leases_per_producer=16, max_staleness=8, steps=80, seed=seed
    )
    ratio = simulate(scenario).step_seconds * bound(scenario).groups_per_second / scenario.groups_per_step
    assert 0.97 < ratio < 1.08
    tight = dataclasses.replace(scenario, max_staleness=1, leases_per_producer=4)
    assert simulate(tight).step_seconds * bound(tight).groups_per_second / tight.groups_per_step > 0.97


def test_the_figures_of_the_design() -> None:
    """8 producers x 16 slots, balanced, lognormal lengths with sigma 1, capped at 50 medians."""
    half = Balanced(groups_per_step=256, max_staleness=2, groups_per_minibatch=64)
    twice = Balanced(groups_per_step=64, max_staleness=2, groups_per_minibatch=16, steps=120, warmup_steps=16)
    assert play(half).consumers.bubble < 0.015
    assert 0.01 < play(twice).consumers.bubble < 0.075
    assert play(dataclasses.replace(twice, max_staleness=4)).consumers.bubble < 0.025
    assert 0.6 < play(dataclasses.replace(half, max_staleness=0, steps=20)).consumers.bubble < 0.9


def test_the_seed_decides_everything() -> None:
    found = rates(lengths=LengthRates(mean_tokens=100, sigma=0.7), filtered_share=0.2)
    scenario = one_by_one(found, num_producers=2)
    assert simulate(scenario) == simulate(scenario)
    assert simulate(scenario) != simulate(dataclasses.replace(scenario, seed=1))


def test_a_thousand_ranks() -> None:
    found = rates(lengths=LengthRates(mean_tokens=400, sigma=0.7, cap_tokens=4000), token=0.0001)
    figures = simulate(
        Scenario(
            rates=found, num_replicas=128, num_producers=896, generations=4, microbatch_groups=2,
            leases_per_producer=4, train_batch=8, train_minibatch=4, max_staleness=3, steps=6, warmup_steps=2,
        )
    )  # fmt: skip
    assert 0 <= figures.producers.bubble < 1
    assert figures.samples_per_second == pytest.approx(128 * 8 * 4 / figures.step_seconds)


# ------------------------------------------------------------------------------------------ rates


def test_lengths_have_the_mean_and_the_cap_that_was_asked_for() -> None:
    lognormal = Rates(lengths=LengthRates(mean_tokens=500, sigma=0.5))
    assert LengthSource(lognormal, 8, 0).means()[0] == pytest.approx(500, rel=0.02)
    capped = LengthSource(Rates(lengths=LengthRates(mean_tokens=500, sigma=1, cap_tokens=800)), 8, 0)
    assert max(max(capped.draw()[0]) for _ in range(500)) == 800
    observed = Rates(
        lengths=LengthRates(groups=[[3, 4], [9, 9]], filtered_groups=[[7, 7]]), filtered_share=0.3, prompt_tokens=5
    )
    source = LengthSource(observed, 2, 0)
    drawn = [source.draw() for _ in range(1000)]
    assert {tuple(lengths) for lengths, filtered in drawn if not filtered} == {(3, 4), (9, 9)}
    assert {tuple(lengths) for lengths, filtered in drawn if filtered} == {(7, 7)}
    assert 0.25 < sum(filtered for _, filtered in drawn) / 1000 < 0.35


RATES = """
decode: {step_seconds: 0.02, slot_seconds: 2e-4, prompt_seconds: 0.03}
train: {microbatch_seconds: 0.05, token_seconds: 2.0e-5, commit_seconds: 0.5}
weights: {broadcast_seconds: 1.5, copy_seconds: 0.1, apply_seconds: 0.05}
lengths: {mean_tokens: 300, sigma: 0.6, cap_tokens: 2000}
prompt_tokens: 150
"""


@pytest.fixture
def rates_file(tmp_path: Path) -> Path:
    path = tmp_path / "rates.yaml"
    path.write_text(RATES)
    return path


def test_later_rates_win(rates_file: Path) -> None:
    base = rates(decode=1.0, save_seconds=3.0)
    found = read_rates(rates_file, ["decode.step_seconds=0.5", "reward_seconds=1e-1"], base)
    assert (found.decode.step_seconds, found.decode.slot_seconds) == (0.5, 2e-4)
    assert (found.reward_seconds, found.save_seconds, found.prompt_tokens) == (0.1, 3.0, 150)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("decode: {step_second: 1}", [], "step_second"),
        ("decode: {step_seconds: -1}", [], ">= 0.0"),
        ("decode: [", [], "not valid YAML"),
        ("3", [], "object"),
        (RATES, ["decode.step_seconds"], "expected KEY=VALUE"),
        (RATES, ["decode.step=1"], "decode.step=1: object contains unknown field `step`"),
        (RATES, ["hub_seconds=.inf"], "finite"),
        ("lengths: {mean_tokens: 10}", [], "decode.step_seconds"),
        ("lengths: {mean_tokens: 10}\ndecode: {step_seconds: 1}", [], "train.token_seconds"),
        ("decode: {step_seconds: 1}", [], "lengths.mean_tokens"),
        (RATES + "lengths: {groups: [[]]}", [], "set twice"),
        (RATES, ["lengths.groups=[[0]]"], "at least one token"),
    ],
)
def test_wrong_rates(text: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_rates(path, overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------ rates from logs

TRUE = DecodeRates(
    step_seconds=0.004, slot_seconds=0.0002, prompt_step_seconds=0.003, prompt_seconds=0.016, finish_seconds=0.0005,
    response_seconds=0.0007, loop_seconds=0.0003,
)  # fmt: skip


def log_folder(folder: Path, num_steps: int = 30) -> Path:
    """The logs of a run whose parts take exactly `TRUE`, and 0.01 + 0.002 x tokens for a microbatch."""
    config = load_yaml(
        "cluster: {num_trainers: 1, num_inferencer: 1}\ninference: {num_generations: 8}\n"
        "trainer: {train_batch_size: 4, train_minibatch_size: 2, train_microbatch_size: 8}\nledger: {max_steps: 30}"
    )
    (folder / "events").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(config))
    logs: dict[str, list[dict[str, Any]]] = {"hub": [], "rank-0": [], "rank-1": []}
    generator, clock = random.Random(5), 1000.0
    producer = dict.fromkeys(("busy", "starved", "blocked_on_weights"), 0.0)
    consumer = dict.fromkeys(("busy", "starved", "blocked_on_weights"), 0.0)
    statistics, now = DecodeStatistics(), 0.0
    for step in range(num_steps):
        for _ in range(40):
            occupied, started, finished = (
                generator.randint(1, 32),
                generator.choice((0, 0, 3, 8, 12)),
                generator.randint(0, 4),
            )
            seconds = TRUE.step_seconds + TRUE.slot_seconds * occupied + TRUE.finish_seconds * finished
            seconds += (started > 0) * TRUE.prompt_step_seconds + started * TRUE.prompt_seconds / 8
            statistics.add(occupied=occupied, started=started, finished=finished, begun=now, ended=now + seconds)
            scored = generator.choice((0, 0, 8))
            statistics.scored(scored)
            loop = TRUE.loop_seconds + 0.0005 * finished + 0.0002 * scored
            now += seconds + loop
            producer["busy"] += seconds * occupied / 32 + loop
            producer["starved"] += seconds * (1 - occupied / 32)
        rows, turns = statistics.take()
        logs["rank-1"].append({"kind": "decode", "version": step, "slots": 32, "times": dict(producer),
                               "rows": rows, "turns": turns, "time": clock})  # fmt: skip
        for lease in range(4 * step, 4 * step + 4):
            lengths = [generator.randint(5, 50) for _ in range(8)]
            logs["rank-1"].append({"kind": "sent", "lease": lease, "time": clock, "lengths": lengths,
                                   "prompt_tokens": 20, "scoring_seconds": 0.25})  # fmt: skip
            logs["hub"].append({"kind": "buffered", "lease": lease, "time": clock + 0.002})
        logs["rank-1"].append({"kind": "filtered", "lengths": [7] * 8, "prompt_tokens": 20, "scoring_seconds": 0.25})
        for _ in range(2):
            tokens = generator.randint(100, 900)
            logs["rank-0"].append({"kind": "minibatch", "step": step, "responses": 16, "tokens": tokens,
                                   "seconds": 2 * 0.01 + 0.002 * tokens})  # fmt: skip
            consumer["busy"] += 2 * 0.01 + 0.002 * tokens
        consumer["busy"] += 0.5
        clock += 10.0
        commit = {"kind": "commit", "version": step + 1, "time": clock}
        logs["rank-0"] += [commit | {"times": dict(consumer)}, {"kind": "published", "version": step + 1, "seconds": 2}]
        logs["hub"].append(commit)
        consumer["blocked_on_weights"] += 0.125
        producer["blocked_on_weights"] += 0.0625
        logs["rank-1"].append({"kind": "applied", "version": step + 1})
    logs["rank-1"].append({"kind": "decode", "version": num_steps, "slots": 32, "times": dict(producer), "rows": [],
                           "turns": [], "time": clock + 3.0})  # fmt: skip
    logs["hub"].append({"kind": "plan", "entry": "end"})
    for name, lines in logs.items():
        (folder / "events" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_rates_are_found_in_the_logs(tmp_path: Path) -> None:
    found = measure(log_folder(tmp_path)).rates
    for name, value in msgspec.structs.asdict(TRUE).items():
        assert getattr(found.decode, name) == pytest.approx(value, rel=0.02), name
    assert found.train.microbatch_seconds == pytest.approx(0.01, rel=0.02)
    assert found.train.token_seconds == pytest.approx(0.002, rel=0.02)
    assert found.train.commit_seconds == pytest.approx(0.5, rel=0.02)
    assert found.weights == WeightRates(copy_seconds=0.125, broadcast_seconds=2.0, apply_seconds=0.0625)
    assert (found.prompt_tokens, found.filtered_share, found.reward_seconds) == (20, 0.2, 0.25)
    assert found.hub_seconds == pytest.approx(0.002, rel=0.01)
    assert found.save_seconds == pytest.approx(3.0 - 2 * 0.002, rel=0.01)
    assert np.shape(found.lengths.groups) == (120, 8) and np.shape(found.lengths.filtered_groups) == (30, 8)


def test_logs_that_say_too_little(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no config\.yaml"):
        measure(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match="4 optimizer steps are too few"):
        measure(log_folder(tmp_path / "short", num_steps=4))
    silent = log_folder(tmp_path / "silent")
    (silent / "events" / "rank-1.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="do not say what decoding"):
        measure(silent)
    damaged = log_folder(tmp_path / "damaged")
    path = damaged / "events" / "rank-0.jsonl"
    path.write_text("{]\n" + path.read_text() + '{"kind": "to')
    with pytest.raises(RunFolderError, match=r"rank-0\.jsonl:1: not a JSON object"):
        measure(damaged)


# ------------------------------------------------------------------------------------------ the search

SMALL = Cluster(num_ranks=8, groups_per_step=64, generations=4, train_microbatch=8, max_slots=64, max_staleness=3)


@cache
def small_plan() -> Any:
    return find_plan(SMALL, read_rates(None, BALANCED.split()))


BALANCED = (
    "decode.step_seconds=0.02 decode.slot_seconds=0.0002 train.token_seconds=0.0005 train.commit_seconds=0.5 "
    "lengths.mean_tokens=300 lengths.sigma=0.6 prompt_tokens=50 weights.broadcast_seconds=0.5"
)


def test_no_other_split_beats_the_plan() -> None:
    plan = small_plan()
    best = plan.best
    assert 1 < best.scenario.num_replicas < 7, "the rates are such that neither role has next to nothing to do"
    fastest = best.figures.tokens_per_second / (1 - THROUGHPUT_TOLERANCE)
    for num_replicas in range(1, 8):
        other = dataclasses.replace(
            best.scenario,
            num_replicas=num_replicas,
            num_producers=8 - num_replicas,
            train_batch=round(64 / num_replicas),
            train_minibatch=round(64 / num_replicas),
            steps=20,
            warmup_steps=5,
        )
        assert simulate(other).tokens_per_second <= 1.03 * fastest


def test_no_neighbour_of_the_plan_is_better() -> None:
    plan = small_plan()
    near = [c for c in plan.candidates if c.figures.tokens_per_second >= plan.best.figures.tokens_per_second * 0.99]
    assert plan.best.bubble <= min(c.bubble for c in near) + 0.006
    same_split = [c for c in plan.candidates if c.scenario.num_replicas == plan.best.scenario.num_replicas]
    assert {c.scenario.max_staleness for c in plan.candidates} >= {1, 2, 3}
    assert len({c.scenario.train_minibatch for c in same_split}) > 1
    assert plan.best is plan.candidates[0]


def test_a_large_cluster_is_like_a_small_one_of_the_same_ratio() -> None:
    found = read_rates(None, BALANCED.split())
    large = Scenario(
        rates=found, num_replicas=24, num_producers=72, generations=4, microbatch_groups=8, train_batch=8,
        train_minibatch=4, train_microbatch=8, steps=20, warmup_steps=8,
    )  # fmt: skip
    small = _smaller(large)
    assert (small.num_replicas, small.num_producers, small.train_batch) == (16, 48, 8)
    figures, expected = simulate(small).scaled(1.5), simulate(large)
    assert figures.step_seconds == pytest.approx(expected.step_seconds, rel=0.04)
    assert figures.samples_per_second == pytest.approx(expected.samples_per_second, rel=0.04)
    assert figures.bubble() == pytest.approx(expected.bubble(), abs=0.03)
    assert _smaller(small) is small


def test_more_training_gets_more_trainers() -> None:
    splits = [
        find_plan(
            dataclasses.replace(SMALL, max_staleness=2, groups_per_step=24),
            read_rates(None, [*BALANCED.split(), f"train.{x}"]),
        )
        for x in ("token_seconds=0.0001", "token_seconds=0.003")
    ]
    few, many = (plan.best.scenario.num_replicas for plan in splits)
    assert few < many


def test_ranks_that_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="--ranks 7"):
        find_plan(Cluster(num_ranks=7, tensor_parallel=4, producer_tensor_parallel=2), rates())
    whole = find_plan(Cluster(num_ranks=8, tensor_parallel=2, producer_tensor_parallel=2, groups_per_step=8), rates())
    assert whole.best.scenario.num_replicas + whole.best.scenario.num_producers == 4


# ------------------------------------------------------------------------------------------ the verb


def test_the_last_line_is_what_the_launcher_takes(rates_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--ranks", "8", "--rates", str(rates_file), "--groups-per-step", "64", "--max-staleness", "2"]
    assert cli.main([*arguments, "--max-slots", "128", "-ptp", "2", "train.token_seconds=1e-4"]) == 0
    out = capsys.readouterr().out
    for text in ("8 ranks, ", "samples/s", "bubble", "consumers  busy", "limited by"):
        assert text in out
    line = out.splitlines()[-1]
    config = load_config([*line.split(), "-b", "vllm"], 8).config
    assert config.world_size == 8 and config.cluster.producer_tensor_parallel_size == 2
    assert config.groups_per_step == pytest.approx(64, rel=0.25)


def test_json(rates_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = log_folder(tmp_path / "logs")
    assert cli.main(["plan", "--ranks", "4", "--from", str(logs), "--json", "--max-staleness", "2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(plan) == {"ranks", "flags", "predicted", "candidates", "num_bounded"}
    assert plan["candidates"][0]["flags"] == plan["flags"]
    assert 0 <= plan["predicted"]["bubble"]["all"] <= 1
    assert sum(plan["predicted"]["time_shares"]["producers"].values()) == pytest.approx(1)
    flags = dict(zip(plan["flags"][::2], plan["flags"][1::2], strict=True))
    assert int(flags["-t"]) + int(flags["-i"]) == 4
    assert (flags["-g"], flags["-tmbs"]) == ("8", "8"), "as in the run that was measured"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no rates: give --from"),
        (["--rates", "missing.yaml"], "--rates missing.yaml: No such file"),
        (["--from", "missing"], "missing: no config.yaml"),
        (["decode.step=1"], "unknown field `step`"),
        (["decode.step_seconds=1"], "lengths.mean_tokens"),
        (["--max-staleness", "-1", *BALANCED.split()], "--max-staleness: -1"),
        (["--max-slots", "4", *BALANCED.split()], "--max-slots: 4 are fewer than the 8"),
        (["-tp", "8", *BALANCED.split()], "--ranks 4: no split"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--ranks", "4", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("zbgrpo: ") and error.count("\n") == 1 and message in error


def test_the_verb_loads_nothing_heavy(rates_file: Path) -> None:
    code = (
        "import sys\nfrom zbgrpo.cli import main\n"
        f"main(['plan', '--ranks', '2', '--rates', {str(rates_file)!r}, '--groups-per-step', '4'])\n"
        "print(sorted({'torch', 'transformers', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


# ------------------------------------------------------------------------------------------ the benchmark


def test_the_benchmark_reports_the_worst_configuration() -> None:
    from zbgrpo.bench.plan import CONFIGURATIONS, Comparison, Observed, report

    def comparison(step: float, bubble: float) -> Comparison:
        return Comparison(Observed(step, 0.2, bubble), Observed(1.0, 0.2, 0.1), Observed(1.0, 0.2, 0.1), 0.0)

    names = list(CONFIGURATIONS)
    found = {
        names[0]: [comparison(1.02, 0.10), comparison(0.96, 0.11), comparison(1.5, 0.9)],
        names[1]: [comparison(1.01, 0.12)],
        names[2]: [comparison(0.93, 0.10)],
    }
    result = report(found)
    assert result["step_time_error"] == pytest.approx(0.07)
    assert result["bubble_error"] == pytest.approx(2.0)
    assert result["own_step_time_error"] == 0
    first = result["configurations"][names[0]]
    assert (first["step_time_error"], first["step_time_error_max"]) == pytest.approx((0.04, 0.5))
    assert len(first["rounds"]) == 3
