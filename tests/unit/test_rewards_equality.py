"""Equality of answers: gold first, then the answer."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbgrpo.rewards import literal
from zbgrpo.rewards.math_equal import Verdict, compare

EQUAL = [
    ("13", r"\text{13}"),
    (r"\dfrac{9}{7}", r"\frac{9}{7}"),
    (r"\frac{\sqrt{3}}{3}", "sqrt(3)/3"),
    (r"\frac12", "0.5"),
    (r"\frac{270}7", r"\frac{270}{7}"),
    (r"-\frac{3}{8}", r"\frac{-3}{8}"),
    (r"137\frac{1}{2}", "137.5"),
    (".35625", "0.35625"),
    ("18.90", r"\$18.9"),
    ("11,111,111,100", "11111111100"),
    ("11111", r"11,\! 111"),
    ("1234", "1{,}234"),
    ("33", "033"),
    ("104", "104."),
    ("73", "**73**"),
    ("245", r"\textbf{(245) }"),
    ("5", r"Answer: \boxed{5}"),
    ("5", "$5$"),
    ("5", r"\(5\)"),
    ("10^{-7}", "0.0000001"),
    ("18", r"18 \text{ eggs}"),
    (r"90^\circ", "90"),
    (r"28\%", "28 percent"),
    (r"28\%", "28"),
    (r"28\%", "0.28"),
    ("1331 and 1728", "1728, 1331"),
    ("1,2,3", "3,2,1"),
    ("-2,1", r"1, -2"),
    (r"1\pm\sqrt{19}", r"1+\sqrt{19},1-\sqrt{19}"),
    (r"\{1\pm\sqrt{5},-2\}", r"\{-2, 1+\sqrt5, 1-\sqrt5\}"),
    ("(1,2)", "1,2"),
    (r"(3,\frac{\pi}{2})", r"(3, \pi/2)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    ("[-2,7]", r"x \in [-2,7]"),
    ("0<x<12.5", "(0,12.5)"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("x=1,y=2", "y=2,x=1"),
    ("5x-7y+11z+4=0", "-5x+7y-11z-4=0"),
    ("8n^2+4n+1", "4n(2n+1)+1"),
    ("6+9i", "9i+6"),
    (r"\begin{pmatrix}-1/3\\2/3\end{pmatrix}", r"\begin{pmatrix}-\frac13\\\frac23\end{pmatrix}"),
    ("(B)", "B"),
    ("C", r"\text{(C)}"),
    ("Evelyn", r"\text{Evelyn}."),
    (r"\text{June 20}", "June 20"),
    ("7:30", "07:30"),
    (r"7:30 \text{ p.m.}", "7:30 PM"),
    ("4210_{5}", "4210_5"),
    ("4210_{5}", "4210"),
    (r"\sqrt{2}", "1.414214"),
    (r"\infty", r"\infty"),
]

NOT_EQUAL = [
    ("35", "4"),
    ("-5", "5"),
    ("4", r"4\sqrt(2)"),
    ("1331 and 1728", "1728"),
    ("1728", "1331 and 1728"),
    ("4", "3 or 4"),
    ("1,1,2", "1,2"),
    ("(1,2,3)", "(3,2,1)"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "2,1"),
    ("[1,2]", "(1,2)"),
    ("(3,4]", "[3,4)"),
    ("(1,2)", r"\{1,2\}"),
    ("7:30", "14:60"),
    ("7:30", "7"),
    ("7:30", r"\frac{7}{30}"),
    ("7:30 am", "7:30 pm"),
    (r"10 \text{ am}", r"10 \text{ pm}"),
    ("100", "100.0000001"),
    ("1/3", "0.333333"),
    (".0000672", "0.0000671"),
    ("10^{-7}", "0.0000002"),
    (r"1.6\times 10^{-19}", r"9.1\times 10^{-31}"),
    ("10^{200}+1", "10^{200}"),
    ("123456789012345678901234567890", "123456789012345678901234567891"),
    (r"\pi", "3.1416"),
    (r"\sqrt{2}", "1.41421"),
    ("3*x-1*y+13=0", "3x + 4y + 14=0"),
    ("f(x) = 0", r"\forall x>0, f(x) = 0"),
    ("x=5", "y=5"),
    ("p-q", "q-p"),
    ("i", "-i"),
    ("A", "B"),
    ("east", "seat"),
    ("even", "odd"),
    ("4210_{5}", "4210_{7}"),
    ("28", "0.28"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold: str, answer: str) -> None:
    assert compare(gold, answer) is Verdict.EQUAL


@pytest.mark.parametrize(("gold", "answer"), NOT_EQUAL)
def test_not_equal(gold: str, answer: str) -> None:
    assert compare(gold, answer) is not Verdict.EQUAL


def test_gold_comes_first() -> None:
    """math-verify reads a relation as a set only on the gold side, so swapped arguments show here."""
    assert compare("0<x<12.5", "(0,12.5)") is Verdict.EQUAL
    assert compare("(0,12.5)", "0<x<12.5") is not Verdict.EQUAL


@pytest.mark.parametrize("gold", [r"\frac{1}{2", "?", "", "x^{", "(" * 30 + "1" + ")" * 30, "7+" * 600 + "7"])
def test_gold_that_cannot_be_parsed(gold: str) -> None:
    assert compare(gold, "5") is Verdict.GOLD_UNPARSABLE
    assert compare(gold, gold) is Verdict.GOLD_UNPARSABLE


@pytest.mark.parametrize("answer", [r"\frac{1}{2", "?", r"x^2+\frac{", "(" * 30 + "1" + ")" * 30, "1" * 5000])
def test_answer_that_cannot_be_parsed(answer: str) -> None:
    assert compare(r"\frac{1}{2}", answer) is Verdict.ANSWER_UNPARSABLE


@given(st.integers(-(10**25), 10**25), st.integers(-(10**25), 10**25))
@settings(deadline=None)
def test_integers_compare_exactly(left: int, right: int) -> None:
    assert (compare(str(left), f"{right:,}") is Verdict.EQUAL) == (left == right)
    assert compare(str(left), f"{left:,}") is Verdict.EQUAL


@given(st.integers(0, 10**12), st.integers(1, 10**6), st.integers(1, 50))
def test_fractions_are_reduced(numerator: int, denominator: int, factor: int) -> None:
    number = literal.exact_number(rf"\frac{{{numerator * factor}}}{{{denominator * factor}}}")
    assert number == literal.exact_number(f"{numerator}/{denominator}")


@given(st.text(alphabet=r"0123456789.,/{}()[]\$%^_ +-:andorpmx", max_size=40))
@settings(deadline=None)
def test_text_rules_take_anything(text: str) -> None:
    cleaned = literal.clean(text)
    literal.exact_number(cleaned)
    literal.clock_time(cleaned)
    literal.based_number(cleaned)
    literal.word(cleaned)
    literal.split_list(cleaned)


def test_same_text() -> None:
    assert literal.same_text(r"{1, 2}", "1 2")
    assert not literal.same_text("", "")
    assert not literal.same_text("{ }", "{,}")


def test_division_by_zero_is_no_number() -> None:
    assert literal.exact_number("1/0") is None
    assert literal.exact_number(r"\frac{1}{0}") is None


def test_verdicts_are_the_same_in_threads() -> None:
    """No signal-based limits: in a thread they raise, and are then taken for a wrong answer."""
    cases = EQUAL[::3] + NOT_EQUAL[::3]
    expected = [compare(gold, answer) for gold, answer in cases]
    results: dict[int, list[Verdict]] = {}

    def run(number: int) -> None:
        results[number] = [compare(gold, answer) for gold, answer in cases]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert list(results.values()) == [expected] * 3
