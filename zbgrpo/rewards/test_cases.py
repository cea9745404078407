"""What a row's `test_cases` mean for code rewards, checked down to the last one.

    {"inputs": [...], "outputs": [...]}                     programs: standard input, and what they must print
    {"inputs": [...], "outputs": [...], "fn_name": "name"}  functions: arguments, and what they must return
    {"assert": ["program", ...], "setup": "..."}            programs that test the solution

Text may be a string or a list of lines. The arguments of a call are a list, or a text with one JSON value a line; then
the output is JSON text too. Where every output is a list of one element, a function may also return that element: some
data sets wrap results so. `setup` runs before the solution; with `fn_name` it may be there too. Keys whose value is
null count as absent. Any other key is an error, because a misspelt one would change what is tested.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any, Optional, Union

from zbgrpo.errors import DataError

_KEYS = ("inputs", "outputs", "fn_name", "setup", "assert")


@dataclass(frozen=True)
class ProgramCases:
    """`inputs[i]` on standard input, `outputs[i]` on standard output."""

    inputs: list[bytes]
    outputs: list[str]


@dataclass(frozen=True)
class CallCases:
    """`fn_name(*calls[i])` returns `results[i]`; or, for every i, `elements[i]`, if that is not None."""

    fn_name: str
    setup: str
    calls: list[list[Any]]
    results: list[Any]
    elements: Optional[list[Any]]


@dataclass(frozen=True)
class AssertCases:
    """Every program ends without an exception."""

    setup: str
    programs: list[str]


TestCases = Union[ProgramCases, CallCases, AssertCases]


def check_test_cases(test_cases: dict[str, Any]) -> Optional[str]:
    """What is wrong with the test cases of a row, in a few words; None if they can be used."""
    try:
        parse_test_cases(test_cases)
    except DataError as error:
        return str(error)
    return None


def parse_test_cases(test_cases: dict[str, Any]) -> TestCases:
    """Read the test cases of a row; `DataError` says which value cannot be used, without a place in a file."""
    given = {key: value for key, value in test_cases.items() if value is not None}
    unknown = [key for key in given if key not in _KEYS]
    if unknown:
        raise DataError(f"test_cases has the unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    _check_json(given)
    if "assert" in given:
        return _assert_cases(given)
    inputs, outputs = _list(given, "inputs"), _list(given, "outputs")
    if len(inputs) != len(outputs):
        raise DataError(f"test_cases has {len(inputs)} inputs but {len(outputs)} outputs")
    if "fn_name" in given:
        return _call_cases(given, inputs, outputs)
    if "setup" in given:
        raise DataError("test_cases.setup belongs to assert or fn_name; a program has standard input only")
    return ProgramCases(
        [_text(item, f"inputs[{i}]").encode() for i, item in enumerate(inputs)],
        [_text(item, f"outputs[{i}]") for i, item in enumerate(outputs)],
    )


def _assert_cases(given: dict[str, Any]) -> AssertCases:
    for key in ("inputs", "outputs", "fn_name"):
        if key in given:
            raise DataError(f"test_cases has both assert and {key}; use one kind")
    programs = _list(given, "assert")
    for index, program in enumerate(programs):
        _check_program(program, f"assert[{index}]")
    return AssertCases(_setup(given), programs)


def _call_cases(given: dict[str, Any], inputs: list[Any], outputs: list[Any]) -> CallCases:
    fn_name = given["fn_name"]
    if not isinstance(fn_name, str) or not fn_name.isidentifier():
        raise DataError(f"test_cases.fn_name is not the name of a function: {fn_name!r}")
    calls, results = [], []
    for index, (arguments, result) in enumerate(zip(inputs, outputs, strict=True)):
        if isinstance(arguments, str):
            lines = [line for line in arguments.split("\n") if line.strip()]
            calls.append([_json(line, f"inputs[{index}]") for line in lines])
            results.append(_json(result, f"outputs[{index}]") if isinstance(result, str) else result)
        elif isinstance(arguments, list):
            calls.append(arguments)
            results.append(result)
        else:
            raise DataError(f"test_cases.inputs[{index}] is neither a list of arguments nor a text with one per line")
    wrapped = all(isinstance(result, list) and len(result) == 1 for result in outputs)
    return CallCases(fn_name, _setup(given), calls, results, [result[0] for result in outputs] if wrapped else None)


def _list(given: dict[str, Any], key: str) -> list[Any]:
    if key not in given:
        raise DataError("test_cases needs both inputs and outputs, or assert")
    value = given[key]
    if not isinstance(value, list):
        raise DataError(f"test_cases.{key} is not a list")
    if not value:
        raise DataError(f"test_cases.{key} is empty, and a test that tests nothing is never passed")
    return value


def _text(value: Any, name: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "".join(line.removesuffix("\n") + "\n" for line in value)
    if not isinstance(value, str):
        raise DataError(f"test_cases.{name} is neither a text nor a list of lines")
    return value


def _check_json(given: dict[str, Any]) -> None:
    """Python's `json` reads what JSON is not; on the way to who scores, `NaN` would become null."""
    try:
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise DataError("test_cases holds half of a surrogate pair, which is no text") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"test_cases holds something that JSON cannot: {error}") from error


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"test_cases.{name} is not JSON: {error}") from error


def _setup(given: dict[str, Any]) -> str:
    setup = given.get("setup", "")
    if not isinstance(setup, str):
        raise DataError("test_cases.setup is not a text")
    _syntax_tree(setup, "setup")
    return setup


def _check_program(program: Any, name: str) -> None:
    """A program that only defines things would be passed by any solution: a `check(...)` that nobody calls."""
    if not isinstance(program, str):
        raise DataError(f"test_cases.{name} is not a text")
    passive = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.Pass)
    body = _syntax_tree(program, name).body
    if all(isinstance(node, passive) or _is_constant(node) for node in body):
        raise DataError(f"test_cases.{name} defines things but tests nothing")


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _syntax_tree(program: str, name: str) -> ast.Module:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last: what nests too deeply
        raise DataError(f"test_cases.{name} is not a Python program: {str(error) or 'too complex'}") from error
