r"""Whether an answer equals the gold answer.

First by text (`literal.py`): numbers exactly, times of day, words, lists element by element. Then by math-verify, gold
first, because its comparison is not symmetric. The verdict depends on the two texts only, not on the thread or process:
math-verify's own time limits, which are signals and work in a main thread only, are off. So a comparison may run for
ever; whoever calls this for untrusted answers keeps the clock (see `pool.py`).

Tolerance: numbers that are written out are compared exactly, so 0.333333 is not 1/3. A decimal equals an expression
such as \sqrt{2} if six significant digits agree. Units and a percent sign may be left out. Lists without brackets are
in any order, lists in brackets are not, and the brackets matter.
"""

from __future__ import annotations

import enum
import logging
import re
import threading
from typing import Any, Optional

from zbgrpo.rewards import literal

MAX_ANSWER_CHARS = 1000
"""A longer text is never parsed, only compared as text."""

MAX_NESTING = 20
"""Deeper brackets are not parsed: the parser recurses, and the verdict must not depend on the caller's stack."""

MAX_UNORDERED_ELEMENTS = 12
"""Longer lists without brackets are compared in order, as any order takes quadratically many comparisons."""

RELATIVE_TOLERANCE = 5e-6
"""Six significant digits, where a decimal meets an expression that is not a number written out."""

_SYMPY_ERRORS = (
    ArithmeticError,
    AttributeError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)

_LOCK = threading.Lock()
"""sympy and mpmath keep global state (caches, working precision)."""


class Verdict(enum.Enum):
    """Outcome of one comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    ANSWER_UNPARSABLE = "answer_unparsable"
    GOLD_UNPARSABLE = "gold_unparsable"


def compare(gold: str, answer: str) -> Verdict:
    """Verdict on `answer`. What cannot be parsed is reported as such, never as equal."""
    return _compare(literal.clean(gold), literal.clean(answer))


def warm_up() -> None:
    """Load math-verify and what it builds on first use."""
    compare(r"\frac{x}{2}", r"\frac{x+0}{2}")


def _compare(gold: str, answer: str) -> Verdict:
    if not _parsable_size(gold):
        return Verdict.GOLD_UNPARSABLE
    if not _parsable_size(answer):
        return Verdict.ANSWER_UNPARSABLE
    by_text = _compare_literally(gold, answer)
    if by_text is not None:
        return Verdict.EQUAL if by_text else Verdict.DIFFERENT
    by_element = _compare_lists(gold, answer)
    return by_element if by_element is not None else _compare_expressions(gold, answer)


def _parsable_size(text: str) -> bool:
    if not 0 < len(text) <= MAX_ANSWER_CHARS:
        return False
    depth = deepest = 0
    for symbol in text:
        depth += (symbol in "([{") - (symbol in ")]}")
        deepest = max(deepest, depth)
    return deepest <= MAX_NESTING and not re.search(rf"[-+!^]{{{MAX_NESTING},}}", text)


def _compare_literally(gold: str, answer: str) -> Optional[bool]:
    """Verdict of the text rules, or None if none of them applies to both texts."""
    gold_number, answer_number = literal.exact_number(gold), literal.exact_number(answer)
    gold_time, answer_time = literal.clock_time(gold), literal.clock_time(answer)
    if gold_time is not None or answer_time is not None:
        return gold_time == answer_time
    if gold_number is not None and answer_number is not None:
        return gold_number.same_as(answer_number)
    gold_based, answer_based = literal.based_number(gold), literal.based_number(answer)
    if gold_based is not None and answer_based is not None:
        return gold_based == answer_based
    gold_word, answer_word = literal.word(gold), literal.word(answer)
    if gold_word is not None and answer_word is not None:
        return gold_word == answer_word
    return None


def _compare_lists(gold: str, answer: str) -> Optional[Verdict]:
    """Verdict element by element, or None where the two are not lists of the same kind."""
    gold_list, answer_list = literal.split_list(gold), literal.split_list(answer)
    if len(gold_list.elements) < 2 or len(answer_list.elements) < 2:
        return None
    kinds_differ = gold_list[:2] != answer_list[:2]
    if kinds_differ and gold_list.opening and answer_list.opening:
        return Verdict.DIFFERENT
    if kinds_differ or r"\pm" in gold + answer or r"\mp" in gold + answer:
        return None
    if len(gold_list.elements) != len(answer_list.elements):
        return Verdict.DIFFERENT
    is_ordered = gold_list.opening in ("(", "[") or len(gold_list.elements) > MAX_UNORDERED_ELEMENTS
    return _match_elements(gold_list.elements, answer_list.elements, is_ordered)


def _match_elements(golds: list[str], answers: list[str], is_ordered: bool) -> Verdict:
    remaining = list(answers)
    for gold in golds:
        outcome = Verdict.DIFFERENT
        for candidate in remaining[:1] if is_ordered else list(remaining):
            outcome = _compare(gold, candidate)
            if outcome is Verdict.EQUAL:
                remaining.remove(candidate)
                break
            if outcome is Verdict.GOLD_UNPARSABLE:
                break
        if outcome is not Verdict.EQUAL:
            return outcome
    return Verdict.EQUAL


def _compare_expressions(gold: str, answer: str) -> Verdict:
    with _LOCK:
        gold_parsed = _parse(gold)
        if not gold_parsed:
            return Verdict.GOLD_UNPARSABLE
        if gold == answer:
            return Verdict.EQUAL
        answer_parsed = _parse(answer)
        if not answer_parsed:
            return Verdict.ANSWER_UNPARSABLE
        return Verdict.EQUAL if _verify(gold_parsed, answer_parsed) else Verdict.DIFFERENT


def _parse(text: str) -> list[Any]:
    """Expressions that math-verify reads in `text`; empty if it cannot."""
    from math_verify import LatexExtractionConfig, parse

    _quiet()
    # Inside a box, so that bare LaTeX is read at all, and read whole instead of searched for numbers.
    return parse(
        rf"\boxed{{{text}}}",
        extraction_config=(LatexExtractionConfig(boxed_match_priority=0),),
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify
    from sympy.core.random import seed

    seed(0)  # sympy tests some identities at random points
    return verify(gold, answer, timeout_seconds=None) and _values_agree(gold[0], answer[0])


def _values_agree(gold: Any, answer: Any) -> bool:
    """Second look at two values that math-verify calls equal: it rounds at six decimals, whatever their size."""
    from sympy import Abs, Expr, Float

    is_pair_of_values = all(isinstance(side, Expr) and side.is_number for side in (gold, answer))
    if not is_pair_of_values or gold == answer:
        return True
    try:
        if not gold.has(Float) and not answer.has(Float):
            difference = (gold - answer).doit()
            return bool(difference == 0) if difference.is_Rational else True
        distance = Abs(gold.doit() - answer.doit()).evalf(30)
        scale = max(Abs(side.doit()).evalf(30) for side in (gold, answer))
        return bool(distance <= RELATIVE_TOLERANCE * scale)
    except _SYMPY_ERRORS:
        return True


def _quiet() -> None:
    # Both warn, once, that their time limit is off. It is off on purpose.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
