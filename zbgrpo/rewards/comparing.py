"""Whether what a program printed, or what a function returned, is what was expected. Strict, and linear in time."""

from __future__ import annotations

import math
import re
from typing import Any

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9

_SPACES = re.compile(r"(\s+)")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_LONGEST_NUMBER = 64


def same_output(expected: str, printed: bytes) -> bool:
    """Whether a program printed the expected text.

    White space at the end of lines and empty lines at the end do not matter; everything else does, with one exception:
    where the expected word is a decimal number (with a point or an exponent), another number within
    `RELATIVE_TOLERANCE` or `ABSOLUTE_TOLERANCE` of it is right, however it is written.
    """
    try:
        text = printed.decode()
    except UnicodeDecodeError:
        return False
    wanted, found = _lines(expected), _lines(text)
    return len(wanted) == len(found) and all(map(_same_line, wanted, found))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(expected: str, found: str) -> bool:
    if expected == found:
        return True
    words, other_words = _SPACES.split(expected), _SPACES.split(found)  # white space counts as words of its own
    return len(words) == len(other_words) and all(map(_same_word, words, other_words))


def _same_word(expected: str, found: str) -> bool:
    if expected == found:
        return True
    if max(len(expected), len(found)) > _LONGEST_NUMBER or expected.lstrip("+-").isdecimal():
        return False
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(found)):
        return False
    return _close(float(expected), float(found))


def same_value(expected: Any, returned: Any) -> bool:
    """Whether a function returned the expected JSON value; `returned` is written as in `sandbox/harness.py`.

    Types count: a truth value is no number, a text no list. Tuples are lists. An integer equals a float of exactly its
    value, and an expected float anything within the tolerances. Keys are compared as JSON writes them, so that 1 and
    "1" are one. Sets, bytes, NaN and objects equal nothing. `RecursionError` for values that are nested too deeply.
    """
    if isinstance(returned, list):
        kind, items = (returned[0], returned[1:]) if returned else (None, [])
        if kind in ("list", "tuple"):
            return isinstance(expected, list) and len(expected) == len(items) and all(map(same_value, expected, items))
        return kind == "dict" and isinstance(expected, dict) and _same_dict(expected, items)
    if isinstance(expected, (int, float)) and not isinstance(expected, bool):
        return _same_number(expected, returned)
    return type(expected) is type(returned) and not isinstance(returned, dict) and bool(expected == returned)


def _same_dict(expected: dict[str, Any], items: list[Any]) -> bool:
    found: dict[str, Any] = {}
    for item in items:
        if not (isinstance(item, list) and len(item) == 2) or isinstance(item[0], (list, dict)):
            return False
        key = item[0] if isinstance(item[0], str) else _json_key(item[0])
        if key in found:
            return False
        found[key] = item[1]
    return expected.keys() == found.keys() and all(same_value(expected[key], found[key]) for key in expected)


def _json_key(key: Any) -> str:
    return {None: "null", True: "true", False: "false"}[key] if key is None or isinstance(key, bool) else repr(key)


def _same_number(expected: float, returned: Any) -> bool:
    if isinstance(returned, bool) or not isinstance(returned, (int, float)):
        return False
    return expected == returned or (isinstance(expected, float) and _close(expected, returned))


def _close(expected: float, found: float) -> bool:
    try:
        return math.isclose(found, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer beyond every float
        return False
