r"""Where the answer stands in a response, and whether the response has the form that was asked for. Text only.

Every function takes time proportional to the length of its input, whatever that input is.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple, Optional

_TAG = re.compile(r"</?(?:think|answer)>")
_TAG_ORDER = ["<think>", "</think>", "<answer>", "</answer>"]
_OPENING_FENCE = re.compile(r"(?<!`)```python[ \t]*\r?\n")
_CLOSING_FENCE = re.compile(r"^[ \t]*```(?![`\w])", re.MULTILINE)
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|(?P<escaped>\\.)|(?P<open>\{)|(?P<close>\})", re.DOTALL)


class Extraction(NamedTuple):
    """`answer` is None when there is none to compare; an answer in an invalid format is never paid."""

    format_valid: bool
    answer: Optional[str]


def prompt_opens_think(prompt: str) -> bool:
    """Whether the prompt itself ends with an open `<think>`, as some chat templates do."""
    return prompt.rstrip().endswith("<think>")


def extract_think_answer(response: str, prompt: str = "") -> Extraction:
    """Answer between the last `<answer>` and the `</answer>` after it.

    The format is valid if each of the four tags occurs exactly once, in order, with nothing but white space after
    `</answer>`. A `<think>` that the prompt opened is the opening one; the response must then not open another.
    """
    expected = _TAG_ORDER[1:] if prompt_opens_think(prompt) else _TAG_ORDER
    tags = list(_TAG.finditer(response))
    in_order = [tag.group() for tag in tags] == expected
    format_valid = in_order and not response[tags[-1].end() :].strip()

    start = response.rfind("<answer>")
    end = response.find("</answer>", start)
    answer = response[start + len("<answer>") : end].strip() if start >= 0 and end >= 0 else None
    return Extraction(format_valid, answer or None)


def extract_boxed(response: str, prompt: str = "") -> Extraction:
    r"""Content of the last `\boxed{}` of the answer part; the format is valid if there is one."""
    part = answer_part(response, prompt)
    answer = last_box(part) if part is not None else None
    return Extraction(answer is not None, answer)


def extract_code(response: str, prompt: str = "") -> Extraction:
    """Content of the last ```python block of the answer part; the format is valid if there is one.

    The block is what stands between the last "```python" at the end of a line and the next line that begins with "```";
    without that line, or with white space alone in between, there is no block, whatever came before. A fence that is
    indented, as in a list, takes its indentation off the block.
    """
    part = answer_part(response, prompt)
    openings = list(_OPENING_FENCE.finditer(part)) if part is not None else []
    if part is None or not openings:
        return Extraction(False, None)
    start = openings[-1].end()
    closing = _CLOSING_FENCE.search(part, start)
    code = part[start : closing.start()] if closing is not None else ""
    if not code.strip():
        return Extraction(False, None)
    return Extraction(True, code if code[0] not in " \t" else textwrap.dedent(code))


def answer_part(response: str, prompt: str = "") -> Optional[str]:
    """Text after the last `</think>`; all of it without any thinking; None if thinking never ends."""
    last_open = response.rfind("<think>")
    last_close = response.rfind("</think>")
    if last_open > last_close:
        return None
    if last_close >= 0:
        return response[last_close + len("</think>") :]
    return None if prompt_opens_think(prompt) else response


def last_box(text: str) -> Optional[str]:
    r"""Content of the last `\boxed{...}` (or `\fbox{...}`), or None if the last one is empty or never closed.

    Braces nest and `\{`, `\}` do not count as braces. A box within a box belongs to the outer one. A `\boxed` without
    a brace behind it is prose.
    """
    open_braces: list[int] = []  # for a box, where its content starts; for a plain brace, -1
    last_start = -1
    span: Optional[tuple[int, int]] = None
    for token in _BRACE.finditer(text):
        if token.lastgroup == "box":
            last_start, span = token.end(), None
            open_braces.append(last_start)
        elif token.lastgroup == "open":
            open_braces.append(-1)
        elif token.lastgroup == "close" and open_braces:
            start = open_braces.pop()
            encloses_last = span is not None and start <= span[0]
            if start >= 0 and (start == last_start or encloses_last):
                span = (start, token.start())
    if span is None:
        return None
    return text[span[0] : span[1]].strip() or None


EXTRACTORS: dict[str, Callable[[str, str], Extraction]] = {
    "think_answer_tags": extract_think_answer,
    "boxed": extract_boxed,
    "code": extract_code,
}
"""Extraction by reward type: (response, prompt) -> Extraction."""
