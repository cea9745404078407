"""What an evaluation's rows amount to."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from zbgrpo.evaluation.report import pass_at_k, summarise, write_rows
from zbgrpo.ledger.evaluation import EvaluationResult


def result(
    row: int, ans_acc: list[float], error: str | None = None, lengths: list[int] | None = None
) -> EvaluationResult:
    num = len(ans_acc)
    return EvaluationResult(
        task="math",
        row=row,
        version=7,
        rewards=[10 * a for a in ans_acc],
        ans_acc=ans_acc,
        format_acc=[1.0] * num,
        lengths=lengths or [5] * num,
        truncated=[i % 2 == 1 for i in range(num)],
        texts=[f"answer {i} é\u2028" for i in range(num)],
        error=error,
    )


@pytest.mark.parametrize("num_responses", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num_responses: int) -> None:
    for num_right, k in itertools.product(range(num_responses + 1), range(1, num_responses + 1)):
        subsets = list(itertools.combinations(range(num_responses), k))
        share = sum(min(subset) < num_right for subset in subsets) / len(subsets)  # the first ones are right
        assert pass_at_k(num_responses, num_right, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("k", [0, 4, -1])
def test_pass_at_k_refuses_a_k_that_cannot_be_drawn(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of 3"):
        pass_at_k(3, 1, k)


def test_summary_by_hand() -> None:
    rows = [
        result(0, [1.0, 0.0, 0.0, 0.0], lengths=[1, 2, 3, 4]),
        result(1, [1.0, 1.0, 1.0, 1.0], lengths=[10, 10, 10, 10]),
        result(2, [0.0, 0.0, 0.0, 0.0], lengths=[0, 0, 0, 0]),
        result(3, [], error="three attempts failed"),
    ]
    summary = summarise(rows)
    assert summary == {
        "rows": 4,
        "errors": 1,
        "accuracy": pytest.approx(5 / 12),
        "format_acc": 1.0,
        "reward": pytest.approx(50 / 12),
        "response_length_mean": pytest.approx(50 / 12),
        "truncated": 0.5,
        "pass@1": pytest.approx((1 / 4 + 1 + 0) / 3),
        "pass@2": pytest.approx((1 / 2 + 1 + 0) / 3),
        "pass@4": pytest.approx(2 / 3),
    }


def test_powers_of_two_up_to_the_number_of_responses() -> None:
    def names(num: int) -> list[str]:
        return [name for name in summarise([result(0, [1.0] * num)]) if name.startswith("pass@")]

    assert names(1) == ["pass@1"]
    assert names(3) == ["pass@1", "pass@2"]
    assert names(8) == ["pass@1", "pass@2", "pass@4", "pass@8"]


def test_partly_right_answers_do_not_pass() -> None:
    summary = summarise([result(0, [0.5, 0.5])])
    assert summary["accuracy"] == 0.5
    assert summary["pass@1"] == summary["pass@2"] == 0.0


def test_no_scored_row_has_no_means() -> None:
    summary = summarise([result(0, [], error="gone")])
    assert summary["rows"] == summary["errors"] == 1
    assert summary["accuracy"] is None and summary["response_length_mean"] is None


def test_rows_file_has_one_line_per_row_and_replaces_an_older_one(tmp_path: Path) -> None:
    rows = [result(0, [1.0, 0.0]), result(1, [], error="gone")]
    path = write_rows(tmp_path / "eval", "math", 7, rows[:1])
    assert write_rows(tmp_path / "eval", "math", 7, rows) == path == tmp_path / "eval" / "math" / "step-7.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["row"] for line in lines] == [0, 1]
    assert lines[0]["texts"] == rows[0].texts and lines[0]["ans_acc"] == [1.0, 0.0]
    assert lines[1]["error"] == "gone"
    assert [p.name for p in path.parent.iterdir()] == ["step-7.jsonl"]
