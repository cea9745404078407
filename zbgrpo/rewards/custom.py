"""A user's own reward function: how it is found, called, and how its result is read.

    def reward(response: str, row: dict) -> float: ...
    def reward(response: str, gt_answer: str, **_) -> tuple[float, float, float]: ...

The function is called by keyword with those of `response`, `gt_answer`, `test_cases`, `prompt` and `row` that it
accepts (all five if it takes `**kwargs`), for one response at a time. It returns a number, or
(reward, format_acc, ans_acc). With a bare number format_acc is 1, and ans_acc is the number itself if it lies between 0
and 1, otherwise 1 for a positive reward and 0 for the rest. Rewards that are not finite are passed on as they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Optional

from zbgrpo.errors import ConfigError
from zbgrpo.rewards.messages import ScoreOutcome, ScoreRequest
from zbgrpo.types import RewardResult

_ARGUMENTS: tuple[str, ...] = ("response", "gt_answer", "test_cases", "prompt", "row")


class RewardFunction:
    """A loaded function and the names of the arguments that it takes."""

    def __init__(self, target: str) -> None:
        """Import `module:function` or `path/to/file.py:function`; `ConfigError` if it cannot be used."""
        self._target = target
        self._function = _load(target)
        self._arguments = _accepted_arguments(self._function, target)

    def score(self, request: ScoreRequest) -> ScoreOutcome:
        """Outcome of one call. An exception of the function, or a result of another shape, becomes `error`."""
        values = {name: getattr(request, name) for name in self._arguments}
        result: Any = None
        with _ForeignCode() as call:
            result = as_result(self._function(**values))
        if call.error is not None:
            return ScoreOutcome.failed(f"{self._target}: {type(call.error).__name__}: {call.error}", False)
        return ScoreOutcome(*result)


def as_result(value: Any) -> RewardResult:
    """Read what a reward function returned; `TypeError` if it is neither a number nor three numbers."""
    if isinstance(value, (tuple, list)):
        if len(value) != 3:
            raise TypeError(f"expected a number or (reward, format_acc, ans_acc), got {len(value)} values")
        return RewardResult(*(_number(part) for part in value))
    reward = _number(value)
    ans_acc = reward if 0.0 <= reward <= 1.0 else float(reward > 0.0)
    return RewardResult(reward, 1.0, ans_acc)


class _ForeignCode(AbstractContextManager["_ForeignCode"]):
    """Keeps any `Exception` raised inside it as `error`: code that is not ours may raise whatever it likes.

    SystemExit and KeyboardInterrupt pass, as they do everywhere.
    """

    def __init__(self) -> None:
        self.error: Optional[Exception] = None

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False


def _number(value: Any) -> float:
    # numpy scalars and one-element tensors convert too; strings and None do not.
    if not hasattr(value, "__float__"):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _load(target: str) -> Callable[..., Any]:
    module_name, _, function_name = target.rpartition(":")
    module = _import_file(module_name) if module_name.endswith(".py") else _import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward type {target!r}: {module_name} has no function {function_name!r}")
    return function


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module itself being absent is a wrong flag; a module that fails to import another says so itself.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise ConfigError(f"reward module {name!r} was not found on the path: {error}") from error


def _import_file(name: str) -> ModuleType:
    path = Path(name).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"reward file {name!r} was not found (looked for {path})")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickling look the module of a class up here
    spec.loader.exec_module(module)
    return module


def _accepted_arguments(function: Callable[..., Any], target: str) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise ConfigError(f"reward type {target!r}: the arguments of the function cannot be read") from error
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        accepted = _ARGUMENTS
    else:
        accepted = tuple(name for name in _ARGUMENTS if name in parameters)
    for name, parameter in parameters.items():
        by_name = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        required = parameter.default is inspect.Parameter.empty
        variadic = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if required and not variadic and not (by_name and name in _ARGUMENTS):
            raise ConfigError(
                f"reward type {target!r}: argument {name!r} has no default and is none of {', '.join(_ARGUMENTS)}"
            )
    return accepted
