"""What counts as a row, how a bad one is reported, and where rows come from."""

from __future__ import annotations

import gzip
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from zbgrpo.data.rows import load_rows
from zbgrpo.errors import DataError

QUESTION = {"role": "user", "content": "What is 2 + 2?"}
GOOD = json.dumps({"messages": QUESTION, "gt_answer": "4"})


def write(folder: Path, text: str | bytes, name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


def load_one(folder: Path, row: Any) -> Any:
    loaded = load_rows(write(folder, json.dumps(row) + "\n"), skip_bad_rows=False)
    assert (len(loaded.rows), loaded.num_bad) == (1, 0)
    return loaded.rows[0]


def test_row_keeps_messages_gold_and_extra_keys(tmp_path: Path) -> None:
    row = load_one(tmp_path, {"messages": QUESTION, "gt_answer": "4", "level": 3})
    assert row.messages == [QUESTION]
    assert (row.gt_answer, row.test_cases, row.extra, row.line) == ("4", None, {"level": 3}, 1)


def test_messages_may_be_a_list(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, QUESTION]
    assert load_one(tmp_path, {"messages": messages, "gt_answer": "4"}).messages == messages


def test_a_row_may_limit_its_responses(tmp_path: Path) -> None:
    row = {"messages": QUESTION, "gt_answer": "4"}
    assert load_one(tmp_path, row).max_new_tokens is None
    assert load_one(tmp_path, row | {"max_new_tokens": 5}).max_new_tokens == (5,)
    limited = load_one(tmp_path, row | {"max_new_tokens": [5, 7]})
    assert limited.max_new_tokens == (5, 7) and limited.extra == {}


@pytest.mark.parametrize(
    "cases",
    [
        {"inputs": ["1\n"], "outputs": ["2\n"]},
        {"inputs": [[1]], "outputs": [2], "fn_name": "double"},
        {"setup": "", "assert": ["assert True"]},
        {"anything": "a user's own reward function reads it"},
    ],
)
def test_test_cases_stand_in_for_a_gold_answer(tmp_path: Path, cases: dict[str, Any]) -> None:
    row = load_one(tmp_path, {"messages": QUESTION, "test_cases": cases, "gt_answer": None})
    assert (row.gt_answer, row.test_cases) == (None, cases)


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        ("42", "42"),
        ("-7", "-7"),
        ("0.10", "0.10"),
        ("1e3", "1e3"),
        ("12345678901234567890.123", "12345678901234567890.123"),
        ('" 42 \\n"', "42"),
        ('"\\\\frac12"', "\\frac12"),
        ('"first\\r\\nother\\nequal"', "first\r\nother\nequal"),
    ],
)
def test_gold_is_kept_as_its_text(tmp_path: Path, literal: str, text: str) -> None:
    line = f'{{"messages": {json.dumps(QUESTION)}, "gt_answer": {literal}, "weight": 0.5}}'
    row = load_rows(write(tmp_path, line), skip_bad_rows=False).rows[0]
    assert row.gt_answer == text
    assert type(row.extra["weight"]) is float


BAD = [
    ("{'messages': 1}", "not JSON"),
    (GOOD + GOOD, "not JSON: Extra data"),
    ("[1, 2]", "a row must be an object, not a list"),
    ('"text"', "a row must be an object, not text"),
    ("[" * 100_000, "not JSON that can be read"),
    ('{"gt_answer": ' + "9" * 5000 + "}", "not JSON that can be read"),
    ('{"gt_answer": "4"}', "no messages"),
    ('{"messages": [], "gt_answer": "4"}', "messages is empty"),
    ('{"messages": "hi", "gt_answer": "4"}', "messages must be an object or a list of objects, not text"),
    ('{"messages": ["hi"], "gt_answer": "4"}', "a message must be an object, not text"),
    ('{"messages": {"content": "hi"}, "gt_answer": "4"}', "the role of a message must be text, not null"),
    ('{"messages": {"role": "", "content": "hi"}, "gt_answer": "4"}', "the role of a message is empty"),
    ('{"messages": {"role": "user", "content": 3}, "gt_answer": "4"}', "the content of a message must be text"),
    ('{"messages": {"role": "user", "content": "\\ud83d"}, "gt_answer": "4"}', "half of a surrogate pair"),
    ('{"messages": {"role": "user", "content": "hi"}}', "neither gt_answer nor test_cases"),
    ('{"messages": {"role": "user", "content": "hi"}, "gt_answer": 1, "max_new_tokens": [4, 0]}', "positive whole"),
    ('{"messages": {"role": "user", "content": "hi"}, "gt_answer": 1, "max_new_tokens": true}', "positive whole"),
    *[
        (f'{{"messages": {json.dumps(QUESTION)}, "gt_answer": {gold}}}', reason)
        for gold, reason in [
            ('""', "gt_answer is empty"),
            ('" \\t\\n"', "gt_answer is empty"),
            ("true", "gt_answer must be text or a number, not a truth value"),
            ('["4"]', "gt_answer must be text or a number, not a list"),
            ("NaN", "gt_answer must be a finite number"),
            ("-Infinity", "gt_answer must be a finite number"),
            ('"\\frac12"', "control character U+000C"),
            ('"\\text{13}"', "control character U+0009"),
            ('"2\\beta"', "control character U+0008"),
            ('"a\\u0000"', "control character U+0000"),
            ('"x \\neq 3"', "a line end inside a LaTeX command"),
            ('"\\rho"', "a line end inside a LaTeX command"),
        ]
    ],
    *[
        (f'{{"messages": {json.dumps(QUESTION)}, "test_cases": {cases}}}', reason)
        for cases, reason in [
            ('"[]"', "test_cases must be an object, not text"),
            ("{}", "test_cases is empty"),
            ('{"inputs": [], "outputs": []}', "test_cases.inputs is empty"),
            ('{"inputs": ["1"]}', "needs both inputs and outputs"),
            ('{"inputs": ["1", "2"], "outputs": ["1"]}', "2 inputs but 1 outputs"),
            ('{"inputs": "1", "outputs": ["1"]}', "test_cases.inputs must be a list"),
            ('{"assert": []}', "test_cases.assert is empty"),
        ]
    ],
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[f"{reason}-{index}" for index, (_, reason) in enumerate(BAD)])
def test_bad_row_is_named_by_file_line_and_reason_or_counted(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path, f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(DataError) as caught:
        load_rows(path, skip_bad_rows=False)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in str(caught.value)

    loaded = load_rows(path, skip_bad_rows=True)
    assert ([row.line for row in loaded.rows], loaded.num_bad) == ([1, 4], 1)
    assert loaded.first_bad.startswith(f"{path}:3: ")


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.encode() + b'\n{"messages": "\xff"}\n')
    with pytest.raises(DataError, match=r":2: not UTF-8"):
        load_rows(path, skip_bad_rows=False)


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\u2029four\x1cfive"
    line = json.dumps({"messages": {"role": "user", "content": text}, "gt_answer": "4"}, ensure_ascii=False)
    # json.dumps escapes the control characters below U+0020 but leaves the separators raw.
    assert "\u2028" in line
    loaded = load_rows(write(tmp_path, f"{line}\n{GOOD}"), skip_bad_rows=False)
    assert [row.line for row in loaded.rows] == [1, 2]
    assert loaded.rows[0].messages[0]["content"] == text


def test_byte_order_mark_crlf_and_blank_lines_are_fine(tmp_path: Path) -> None:
    text = f"\ufeff{GOOD}\r\n\r\n   \n{GOOD}\r\n\n"
    loaded = load_rows(write(tmp_path, text), skip_bad_rows=False)
    assert ([row.line for row in loaded.rows], loaded.num_bad) == ([1, 4], 0)


def test_gzip_is_read_and_a_cut_one_is_an_error(tmp_path: Path) -> None:
    packed = gzip.compress(f"{GOOD}\n{GOOD}\n".encode())
    assert len(load_rows(write(tmp_path, packed, "rows.jsonl.gz"), skip_bad_rows=False).rows) == 2
    for damaged in (packed[:-12], b"not gzip at all"):
        with pytest.raises(DataError, match="cannot be read"):
            load_rows(write(tmp_path, damaged, "bad.jsonl.gz"), skip_bad_rows=True)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_file_without_rows_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="no usable row"):
        load_rows(write(tmp_path, text), skip_bad_rows=True)


def test_all_rows_bad_is_an_error_that_shows_the_first(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 bad rows were skipped, the first: .*:1: a row must be an object"):
        load_rows(write(tmp_path, "1\n2\n"), skip_bad_rows=True)


def test_missing_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^other\.jsonl: no such file$"):
        load_rows("other.jsonl", skip_bad_rows=False)
    with pytest.raises(DataError, match=r"bash launch/quickstart\.sh"):
        load_rows("data.jsonl", skip_bad_rows=False)


def test_other_names_are_data_sets_only_where_that_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"org/name: no such file; .* install `datasets`"):
        load_rows("org/name", skip_bad_rows=False)

    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        if name == "org/missing":
            raise FileNotFoundError("not there")
        return [{"messages": [QUESTION], "gt_answer": 4}, {"messages": [QUESTION]}]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    loaded = load_rows("org/name", skip_bad_rows=True)
    assert asked == [("org/name", "train")]
    assert ([(row.gt_answer, row.line) for row in loaded.rows], loaded.num_bad) == ([("4", 1)], 1)
    with pytest.raises(DataError, match="org/missing: no such file, and not a data set"):
        load_rows("org/missing", skip_bad_rows=True)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        load_rows(write(tmp_path, b"PAR1", "rows.parquet"), skip_bad_rows=False)


def test_parquet_rows_lose_the_nulls_that_the_schema_adds(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    rows = [
        {"messages": [QUESTION], "gt_answer": "4", "test_cases": None},
        {"messages": [{**QUESTION, "name": "a"}], "gt_answer": None, "test_cases": {"inputs": ["1"], "outputs": ["1"]}},
        {"messages": [QUESTION], "gt_answer": None, "test_cases": {"setup": "", "assert": ["assert True"]}},
        {"messages": [QUESTION], "gt_answer": "", "test_cases": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    loaded = load_rows(str(tmp_path / "rows.parquet"), skip_bad_rows=True)
    assert ([row.line for row in loaded.rows], loaded.num_bad) == ([1, 2, 3], 1)
    assert loaded.rows[0].messages == [QUESTION]
    assert [row.test_cases for row in loaded.rows] == [row["test_cases"] for row in rows[:3]]
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load_rows(write(tmp_path, b"not parquet", "bad.parquet"), skip_bad_rows=True)


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        ("gsm8k_train.jsonl", 7473),
        ("gsm8k_test.jsonl", 1319),
        ("math500.jsonl", 500),
        ("aime_validation.jsonl", 90),
        ("humaneval.jsonl", 164),
    ],
)
def test_real_files_have_no_bad_row(name: str, num_rows: int) -> None:
    folder = os.environ.get("ZBGRPO_TEST_DATA")
    if not folder:
        pytest.skip("ZBGRPO_TEST_DATA is not set")
    loaded = load_rows(str(Path(folder) / name), skip_bad_rows=False)
    assert len(loaded.rows) == num_rows
