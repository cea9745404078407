"""The scale, a user's own functions, and scoring of files."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import pytest

from zbgrpo.errors import ConfigError, DataError
from zbgrpo.rewards.custom import as_result
from zbgrpo.rewards.score import RewardSpec, ScoreOutcome, Scorer, ScoreRequest, build_scorer, score_file


def boxed(response: str, gold: str | None, prompt: str = "") -> ScoreOutcome:
    return build_scorer(RewardSpec("boxed", 10.0)).score(ScoreRequest(response, gold, prompt=prompt))


def tagged(response: str, gold: str) -> ScoreOutcome:
    return build_scorer(RewardSpec("think_answer_tags", 10.0)).score(ScoreRequest(response, gold))


def test_boxed_scale() -> None:
    assert boxed(r"so \boxed{4}", "4") == ScoreOutcome(10.0, 1.0, 1.0)
    assert boxed(r"so \boxed{5}", "4") == ScoreOutcome(0.0, 1.0, 0.0)
    assert boxed("so 4", "4") == ScoreOutcome(0.0, 0.0, 0.0)
    assert boxed(r"\boxed{4} or \boxed{}", "4") == ScoreOutcome(0.0, 0.0, 0.0)


def test_last_box_decides() -> None:
    response = r"\boxed{35 cm} ++++ \boxed{4}"
    assert boxed(response, "4").reward == 10.0
    assert boxed(response, "35").reward == 0.0


def test_tags_scale() -> None:
    assert tagged("<think>a</think><answer>4</answer>", "4") == ScoreOutcome(10.0, 1.0, 1.0)
    assert tagged("<think>a</think><answer>5</answer>", "4") == ScoreOutcome(0.0, 1.0, 0.0)
    assert tagged("<answer>4</answer>", "4") == ScoreOutcome(0.0, 0.0, 0.0)  # right, but in the wrong format
    assert tagged("<think>a</think><answer>4/7</answer>", r"\frac{4}{7}").reward == 10.0
    assert tagged(r"<think>a</think><answer>\boxed{4}</answer>", "4").reward == 10.0
    assert tagged("<think>a</think><answer></answer>", "4") == ScoreOutcome(0.0, 1.0, 0.0)


def test_number_in_the_prose_pays_nothing() -> None:
    assert boxed("The numbers 3, 7, 42 appear", "42").reward == 0.0
    assert tagged("10 objects ... 2 matte", "10").reward == 0.0
    assert boxed("no box here", "4", prompt=r"Write \boxed{4}.").reward == 0.0


def test_unparsable_answer_with_the_text_of_the_gold_gets_half() -> None:
    assert tagged(r"<think></think><answer>\frac{1}{2</answer>", r"\frac{1}{2}") == ScoreOutcome(5.0, 1.0, 1.0)
    assert tagged(r"<think></think><answer>\frac{1}{3</answer>", r"\frac{1}{2}") == ScoreOutcome(0.0, 1.0, 0.0)


def test_unparsable_gold_pays_only_its_own_text() -> None:
    assert tagged("<think></think><answer>{? }</answer>", "?") == ScoreOutcome(10.0, 1.0, 1.0, gold_unparsable=True)
    for answer in ("5", "!", "x^2"):
        outcome = tagged(f"<think></think><answer>{answer}</answer>", "?")
        assert outcome == ScoreOutcome(0.0, 1.0, 0.0, gold_unparsable=True)


@pytest.mark.parametrize("gold", [None, "", "  "])
def test_missing_gold_is_an_error_and_no_score(gold: str | None) -> None:
    outcome = boxed(r"\boxed{4}", gold)
    assert outcome.error is not None
    assert not outcome.infrastructure


@pytest.mark.parametrize("unit", [r"\text{", ",", "{", "9^", "((", r"\frac", "1,234"])
def test_degenerate_response(unit: str) -> None:
    long = unit * (200_000 // len(unit))
    assert boxed(long, "4").reward == 0.0
    assert boxed(rf"\boxed{{{long}}}", "4").reward == 0.0
    assert tagged(f"<think></think><answer>{long}</answer>", "4").reward == 0.0


@pytest.mark.parametrize("name", ["boxd", "module", ":f", "module:", "module:not a name"])
def test_unusable_types(name: str) -> None:
    with pytest.raises(ConfigError):
        build_scorer(RewardSpec(name, 10.0))


def test_unknown_type_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'boxed'"):
        build_scorer(RewardSpec("boxd", 10.0))


CUSTOM = """
import dataclasses

@dataclasses.dataclass
class Note:
    text: str

def length(response): return len(response)
def three(response, gt_answer, **_): return (2.0, 1.0, 0.5 if response == gt_answer else 0.0)
def everything(**given): return float(sorted(given) == ["gt_answer", "prompt", "response", "row", "test_cases"])
def level(response, row): return row["level"]
def raises(response): raise KeyError("lost")
def infinite(response): return float("inf")
def nothing(response): return None
def pair(response): return 1.0, 2.0
def wants(response, secret): return 1.0
def positional(response, /): return 1.0
constant = 3
"""


@pytest.fixture
def custom_file(tmp_path: Path) -> Path:
    path = tmp_path / "custom_reward_example.py"
    path.write_text(CUSTOM)
    return path


def load(path: Path, name: str) -> Scorer:
    return build_scorer(RewardSpec(f"{path}:{name}", 10.0))


def test_custom_results(custom_file: Path) -> None:
    request = ScoreRequest("abc", "abc", row={"level": 0.25})
    assert load(custom_file, "length").score(request) == ScoreOutcome(3.0, 1.0, 1.0)
    assert load(custom_file, "three").score(request) == ScoreOutcome(2.0, 1.0, 0.5)
    assert load(custom_file, "everything").score(request).reward == 1.0
    assert load(custom_file, "level").score(request) == ScoreOutcome(0.25, 1.0, 0.25)
    assert load(custom_file, "infinite").score(request).reward == math.inf


@pytest.mark.parametrize(
    ("name", "part"), [("raises", "KeyError: 'lost'"), ("nothing", "NoneType"), ("pair", "2 values")]
)
def test_custom_errors_are_no_score(custom_file: Path, name: str, part: str) -> None:
    outcome = load(custom_file, name).score(ScoreRequest("abc"))
    assert outcome.error is not None
    assert part in outcome.error
    assert not outcome.infrastructure


@pytest.mark.parametrize("name", ["missing", "constant", "wants", "positional"])
def test_custom_functions_that_cannot_be_called(custom_file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load(custom_file, name)


def test_custom_by_module_name(custom_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(custom_file.parent)
    scorer = build_scorer(RewardSpec("custom_reward_example:length", 10.0))
    assert scorer.score(ScoreRequest("abcd")).reward == 4.0


@pytest.mark.parametrize("target", ["no_such_module_here:f", "no/such/file.py:f", "json.nothing_here:f"])
def test_custom_not_found(target: str) -> None:
    with pytest.raises(ConfigError, match="not found"):
        build_scorer(RewardSpec(target, 10.0))


def test_ans_acc_of_a_bare_number() -> None:
    assert as_result(0.3).ans_acc == pytest.approx(0.3)
    assert as_result(7).ans_acc == 1.0
    assert as_result(-7).ans_acc == 0.0
    assert as_result(True) == (1.0, 1.0, 1.0)
    with pytest.raises(TypeError):
        as_result("10")


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def scores(path: Path, reward_type: str = "boxed") -> list[dict[str, object]]:
    out = io.StringIO()
    score_file(path, RewardSpec(reward_type, 10.0), out, num_workers=1)
    return [json.loads(line) for line in out.getvalue().split("\n")[:-1]]


def test_score_file_in_order(tmp_path: Path) -> None:
    rows = [{"response": rf"\boxed{{{number}}}", "gt_answer": number % 3} for number in range(100)]
    rows[7]["response"] = "a line separator \u2028 inside \\boxed{1}"
    path = write_lines(tmp_path / "rows.jsonl", *(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    expected = [10.0 if number in (0, 1, 2, 7) else 0.0 for number in range(100)]
    assert scores(path) == [{"reward": reward, "format_acc": 1.0, "ans_acc": reward / 10.0} for reward in expected]


def test_score_file_without_rows(tmp_path: Path) -> None:
    assert scores(write_lines(tmp_path / "rows.jsonl", "", "")) == []


def test_score_file_custom_and_errors(tmp_path: Path, custom_file: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", '{"response": "abc"}', '{"response": "abcd", "level": 12}')
    assert [line["reward"] for line in scores(path, f"{custom_file}:length")] == [3.0, 4.0]
    first, second = scores(path, f"{custom_file}:level")
    assert first["reward"] is None
    assert "KeyError" in str(first["error"])
    assert second == {"reward": 12.0, "format_acc": 1.0, "ans_acc": 1.0}


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"response": "a"', "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"gt_answer": "4"}', "'response'"),
        ('{"response": 4, "gt_answer": "4"}', "'response'"),
        ('{"response": "a"}', "'gt_answer' is missing"),
        ('{"response": "a", "gt_answer": ""}', "'gt_answer' is empty"),
        ('{"response": "a", "gt_answer": true}', "bool"),
        ('{"response": "a", "gt_answer": ["4"]}', "list"),
        ('{"response": "a", "gt_answer": "\\frac12"}', "control character"),
        ('{"response": "a", "gt_answer": "4", "test_cases": []}', "'test_cases'"),
        ('{"response": "a", "gt_answer": "4", "prompt": 3}', "'prompt'"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, part: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", '{"response": "a", "gt_answer": 4}', "", line)
    with pytest.raises(DataError, match=r"rows\.jsonl:3: ") as caught:
        scores(path)
    assert part in str(caught.value)


def test_score_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        scores(tmp_path / "rows.jsonl")


def reference_solutions(name: str) -> list[tuple[str, str]]:
    folder = os.environ.get("ZBGRPO_TEST_DATA")
    if not folder:
        pytest.skip("ZBGRPO_TEST_DATA does not name a folder with test data")
    lines = (Path(folder) / name).read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    return [(row["reference_solution"], row["gt_answer"]) for row in rows]


def test_math500_references_score_full_marks() -> None:
    scorer = build_scorer(RewardSpec("boxed", 10.0))
    rows = reference_solutions("math500.jsonl")
    outcomes = [scorer.score(ScoreRequest(solution, gold)) for solution, gold in rows]
    assert outcomes == [ScoreOutcome(10.0, 1.0, 1.0)] * 500


def test_math500_references_score_full_marks_from_a_file(tmp_path: Path) -> None:
    rows = reference_solutions("math500.jsonl")
    lines = [json.dumps({"response": solution, "gt_answer": gold}) for solution, gold in rows]
    lines[0] = json.dumps({"response": r"\boxed{wrong}", "gt_answer": rows[0][1]})
    lines.append(json.dumps({"response": rows[0][0], "gt_answer": rows[0][1]}))
    assert [line["reward"] for line in scores(write_lines(tmp_path / "rows.jsonl", *lines))] == [0.0] + [10.0] * 500


def test_aime_references() -> None:
    """One of the 90 solutions has no box; the others write theirs in bold, in brackets, with a full stop."""
    scorer = build_scorer(RewardSpec("boxed", 10.0))
    rows = reference_solutions("aime_validation.jsonl")
    unpaid = [solution for solution, gold in rows if scorer.score(ScoreRequest(solution, gold)).reward != 10.0]
    assert len(unpaid) == 1
    assert r"\boxed" not in unpaid[0]
