"""Benchmarks of whole runs: what they read from logs, and their arithmetic. The runs themselves are not made here."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbgrpo.bench import overlap, roles, tails, train
from zbgrpo.bench.overlap import Pair, balanced_sizes, sizes_of
from zbgrpo.bench.roles import WARMUP_STEPS, Sizes, Window
from zbgrpo.config.load import load_config
from zbgrpo.errors import ZbgrpoError

SIZES = Sizes(2, 2, 8, 1, 2, 10)


def window(**changed: float) -> Window:
    whole = {
        "step_seconds": 2.0, "samples_per_s": 8.0, "training_seconds": 1.0, "generating_seconds": 1.9,
        "consumers": 0.45, "producers": 0.02, "tokens_left_out": 0.0, "dropped": 0,
    }  # fmt: skip
    return Window(**{**whole, **changed})


def write_logs(folder: Path, num_steps: int, generated: int) -> Path:
    """Steps of 10 s and two groups: 8 s of training, 1 of waiting for groups, 1 for weights. A group takes 4 s, in
    which three quarters of the slots are occupied, and has 8 responses of 5 tokens; of every step one token is left
    out."""
    events = folder / "events"
    events.mkdir(parents=True)
    consumer, producer, metrics = [], [], []
    for step in range(num_steps):
        time = 10.0 * (step + 1)
        consumer += [
            {"kind": "trained", "time": time, "step": step, "uid": [0, 2 * step + n], "lease": 2 * step + n}
            for n in range(2)
        ]
        times = {"busy": 8.0, "starved": 1.0, "blocked_on_weights": 1.0}
        consumer.append(
            {
                "kind": "commit",
                "time": time,
                "version": step + 1,
                "times": {"startup": 50.0} | {name: value * (step + 1) for name, value in times.items()},
            }
        )
        metrics.append({"step": step + 1, "staleness/tokens_left_out": 1})
    for group in range(generated):
        time = 4.0 * (group + 1)
        producer.append({"kind": "sent", "time": time, "uid": [0, group], "lengths": [5] * 8})
        times = {"busy": 0.75 * time, "starved": 0.25 * time, "blocked_on_weights": 0.0}
        producer.append({"kind": "decode", "time": time, "times": times, "rows": [], "slots": 8, "version": 0})
    for name, lines in (("rank-0", consumer), ("rank-1", producer)):
        (events / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "summary.json").write_text(json.dumps({"ledger": {"dropped": 0}}))
    return folder


def test_what_a_window_says(tmp_path: Path) -> None:
    found = roles.read_window(write_logs(tmp_path, 12, 60), SIZES, 5)
    assert found == pytest.approx(
        Window(
            step_seconds=10.0,
            samples_per_s=1.6,
            training_seconds=8.0,
            generating_seconds=7.5,
            consumers=0.2,
            producers=0.25,
            tokens_left_out=1 / 80,
            dropped=0,
        )
    )


def test_a_window_in_which_generation_ends_is_none(tmp_path: Path) -> None:
    logs = write_logs(tmp_path, 12, 20)  # the last group at 80 s, when the window ends
    with pytest.raises(ZbgrpoError, match="generation ended inside the window"):
        roles.read_window(logs, SIZES, 8 - WARMUP_STEPS)


def test_figures_of_a_pair() -> None:
    synchronous = window(step_seconds=3.8, samples_per_s=4.0, training_seconds=1.8, generating_seconds=1.9)
    pair = Pair(synchronous, window())
    assert pair.ratio == 2.0 and pair.alone_ratio == pytest.approx(0.95)
    assert not pair.consumers_limit and pair.limiting_bubble == 0.02
    assert pair.imbalance == pytest.approx(1 - 1 / 1.9)
    assert pair.other_bubble == pytest.approx(0.45 - pair.imbalance)
    turned = Pair(synchronous, window(training_seconds=2.0))
    assert turned.consumers_limit and turned.limiting_bubble == 0.45


def test_slots_are_chosen_by_what_a_decode_step_costs() -> None:
    """A round of x groups takes 1 + x / 4: a step of 8 groups 10 s with one at a time, 6 with two, 3 with eight."""

    def seconds(slots: int) -> float:
        return 8 / slots * (1 + slots / 4)

    def measured(slots: int, microbatch: int, training: float) -> tuple[Sizes, Window]:
        window_of = window(generating_seconds=seconds(slots), training_seconds=training)
        return sizes_of(slots, microbatch), window_of

    for slots in range(1, 9):
        for microbatch, training in ((8, (seconds(slots), 100.0)), (4, (100.0, seconds(slots)))):
            found = balanced_sizes(measured(2, 8, training[0]), measured(8, 4, training[1]))
            assert (found.slots_groups, found.microbatch_responses) == (slots, microbatch)


def test_lengths_have_a_heavy_tail() -> None:
    drawn = np.array(list(islice(tails.lengths(), 4000)))
    assert drawn.min() >= 1 and drawn.max() == tails.MEDIAN_TOKENS * tails.CAP
    assert np.median(drawn) == pytest.approx(tails.MEDIAN_TOKENS, rel=0.05)
    assert np.log(drawn[drawn > 4]).std() == pytest.approx(0.9, abs=0.1)
    assert list(islice(tails.lengths(), 3)) == list(islice(tails.lengths(), 3))


def test_staleness_without_a_bubble() -> None:
    assert Sizes(16, 8, 8, 5, 15, 10).staleness_for_no_bubble == 2
    assert Sizes(8, 8, 8, 8, 16, 10).staleness_for_no_bubble == 3


def test_reports_have_medians_and_spreads() -> None:
    pairs = [Pair(window(samples_per_s=4.0), window(samples_per_s=rate)) for rate in (7.0, 8.0, 6.0)]
    found = overlap.report(pairs)
    assert (found["ratio"], found["ratio_min"], found["ratio_max"]) == (1.75, 1.5, 2.0)
    assert found["bubble"]["limiting"] == 0.02 and len(found["pairs"]) == 3
    tail = tails.report([(window(), window(tokens_left_out=share)) for share in (0.0, 0.02, 0.01)])
    assert (tail["tokens_left_out"], tail["tokens_left_out_max"]) == (0.01, 0.02)
    assert tail["bubble"]["limiting"] == 0.02 and tail["synchronous"]["ratio"] == 1.0


def test_rates_are_of_what_was_both_generated_and_trained(tmp_path: Path) -> None:
    """Between the commits of step 1 and 11, at 10 and 110 s, 20 groups are trained; of those every 4 s, 25 are sent."""
    logs = write_logs(tmp_path, 16, 40)
    assert train.read_rates(logs / "events", 1) == pytest.approx((20 * 8 / 100, 20 * 40 / 100))
    slow = write_logs(tmp_path / "slow", 16, 40)
    lines = [json.loads(line) for line in (slow / "events" / "rank-1.jsonl").read_text().splitlines()]
    for line in lines:
        line["time"] *= 2.0  # 12 groups in the window
    (slow / "events" / "rank-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train.read_rates(slow / "events", 1) == pytest.approx((12 * 8 / 100, 12 * 40 / 100))


def test_the_ratio_to_trl_is_the_lesser_one() -> None:
    own, trl = train.Rates(6.0, 300.0), train.Rates(2.0, 150.0)
    found = train.report([(own, trl)])
    assert found["ratio"] == 2.0 and found["pairs"][0]["trl_samples_per_s"] == 2.0


@pytest.mark.parametrize("trainers", [1, 2])
def test_flags_are_those_of_a_valid_run(tmp_path: Path, trainers: int) -> None:
    (tmp_path / "reward.py").write_text(train.REWARD)
    config: Any = load_config(train.run_flags(tmp_path, tmp_path, trainers, 1), trainers + 1).config
    assert config.groups_per_step == train.PROMPTS_PER_STEP
    assert train.WINDOW_STEPS + 1 + config.ledger.max_staleness + 1 < config.ledger.max_steps
