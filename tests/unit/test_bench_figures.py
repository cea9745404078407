"""Benchmarks of weights and log-probs: their arithmetic, and whole runs at a small size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from zbgrpo.algorithms.logprobs import token_logprobs
from zbgrpo.bench import logprob, weights
from zbgrpo.errors import ResourceError, ZbgrpoError

# ------------------------------------------------------------------------------------------ log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_baseline_of_log_probs_is_the_definition(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 5, generator=generator), torch.randn(31, 5, generator=generator)
    targets = torch.arange(9)
    for got, expected in zip(
        logprob.whole_logits(hidden, weight, targets, temperature),
        token_logprobs(hidden, weight, targets, temperature, 4),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_log_probs_at_a_small_size(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "64", "--vocabulary", "5000", "--hidden", "8", "--chunk-tokens", "4"]
    assert logprob.main([*sizes, "--pairs", "2"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in ("memory_ratio", "time_ratio"):
        assert result[f"{key}_min"] <= result[key] <= result[f"{key}_max"]
    assert result["problem"] == {
        "num_tokens": 64, "vocabulary": 5000, "hidden": 8, "chunk_tokens": 4, "num_threads": 1, "temperature": 1.0,
    }  # fmt: skip


class FakeSide:
    runs: ClassVar[dict[str, list[logprob.Run]]] = {}

    def __init__(self, side: str, problem: logprob.Problem) -> None:
        self._runs = iter(self.runs[side])

    def run(self) -> logprob.Run:
        return next(self._runs)

    def close(self) -> None:
        pass


def test_log_prob_ratios_are_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "Side", FakeSide)
    FakeSide.runs = {
        "chunked": [
            logprob.Run(2.0, 2 * 2.0, 10, 5.0),
            logprob.Run(3.0, 2 * 3.0, 20, 5.0),
            logprob.Run(8.0, 2 * 8.0, 30, 5.0),
        ],
        "whole": [
            logprob.Run(2.0, 2 * 2.0, 100, 5.0),
            logprob.Run(2.0, 2 * 2.0, 100, 5.0),
            logprob.Run(2.0, 2 * 2.0, 100, 5.0),
        ],
    }
    result = logprob.measure(logprob.Problem(), 3)
    assert (result["time_ratio"], result["time_ratio_min"], result["time_ratio_max"]) == (1.5, 1.0, 4.0)
    assert result["cpu_ratio"] == 1.5
    assert (result["memory_ratio"], result["chunked_extra_mb"]) == (0.2, 2e-05)


def test_sides_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "Side", FakeSide)
    FakeSide.runs = {"chunked": [logprob.Run(1.0, 2 * 1.0, 1, 5.0)], "whole": [logprob.Run(1.0, 2 * 1.0, 1, 5.1)]}
    with pytest.raises(ZbgrpoError, match="disagree"):
        logprob.measure(logprob.Problem(), 1)


def test_a_side_that_dies_is_an_error() -> None:
    side = logprob.Side("chunked", logprob.Problem(num_tokens=-1))
    with pytest.raises(ResourceError, match="has died"):
        for _ in range(2):
            side.run()
    side.close()


# ------------------------------------------------------------------------------------------ weights


def test_the_model_has_the_size_that_it_is_named_for() -> None:
    def numbers(size: str) -> int:
        return sum(torch.Size(shape).numel() for shape in weights.SIZES[size].shapes().values())

    assert 134e6 < numbers("135m") < 136e6
    assert numbers("tiny") < 1e6


def write_rank(folder: Path, rank: int, *versions: dict[str, float]) -> None:
    (folder / f"rank-{rank}.json").write_text(json.dumps({"float32": list(versions)}))


def test_weight_ratios_are_of_versions(tmp_path: Path) -> None:
    write_rank(
        tmp_path,
        0,
        {"bare": 1.0, "sent": 2.0, "stall": 0.3, "copy": 0.1},
        {"bare": 1.0, "sent": 1.0, "stall": 0.1, "copy": 0.1},
        {"bare": 1.0, "sent": 1.25, "stall": 0.2, "copy": 0.1},
    )
    write_rank(tmp_path, 1, {"stall": 0.1, "copy": 0.1}, {"stall": 0.2, "copy": 0.1})
    write_rank(tmp_path, 2, {"stall": 0.4, "copy": 0.1})
    case = weights.read_case(tmp_path, "float32", 2, 10**9)
    assert (case["broadcast_ratio"], case["broadcast_ratio_min"], case["broadcast_ratio_max"]) == (0.8, 0.5, 1.0)
    assert (case["consumer_stall_ratio"], case["producer_stall_ratio"]) == (2.0, 2.0)
    assert (case["gb_per_s"], case["bare_gb_per_s"], case["num_versions"]) == (0.8, 1.0, 3)


def test_the_worst_case_is_what_counts() -> None:
    cases: list[dict[str, Any]] = [
        {"broadcast_ratio": 0.9, "consumer_stall_ratio": 1.2, "producer_stall_ratio": 0.1},
        {"broadcast_ratio": 1.0, "consumer_stall_ratio": 1.0, "producer_stall_ratio": 0.2},
    ]
    assert weights.worst(cases) == {
        "broadcast_ratio": 0.9, "consumer_stall_ratio": 1.2, "producer_stall_ratio": 0.2,
    }  # fmt: skip


def test_weights_at_a_small_size(capsys: pytest.CaptureFixture[str]) -> None:
    """Real processes; every version is checked where it is applied."""
    assert weights.main(["--size", "tiny", "--versions", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["cases"]) == {
        "float32, 1 producer", "bfloat16, 1 producer", "float32, 2 producers", "bfloat16, 2 producers",
    }  # fmt: skip
    assert min(result[key] for key in ("broadcast_ratio", "consumer_stall_ratio", "producer_stall_ratio")) > 0
