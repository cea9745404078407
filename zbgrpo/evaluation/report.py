"""Accuracy, pass@k and lengths of an evaluation, and its file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from zbgrpo.ledger.evaluation import EvaluationResult


def pass_at_k(num_responses: int, num_right: int, k: int) -> float:
    """Probability that at least one of k responses drawn without replacement from n is right: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. (2021), "Evaluating Large Language Models Trained on Code". 1 <= k <= n.
    """
    if not 1 <= k <= num_responses:
        raise ValueError(f"pass@{k} of {num_responses} responses")
    return 1.0 - math.comb(num_responses - num_right, k) / math.comb(num_responses, k)


def summarise(results: Sequence[EvaluationResult]) -> dict[str, Any]:
    """Figures of one task at one version. Rows that could not be scored are counted and left out of the means."""
    scored = [r for r in results if r.error is None]
    accuracies = [value for r in scored for value in r.ans_acc]
    lengths = [length for r in scored for length in r.lengths]
    num_responses = min((len(r.ans_acc) for r in scored), default=0)
    powers = [2**i for i in range(num_responses.bit_length()) if 2**i <= num_responses]
    return {
        "rows": len(results),
        "errors": len(results) - len(scored),
        "accuracy": _mean(accuracies),
        "format_acc": _mean([value for r in scored for value in r.format_acc]),
        "reward": _mean([value for r in scored for value in r.rewards]),
        "response_length_mean": _mean(lengths),
        "truncated": _mean([float(cut) for r in scored for cut in r.truncated]),
        **{
            f"pass@{k}": _mean([pass_at_k(len(r.ans_acc), sum(v >= 1 for v in r.ans_acc), k) for r in scored])
            for k in powers
        },
    }


def write_rows(folder: Path, task: str, version: int, results: Sequence[EvaluationResult]) -> Path:
    """One JSON line per row: `<folder>/<task>/step-N.jsonl`."""
    path = folder / task / f"step-{version}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = b"".join(msgspec.json.encode(result) + b"\n" for result in results)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(lines)
    temporary.replace(path)
    return path


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
