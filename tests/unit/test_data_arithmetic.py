"""The quickstart's task: three sets that share no question, in rows that the loader takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zbgrpo.data.arithmetic import NUM_HELDOUT, NUM_TRAIN, Pair, make_row, make_splits, worked_response
from zbgrpo.data.rows import load_rows


@pytest.mark.parametrize("seed", range(5))
def test_sets_are_disjoint_in_either_order_and_complete(seed: int) -> None:
    splits = make_splits(seed)
    unordered = [{frozenset(pair) for pair in pairs} for pairs in splits]
    assert [len(pairs) for pairs in splits] == [len(pairs) for pairs in unordered]
    assert len(unordered[0] | unordered[1] | unordered[2]) == sum(len(pairs) for pairs in splits) == 4095
    assert (len(splits.train), len(splits.heldout)) == (NUM_TRAIN, NUM_HELDOUT)
    assert len(splits.heldout) >= 200
    first_larger = sum(pair.a > pair.b for pair in splits.train) / len(splits.train)
    assert 0.4 < first_larger < 0.6


def test_sets_follow_the_seed() -> None:
    assert make_splits(3) == make_splits(3)
    assert make_splits(3).heldout != make_splits(4).heldout


def test_rows_load_and_carry_the_sum(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(make_row(pair)) + "\n" for pair in make_splits(0).train))
    loaded = load_rows(str(file), skip_bad_rows=False)
    assert (len(loaded.rows), loaded.num_bad) == (NUM_TRAIN, 0)
    for row in loaded.rows:
        content = row.messages[0]["content"]
        a, b = content.removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(a) + int(b) == int(row.gt_answer or "")


def test_worked_response_reads_as_documented() -> None:
    assert make_row(Pair(17, 25)) == {
        "messages": {"role": "user", "content": "What is 17 + 25?"},
        "gt_answer": "42",
    }
    assert worked_response(Pair(17, 25), 42) == "<think>12+30</think><answer>42</answer>"
