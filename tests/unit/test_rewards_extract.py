"""Where the answer stands in a response, and when the format is valid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbgrpo.rewards.extract import EXTRACTORS, extract_boxed, extract_think_answer, last_box
from zbgrpo.rewards.prompts import default_stop_strings, default_system_prompt

GOOD = "<think>2+2</think> <answer>4</answer>"


@pytest.mark.parametrize(
    "response",
    [
        GOOD,
        GOOD + " \n\t",
        "<think>a\nb</think>\n\n  <answer>\n4\n</answer>\n",
        "Let me see. <think>x</think><answer>4</answer>",
    ],
)
def test_think_answer_valid(response: str) -> None:
    assert extract_think_answer(response) == (True, "4")


@pytest.mark.parametrize(
    "response",
    [
        GOOD + ".",  # text behind the answer
        "<answer>4</answer><think>x</think>",  # out of order
        "<think>x</think><think>y</think><answer>4</answer>",
        "<think>x</think><answer>3</answer><answer>4</answer>",
        "<think>x</think><answer>4</answer></answer>",
        "<think>x<answer>4</answer>",
        "x</think><answer>4</answer>",
        "<think>x</think><answer>4",
        "<answer>4</answer>",
        "There are 10 objects, of which 2 are matte.",
        "",
    ],
)
def test_think_answer_invalid(response: str) -> None:
    assert not extract_think_answer(response).format_valid


def test_last_answer_counts() -> None:
    assert extract_think_answer("<answer>3</answer> no, <answer>4/7</answer>").answer == "4/7"


def test_answer_tag_without_content_is_no_answer() -> None:
    assert extract_think_answer("<think>x</think><answer> </answer>") == (True, None)


def test_prompt_that_opened_think() -> None:
    prompt = "<|user|>Use <think> </think> and <answer> </answer>.<|assistant|><think>\n"
    assert extract_think_answer("2+2</think><answer>4</answer>", prompt) == (True, "4")
    assert not extract_think_answer(GOOD, prompt).format_valid  # opened twice
    assert not extract_think_answer("2+2</think><answer>4</answer>", "<think> is a tag").format_valid


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{35 cm} ++++ \boxed{4}", "4"),
        (r"\boxed{7} and again \boxed{7}", "7"),
        (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{\sqrt{3}}{3}"),
        (r"**\boxed{73}**", "73"),
        (r"\boxed {244}$", "244"),
        (r"\fbox{42}", "42"),
        (r"\fbox{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{1 + \boxed{2} + 3}", r"1 + \boxed{2} + 3"),
        (r"\boxed{5} as asked, in \boxed", "5"),
        (r"{ \boxed{5", None),
        (r"\boxed{3} then \boxed{", None),
        (r"\boxed{3} then \boxed{}", None),
        (r"\boxed{3} then \boxed{  }", None),
        (r"\boxed{ unfinished \boxed{5}", "5"),
        (r"} } \boxed{5} {", "5"),
        ("The numbers 3, 7, 42 appear", None),
        ("", None),
    ],
)
def test_last_box(text: str, expected: str | None) -> None:
    assert last_box(text) == expected


def test_boxed_reads_the_answer_part_only() -> None:
    assert extract_boxed(r"<think>\boxed{1}</think> \boxed{2}") == (True, "2")
    assert extract_boxed(r"<think>\boxed{1}</think> none") == (False, None)
    assert extract_boxed(r"<think> so \boxed{1}") == (False, None)
    assert extract_boxed(r"a</think>\boxed{2}<think>\boxed{3}") == (False, None)
    assert extract_boxed(r"2+2 equals 4.</think> The answer is \boxed{4}.") == (True, "4")


def test_boxed_when_the_prompt_opened_think() -> None:
    prompt = "<|assistant|><think>\n"
    assert extract_boxed(r"x</think>\boxed{4}", prompt) == (True, "4")
    assert extract_boxed(r"so far \boxed{4}", prompt) == (False, None)


def test_box_of_the_prompt_pays_nothing() -> None:
    assert extract_boxed("four", prompt=r"Put it in \boxed{4}.") == (False, None)


def test_box_far_from_the_end() -> None:
    assert extract_boxed(r"\boxed{42}" + " because of prose" * 100).answer == "42"


@given(st.lists(st.sampled_from(["{", "}", "\\", r"\boxed{", r"\{", r"\}", "7", " ", "<think>", "</think>"])))
def test_box_content_is_balanced_and_in_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    box = last_box(text)
    if box is not None:
        assert box in text
        assert box.strip()
        bare = box.replace("\\\\", "").replace(r"\{", "").replace(r"\}", "")
        assert bare.count("{") == bare.count("}")


@pytest.mark.parametrize(
    "unit", [r"\text{", r"\boxed{", r"\boxed{\text{1}}", ",", "{", "}", "<answer>", "<think>", r"\boxed ", "\\", " "]
)
def test_long_degenerate_text(unit: str) -> None:
    """Quadratic time would run into the time limit of the test."""
    long = unit * (200_000 // len(unit))
    assert EXTRACTORS["think_answer_tags"](long, "").answer is None
    assert EXTRACTORS["boxed"]("42" + long + r"\boxed{", "").answer is None
    tagged = EXTRACTORS["think_answer_tags"](f"<think></think><answer>{long}7</answer>", "")
    assert (tagged.answer or "").endswith("7")


def test_defaults_by_type() -> None:
    assert default_stop_strings("think_answer_tags") == ["</answer>"]
    assert default_stop_strings("boxed") == default_stop_strings("my.module:reward") == []
    tagged = default_system_prompt("think_answer_tags") or ""
    assert all(tag in tagged for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    assert r"\boxed{}" in (default_system_prompt("boxed") or "")
    assert default_system_prompt("code")
    assert default_system_prompt("my.module:reward") is None
