"""Reads the rows of a data set: JSON Lines (.gz too), parquet, or a Hugging Face `datasets` name.

A row is `{"messages": {...} or [...], "gt_answer": "42"}` or `{"messages": ..., "test_cases": {...}}`; other keys
are kept as they are.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zbgrpo.config.schema import DataConfig
from zbgrpo.errors import DataError

_BOM = b"\xef\xbb\xbf"
_PARQUET_SUFFIXES = (".parquet", ".pq")
_FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".gz", *_PARQUET_SUFFIXES)

# JSON takes the backslash of an unescaped LaTeX command for an escape: "\frac" becomes a form feed and "rac". A form
# feed, a backspace ("\beta") or a tab ("\text") has no place in an answer. A line end has, unless it is a carriage
# return alone ("\rho") or the start of one of these ("\neq", "\nu").
_BROKEN_LATEX = re.compile(r"\n(?:eq|abla|ot|otin|u)(?![A-Za-z])|\r(?!\n)")


class Row(NamedTuple):
    """One usable row. `gt_answer` or `test_cases` is there, or both."""

    messages: list[dict[str, Any]]  # at least one; each has `role` and `content`, both text
    gt_answer: str | None  # never empty, without surrounding spaces
    test_cases: dict[str, Any] | None
    extra: dict[str, Any]  # every other key of the row
    line: int  # 1-based line (JSON Lines) or row (parquet, datasets) it came from
    max_new_tokens: tuple[int, ...] | None = None  # own limits of its responses, in turn; None: that of the run


class LoadedRows(NamedTuple):
    """The usable rows in the order of the file, and how many were skipped as bad."""

    rows: list[Row]
    num_bad: int
    first_bad: str = ""  # `file:line: reason` of the first skipped row


_FIELDS = ("messages", "gt_answer", "test_cases", "max_new_tokens")


class _BadRow(Exception):
    """One row cannot be used, and why. Never leaves this module."""


def load_rows(path: str, skip_bad_rows: bool, check: Callable[[Row], str | None] = lambda row: None) -> LoadedRows:
    """Reads all rows of `path`.

    A path that is no file is taken for the name of a Hugging Face data set, of which the `train` split is read, if that
    package is there. A bad row raises `DataError` as `file:line: reason`, or is counted with `skip_bad_rows`. A file
    that is missing, damaged or without any usable row is a `DataError` in both cases. `check` says what else is wrong
    with a row, or None.
    """
    rows: list[Row] = []
    num_bad = 0
    first_bad = ""
    for line, raw in _read(path):
        try:
            row = _to_row(_parse_json(raw) if isinstance(raw, bytes) else raw, line)
            if (wrong := check(row)) is not None:
                raise _BadRow(wrong)
            rows.append(row)
        except _BadRow as bad:
            reason = f"{path}:{line}: {bad}"
            if not skip_bad_rows:
                raise DataError(f"{reason} (--skip-bad-rows counts such rows and goes on)") from None
            num_bad += 1
            first_bad = first_bad or reason
    if not rows:
        skipped = f"; {num_bad} bad rows were skipped, the first: {first_bad}" if num_bad else ""
        raise DataError(f"{path}: no usable row{skipped}")
    return LoadedRows(rows, num_bad, first_bad)


# A source yields (1-based number, raw row): the bytes of a JSON line, or an object. It parses nothing itself, so that a
# bad row ends neither the iteration nor the numbering.
_Source = Iterator[tuple[int, Any]]


def _read(path: str) -> _Source:
    file = Path(path)
    if os.path.isfile(path):  # unlike Path.is_file, False for every path that cannot be looked at
        return _read_parquet(file) if file.suffix.lower() in _PARQUET_SUFFIXES else _read_json_lines(file)
    if path.lower().endswith(_FILE_SUFFIXES):
        hint = ""
        if path == DataConfig().path:
            hint = "; give one with -d, or run `bash launch/quickstart.sh`, which makes its own data and model"
        raise DataError(f"{path}: no such file{hint}")
    return _read_datasets(path)


def _read_json_lines(file: Path) -> _Source:
    """Lines end at line feeds only: U+2028, U+0085 and their like are ordinary characters inside a JSON string."""
    opener: Callable[..., Any] = gzip.open if file.suffix.lower() == ".gz" else open
    try:
        with opener(file, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                content = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
                if content:
                    yield number, content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _parse_json(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("gt_answer"), float):
            _check_finite(value["gt_answer"])
            # A number is its own text: 0.10 stays 0.10, and digits that a float cannot hold are kept.
            value["gt_answer"] = json.loads(text, parse_float=str)["gt_answer"]
        return value
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _BadRow(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets nested without end
        raise _BadRow(f"not JSON that can be read: {error}") from None


def _read_parquet(file: Path) -> _Source:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{file}: parquet needs pyarrow (pip install pyarrow)") from error
    try:
        number = 0
        for batch in parquet.ParquetFile(str(file)).iter_batches():
            for value in batch.to_pylist():
                number += 1
                yield number, value
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise DataError(f"{file}: cannot be read as parquet: {error}") from error


def _read_datasets(name: str) -> _Source:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: no such file; to load it as a Hugging Face data set, install `datasets` (pip install datasets)"
        ) from error
    try:
        data = datasets.load_dataset(name, split="train")
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: no such file, and not a data set that can be loaded: {error}") from error
    yield from enumerate(data, start=1)


def _to_row(value: Any, line: int) -> Row:
    """Checks one raw object; raises `_BadRow` with the reason."""
    if not isinstance(value, dict):
        raise _BadRow(f"a row must be an object, not {_kind(value)}")
    messages = _to_messages(value.get("messages"))
    gt_answer = _to_gold(value.get("gt_answer"))
    test_cases = _to_test_cases(value.get("test_cases"))
    if gt_answer is None and test_cases is None:
        raise _BadRow("neither gt_answer nor test_cases")
    extra = {key: item for key, item in value.items() if key not in _FIELDS}
    return Row(messages, gt_answer, test_cases, extra, line, _limits(value.get("max_new_tokens")))


def _limits(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    limits = value if isinstance(value, list) else [value]
    if not limits or not all(type(limit) is int and limit > 0 for limit in limits):
        raise _BadRow("`max_new_tokens` is neither a positive whole number nor a list of them")
    return tuple(limits)


def _to_messages(value: Any) -> list[dict[str, Any]]:
    if value is None:
        raise _BadRow("no messages")
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise _BadRow(f"messages must be an object or a list of objects, not {_kind(value)}")
    if not messages:
        raise _BadRow("messages is empty")
    return [_to_message(message) for message in messages]


def _to_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _BadRow(f"a message must be an object, not {_kind(message)}")
    for key in ("role", "content"):
        text = message.get(key)
        if not isinstance(text, str):
            raise _BadRow(f"the {key} of a message must be text, not {_kind(text)}")
        _check_encodable(text, f"the {key} of a message")
    if not message["role"]:
        raise _BadRow("the role of a message is empty")
    return _without_nulls(message)


def _to_gold(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise _BadRow(f"gt_answer must be text or a number, not {_kind(value)}")
    if isinstance(value, float):
        _check_finite(value)
    # Not strip(): a tab in front is the "\t" of "\text", which has to be seen below.
    gold = str(value).lstrip(" ").rstrip()
    if not gold.strip():
        raise _BadRow("gt_answer is empty")
    _check_encodable(gold, "gt_answer")
    control = next((char for char in gold if unicodedata.category(char) == "Cc" and char not in "\r\n"), None)
    if control is not None or _BROKEN_LATEX.search(gold):
        what = f"the control character U+{ord(control):04X}" if control else "a line end inside a LaTeX command"
        raise _BadRow(f'gt_answer has {what}; in JSON a backslash is written twice: "\\\\frac", not "\\frac"')
    return gold


def _to_test_cases(value: Any) -> dict[str, Any] | None:
    """Checks the two shapes that the code reward knows; another shape is left to the user's own reward function."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _BadRow(f"test_cases must be an object, not {_kind(value)}")
    cases = _without_nulls(value)
    if not cases:
        raise _BadRow("test_cases is empty")
    for key in ("inputs", "outputs", "assert"):
        if key not in cases:
            continue
        if not isinstance(cases[key], list):
            raise _BadRow(f"test_cases.{key} must be a list, not {_kind(cases[key])}")
        if not cases[key]:
            raise _BadRow(f"test_cases.{key} is empty")
    if ("inputs" in cases) != ("outputs" in cases):
        raise _BadRow("test_cases needs both inputs and outputs")
    if "inputs" in cases and len(cases["inputs"]) != len(cases["outputs"]):
        raise _BadRow(f"test_cases has {len(cases['inputs'])} inputs but {len(cases['outputs'])} outputs")
    return cases


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """Parquet fills the fields that only other rows have with nulls."""
    return {key: item for key, item in value.items() if item is not None}


def _check_finite(value: float) -> None:
    if not math.isfinite(value):
        raise _BadRow(f"gt_answer must be a finite number, not {value}")


def _check_encodable(text: str, what: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        text.encode("utf-8")
        return
    raise _BadRow(f"{what} holds half of a surrogate pair, which is no text")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
