r"""What can be said about two answers from their text alone: numbers, times of day, words, lists.

A computer algebra system is too generous here: it rounds decimals, reads 7:30 as a fraction, multiplies the letters of
a word in any order, and drops `am` and `pm` as units. So these kinds are settled before it is asked.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple, Optional

from zbgrpo.rewards.extract import last_box

MAX_EXPONENT = 400

_SPACING = re.compile(r"\\[!;:>]|\\q?quad\b|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])|\\displaystyle\b")
_DELIMITER = re.compile(r"(?P<newline>\\\\)|\\[()\[\]]|\\\$|\$")
_TEXT_COMMAND = r"\\(?:text|mbox|mathrm|mathbf|textbf|textit|textrm|textnormal|operatorname)"
_TEXT_WRAP = re.compile(rf"{_TEXT_COMMAND}\s*\{{([^{{}}]*)\}}")
_BOLD_WRAP = re.compile(r"\*\*(.+)\*\*", re.DOTALL)
_SMALL_PARENTHESES = re.compile(r"[(\[]\s*([-+]?[0-9.]+|[A-Za-z])\s*[)\]]")
_FINAL_STOP = re.compile(r"(?<![.\\])\.$")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"([-+]?)\s*({_DECIMAL})")
_ARGUMENT = rf"\s*(?:\{{\s*([-+]?{_DECIMAL})\s*\}}|(\d))"
_FRACTION = re.compile(rf"([-+]?)\s*(\d*)\s*\\frac{_ARGUMENT}{_ARGUMENT}")
_SLASH = re.compile(rf"([-+]?)\s*({_DECIMAL})\s*/\s*([-+]?{_DECIMAL})")
_SCIENTIFIC = re.compile(
    rf"([-+]?)\s*({_DECIMAL})\s*(?:\\times|\\cdot|\*|×)\s*10\s*\^\s*(?:\{{\s*([-+]?\d+)\s*\}}|(\d))"
)
_GROUP_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,\s*\\!\s*|\\,|~)(?=\d{3}(?!\d))")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:%|percent)\s*\}|\bpercent\b)$")
_UNIT = re.compile(rf"(?<=[\d}}])\s*{_TEXT_COMMAND}\s*\{{[^{{}}]*\}}(?:\^\{{?\d\}}?)?$")
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)$")
_CURRENCY = re.compile(r"^[$€£¥₹]\s*")

_BASED = re.compile(r"(\d+)_(?:\{(\d+)\}|(\d))")
_CLOCK = re.compile(r"(?=.*[:m])(?P<digits>\d+(?:\s*:\s*\d+)*)\s*(?P<half>[ap]m)?")
_WORD = re.compile(r"[A-Za-z]{4,}|(?=.*[A-Za-z]{3})[A-Za-z]+(?:[ '-][A-Za-z]+)+")
_LIST_WORD = re.compile(r"(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))")


class ExactNumber(NamedTuple):
    """A number that was written out; `percent` tells whether a percent sign followed it."""

    value: Fraction
    percent: bool

    def same_as(self, other: ExactNumber) -> bool:
        """Equal exactly. A percent sign may be left out: 28% equals 0.28 and also 28."""
        if self.percent != other.percent and self.value == other.value:
            return True
        return self._ratio() == other._ratio()

    def _ratio(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


class ListText(NamedTuple):
    """A list as it is written: the brackets around it ('' without any) and the text of its elements."""

    opening: str
    closing: str
    elements: list[str]


def clean(text: str) -> str:
    r"""`text` without what only decorates it: math delimiters, boxes, bold, `\text{}` around it all, a full stop."""
    if r"\boxed" in text or r"\fbox" in text:
        text = last_box(text) or text
    text = _DELIMITER.sub(lambda match: match.group("newline") or "", text)
    text = _SPACING.sub("", _GROUP_SEPARATOR.sub(",", text)).replace("\u2212", "-")
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text).strip()
    for _ in range(8):  # a few wrappers at most; each pass is linear
        before = text
        text = _FINAL_STOP.sub("", text).strip()
        for wrapper in (_BOLD_WRAP, _TEXT_WRAP, _SMALL_PARENTHESES):
            whole = wrapper.fullmatch(text)
            text = whole.group(1).strip() if whole else text
        if text == before:
            break
    return text


def same_text(left: str, right: str) -> bool:
    """Equal and not empty after spaces, braces and commas are removed."""
    left, right = (re.sub(r"[\s{},]", "", text) for text in (left, right))
    return bool(left) and left == right


def exact_number(text: str) -> Optional[ExactNumber]:
    r"""Value of an integer, decimal, fraction, mixed number or `a \times 10^n`, with or without a unit; else None."""
    text = _DEGREE.sub("", _CURRENCY.sub("", text.strip()))
    without_percent = _PERCENT.sub("", text)
    percent = without_percent != text
    text = _UNIT.sub("", without_percent).strip()
    value = _plain_value(text)
    return None if value is None else ExactNumber(value, percent)


def _plain_value(text: str) -> Optional[Fraction]:
    if match := _NUMBER.fullmatch(text):
        return _signed(match.group(1), _fraction(match.group(2)))
    if match := _SLASH.fullmatch(text):
        return _signed(match.group(1), _divide(match.group(2), match.group(3)))
    if match := _FRACTION.fullmatch(text):
        sign, whole, *arguments = match.groups()
        part = _divide(arguments[0] or arguments[1], arguments[2] or arguments[3])
        if part is None or (whole and part < 0):
            return None
        return _signed(sign, part + int(whole or 0))
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(match.group(3) or match.group(4))
        if abs(exponent) <= MAX_EXPONENT:
            return _signed(match.group(1), _fraction(match.group(2)) * Fraction(10) ** exponent)
    return None


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _divide(numerator: str, denominator: str) -> Optional[Fraction]:
    divisor = _fraction(denominator)
    return _fraction(numerator) / divisor if divisor else None


def _signed(sign: str, value: Optional[Fraction]) -> Optional[Fraction]:
    return -value if sign == "-" and value is not None else value


def clock_time(text: str) -> Optional[tuple[str, ...]]:
    """Parts of a time of day or a ratio written with colons, and `am` or `pm`: 7:30, 7:30 p.m., 3:4:5; else None."""
    plain = re.sub(rf"{_TEXT_COMMAND}|[{{}}~]|\\[, ]", " ", text).lower().replace(".m", "m").replace("m.", "m")
    match = _CLOCK.fullmatch(plain.replace("\\", "").strip())
    if match is None:
        return None
    hour, *rest = re.findall(r"\d+", match.group("digits"))
    return (hour.lstrip("0") or "0", *rest, match.group("half") or "")


def based_number(text: str) -> Optional[tuple[str, str]]:
    """Digits and base of a number such as 4210_{5}; else None."""
    match = _BASED.fullmatch(text.replace(r"\text", "").replace(" ", ""))
    return (match.group(1).lstrip("0"), match.group(2) or match.group(3)) if match else None


def word(text: str) -> Optional[str]:
    """Lower-case text of a word of four letters or more, or of several words; else None (short ones may be symbols)."""
    plain = " ".join(_TEXT_WRAP.sub(r"\1", text).split())
    return plain.lower() if _WORD.fullmatch(plain) else None


def split_list(text: str) -> ListText:
    """Elements between top-level commas (and `and`, `or`, semicolons), without one pair of brackets around them all."""
    opening, closing, body = _outer_brackets(text)
    elements, depth, start = [], 0, 0
    body = _LIST_WORD.sub(",", body)
    tokens = list(re.finditer(r"\\.|[()\[\]{},;]", body, re.DOTALL))
    for token in tokens:
        symbol = token.group()
        if symbol in ("(", "[", "{", r"\{"):
            depth += 1
        elif symbol in (")", "]", "}", r"\}"):
            depth -= 1
        elif symbol in (",", ";") and depth == 0:
            elements.append(body[start : token.start()].strip())
            start = token.end()
    elements.append(body[start:].strip())
    return ListText(opening, closing, [element for element in elements if element])


def _outer_brackets(text: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"(\\\{|[(\[])(.*?)(\\\}|[)\]])", text, re.DOTALL)
    if match is None:
        return "", "", text
    depth = 0
    for token in re.finditer(r"\\[{}]|\\.|[()\[\]]", match.group(2), re.DOTALL):
        depth += (token.group() in ("(", "[", r"\{")) - (token.group() in (")", "]", r"\}"))
        if depth < 0:  # the first bracket closes before the end, as in (0,1) \cup (2,3)
            return "", "", text
    return (match.group(1), match.group(3), match.group(2)) if depth == 0 else ("", "", text)
