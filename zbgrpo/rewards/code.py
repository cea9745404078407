"""Code rewards: run the program of a response on the test cases of its row, in a sandbox.

A response is right if every test passes. What the tests expect stays in this process, except for programs that test the
solution (`assert`), which run beside it. The exit status of a program alone never passes a test.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from zbgrpo.errors import DataError, InfrastructureError
from zbgrpo.rewards.comparing import same_output, same_value
from zbgrpo.rewards.extract import extract_code
from zbgrpo.rewards.messages import FULL_REWARD, RewardSpec, ScoreOutcome, ScoreRequest
from zbgrpo.rewards.sandbox.base import End, Execution, Isolation, Limits, Sandbox
from zbgrpo.rewards.sandbox.harness import HARNESS, Verdict, asserts_task, calls_task, read_verdict
from zbgrpo.rewards.test_cases import AssertCases, CallCases, ProgramCases, TestCases, parse_test_cases

NUM_RETRIES = 2
"""How often a program is run again that could not be run for reasons outside it."""

LEAST_SECONDS = 1.0
"""Every program may run for so long, so that its interpreter can start; the response is out of time all the same."""

LOST_SECONDS = 2.0
"""How much longer than twice the time of its programs a response may take, before its sandbox counts as failed. Twice,
because what comes before and after a program is not counted as its time, and with hundreds of short ones adds up."""

_RETRY_PAUSE_SECONDS = 0.1


class CodeScorer:
    """Scores responses whose last ```python block is a solution. Owns the sandbox."""

    def __init__(self, sandbox: Sandbox, spec: RewardSpec) -> None:
        self.isolation: Isolation = sandbox.isolation()
        self._sandbox = sandbox
        self._spec = spec

    def score(self, request: ScoreRequest) -> ScoreOutcome:
        """10 if all test cases pass, else 0; the format is valid if there is a block.

        The programs of one response share `time_limit_seconds`; when it is used up the outcome is 0 and `timed_out`. A
        program that could not be run is tried again `NUM_RETRIES` times, and then the outcome is an error, not a 0.
        """
        try:
            cases = parse_test_cases(request.test_cases or {})
        except DataError as error:
            return ScoreOutcome.failed(f"the row cannot be scored as code: {error}", infrastructure=False)
        solution = extract_code(request.response, request.prompt).answer
        if solution is None:
            return ScoreOutcome(0.0, 0.0, 0.0)
        solution = solution.encode("utf-8", "replace").decode()  # half of a surrogate pair is no part of a program
        try:
            passed = _passes(_Programs(self._sandbox, self._spec), solution, cases)
        except _OutOfTime:
            return ScoreOutcome(0.0, 1.0, 0.0, timed_out=True)
        except InfrastructureError as error:
            return ScoreOutcome.failed(str(error), infrastructure=True)
        return ScoreOutcome(FULL_REWARD if passed else 0.0, 1.0, float(passed))

    def close(self) -> None:
        """Give back what the sandbox holds."""
        self._sandbox.close()


class _OutOfTime(Exception):
    """The programs of a response have used up its time."""


class _Programs:
    """Runs the programs of one response."""

    def __init__(self, sandbox: Sandbox, spec: RewardSpec) -> None:
        self._sandbox = sandbox
        self._limits = Limits(memory_bytes=spec.code_memory_bytes)
        self._seconds_left = spec.time_limit_seconds
        self._last_start = time.monotonic() + 2 * spec.time_limit_seconds + LOST_SECONDS

    def run(self, source: str, stdin: bytes, num_output_bytes: int = 0) -> Execution:
        """What the program did; it can print `num_output_bytes` at least.

        Raises `_OutOfTime`, or `InfrastructureError` if the sandbox fails or is too slow.
        """
        detail = "it takes much longer than the programs run"
        for num_failures in range(NUM_RETRIES + 1):
            if time.monotonic() > self._last_start:
                break
            if num_failures:
                time.sleep(_RETRY_PAUSE_SECONDS)
            execution = self._sandbox.run(source, stdin, self._limits_of(num_output_bytes))
            if execution.end is End.TIME:
                raise _OutOfTime
            if execution.end is not End.INFRASTRUCTURE:
                self._seconds_left -= execution.wall_seconds
                if self._seconds_left <= 0:
                    raise _OutOfTime
                return execution
            detail = execution.detail
        raise InfrastructureError(f"the sandbox failed: {detail}")

    def _limits_of(self, num_output_bytes: int) -> Limits:
        output_bytes = max(self._limits.output_bytes, 2 * num_output_bytes)
        wall_seconds = max(self._seconds_left, LEAST_SECONDS)
        return msgspec.structs.replace(self._limits, wall_seconds=wall_seconds, output_bytes=output_bytes)


def _passes(programs: _Programs, solution: str, cases: TestCases) -> bool:
    if isinstance(cases, ProgramCases):
        return _prints_right(programs, solution, cases)
    token = secrets.token_hex(16)
    if isinstance(cases, AssertCases):
        return _verdict(programs, asserts_task(token, solution, cases.setup, cases.programs), token).passed
    verdict = _verdict(programs, calls_task(token, solution, cases.setup, cases.fn_name, cases.calls), token)
    return verdict.passed and _returns_right(verdict.results, cases)


def _prints_right(programs: _Programs, solution: str, cases: ProgramCases) -> bool:
    """A program that fails after it has printed the right thing has failed."""
    for stdin, expected in zip(cases.inputs, cases.outputs, strict=True):
        execution = programs.run(solution, stdin, len(expected))
        if execution.end is not End.EXITED or execution.exit_status != 0:
            return False
        if not same_output(expected, execution.stdout):
            return False
    return True


def _returns_right(results: list[object], cases: CallCases) -> bool:
    if len(results) != len(cases.calls):
        return False
    readings = [cases.results] if cases.elements is None else [cases.results, cases.elements]
    try:
        return any(all(map(same_value, expected, results)) for expected in readings)
    except RecursionError:
        return False


def _verdict(programs: _Programs, task: bytes, token: str) -> Verdict:
    execution = programs.run(HARNESS, task, len(task))
    verdict = read_verdict(execution.stdout, token) if execution.end is End.EXITED else None
    if verdict is None:
        return Verdict(token)
    if verdict.refused:
        raise InfrastructureError(f"the harness could not do its work: {verdict.refused}")
    return verdict
