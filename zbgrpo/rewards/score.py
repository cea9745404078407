"""Scoring of one response, and of a file of them.

Scale: 10 for a right answer in a valid format, 0 for everything else, with one exception in between: an answer that
cannot be parsed as mathematics but reads like the gold answer gets 5. A user's own function has its own scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Protocol, TextIO, Union

import msgspec

from zbgrpo.errors import ConfigError, DataError
from zbgrpo.rewards import literal
from zbgrpo.rewards.code import CodeScorer
from zbgrpo.rewards.custom import RewardFunction
from zbgrpo.rewards.extract import EXTRACTORS
from zbgrpo.rewards.math_equal import Verdict, compare, warm_up
from zbgrpo.rewards.messages import (
    ANSWER_TYPES,
    CODE_TYPE,
    FULL_REWARD,
    RewardSpec,
    ScoreOutcome,
    ScoreRequest,
    check_reward_type,
)
from zbgrpo.rewards.pool import RewardPool
from zbgrpo.rewards.sandbox.base import Sandbox
from zbgrpo.rewards.test_cases import check_test_cases

__all__ = ["RewardSpec", "ScoreOutcome", "ScoreRequest", "Scorer", "build_scorer", "score_file"]

TEXT_ONLY_REWARD = 5.0

_REQUEST_FIELDS = ("response", "gt_answer", "test_cases", "prompt")
_ROWS_AHEAD_PER_WORKER = 64
_POLL_SECONDS = 1.0


class Scorer(Protocol):
    """Scores responses one after the other. None but that of code keeps a time limit."""

    def score(self, request: ScoreRequest) -> ScoreOutcome:
        """Outcome for one response; never raises for anything a response contains."""
        ...


class AnswerScorer:
    """Rewards `think_answer_tags` and `boxed`: extract the answer, check the format, compare with the gold answer."""

    def __init__(self, reward_type: str) -> None:
        self._extract = EXTRACTORS[reward_type]
        warm_up()

    def score(self, request: ScoreRequest) -> ScoreOutcome:
        """0 without a valid format. `ans_acc` is 1 for every answer that is paid, also for one that is paid half."""
        gold = request.gt_answer
        if gold is None or not gold.strip():
            return ScoreOutcome.failed("the row has no gt_answer to compare with", infrastructure=False)
        format_valid, answer = self._extract(request.response, request.prompt)
        if not format_valid or answer is None:
            return ScoreOutcome(0.0, float(format_valid), 0.0)
        verdict = compare(gold, answer)
        reward = _answer_reward(verdict, gold, answer)
        return ScoreOutcome(reward, 1.0, float(reward > 0), gold_unparsable=verdict is Verdict.GOLD_UNPARSABLE)


def _answer_reward(verdict: Verdict, gold: str, answer: str) -> float:
    if verdict is Verdict.EQUAL:
        return FULL_REWARD
    if verdict is Verdict.DIFFERENT or not literal.same_text(literal.clean(gold), literal.clean(answer)):
        return 0.0
    # No expression to compare. If that is the gold answer's fault, the text is all there is and pays in full.
    return FULL_REWARD if verdict is Verdict.GOLD_UNPARSABLE else TEXT_ONLY_REWARD


def build_scorer(spec: RewardSpec) -> Scorer:
    """Scorer for `spec.type`, loaded and warmed up; `ConfigError` if the type is unknown or cannot be loaded."""
    check_reward_type(spec.type)
    if spec.type in ANSWER_TYPES:
        return AnswerScorer(spec.type)
    if spec.type == CODE_TYPE:
        return _code_scorer(spec)
    return RewardFunction(spec.type)


def _code_scorer(spec: RewardSpec) -> CodeScorer:
    """Programs of a model are not run on a machine that cannot keep them in, unless somebody has said so."""
    from zbgrpo.rewards.sandbox.local import LocalSandbox
    from zbgrpo.rewards.sandbox.remote import RemoteSandbox

    sandbox: Sandbox = LocalSandbox() if spec.code_sandbox_url is None else RemoteSandbox(spec.code_sandbox_url)
    isolation = sandbox.isolation()
    if isolation.level < spec.min_isolation and not spec.allow_unsafe_code:
        sandbox.close()
        raise ConfigError(
            f"code rewards need isolation level {spec.min_isolation} (reward.min_isolation), and this machine has "
            f"{isolation.describe()}. Level 1 needs Linux 5.13 or newer with Landlock and seccomp, level 2 also user "
            "namespaces and bubblewrap (`bwrap`). Or run programs elsewhere, with "
            "--code-sandbox-url URL; or accept less, with reward.min_isolation; or, where nothing on the machine is "
            "worth protecting, set reward.allow_unsafe_code=true"
        )
    return CodeScorer(sandbox, spec)


def score_file(path: Union[str, Path], spec: RewardSpec, out: TextIO, num_workers: int = 2) -> None:
    """Score a JSON Lines file with `response` and `gt_answer` or `test_cases`; one JSON line per row, in file order.

    A line of the output holds reward, format_acc and ans_acc; `"timed_out": true` beside them if the response ran over
    its time limit; or null for all three and `error` if it could not be scored. Blank lines of the input are skipped.
    The whole file is checked before anything is scored: `DataError` names the first bad line as `file:line: reason`.
    """
    check_reward_type(spec.type)
    requests = list(_read_requests(Path(path), spec.type))
    outcomes: dict[int, ScoreOutcome] = {}
    num_sent = num_written = 0
    with RewardPool(spec, num_workers) as pool:
        while num_written < len(requests):
            limit = min(len(requests), num_written + _ROWS_AHEAD_PER_WORKER * num_workers)
            while num_sent < limit:
                pool.submit(num_sent, [requests[num_sent]])
                num_sent += 1
            outcomes.update((key, group[0]) for key, group in pool.poll(_POLL_SECONDS))
            while num_written in outcomes:
                out.write(_outcome_line(outcomes.pop(num_written)) + "\n")
                num_written += 1
    out.flush()


def _outcome_line(outcome: ScoreOutcome) -> str:
    scored = outcome.error is None
    line: dict[str, Any] = {
        name: getattr(outcome, name) if scored else None for name in ("reward", "format_acc", "ans_acc")
    }
    if outcome.timed_out:
        line["timed_out"] = True
    if not scored:
        line["error"] = outcome.error
    return msgspec.json.encode(line).decode()


def _read_requests(path: Path, reward_type: str) -> Iterator[ScoreRequest]:
    try:
        with path.open("rb") as lines:  # bytes: only \n ends a line, whatever characters the strings contain
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _read_request(line, f"{path}:{number}", reward_type)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _read_request(line: bytes, place: str, reward_type: str) -> ScoreRequest:
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{place}: not a JSON object: {error}") from error
    response, test_cases, prompt = row.get("response"), row.get("test_cases"), row.get("prompt", "")
    if not isinstance(response, str):
        raise DataError(f"{place}: 'response' is missing or not a string")
    if not isinstance(prompt, str):
        raise DataError(f"{place}: 'prompt' is not a string")
    if test_cases is not None and not isinstance(test_cases, dict):
        raise DataError(f"{place}: 'test_cases' is not an object")
    gold = _gold_text(row.get("gt_answer"), place)
    if gold is None and reward_type in ANSWER_TYPES:
        raise DataError(f"{place}: 'gt_answer' is missing, and reward type {reward_type} compares with it")
    if reward_type == CODE_TYPE and (reason := _fault_of_test_cases(test_cases)) is not None:
        raise DataError(f"{place}: {reason}")
    rest = {name: value for name, value in row.items() if name not in _REQUEST_FIELDS}
    return ScoreRequest(response, gold, test_cases, prompt, rest)


def _fault_of_test_cases(test_cases: Optional[dict[str, Any]]) -> Optional[str]:
    return "'test_cases' is missing" if test_cases is None else check_test_cases(test_cases)


def _gold_text(gold: Any, place: str) -> Optional[str]:
    if gold is None:
        return None
    if isinstance(gold, (int, float)) and not isinstance(gold, bool):
        return str(gold)
    if not isinstance(gold, str):
        raise DataError(f"{place}: 'gt_answer' must be a string or a number, not {type(gold).__name__}")
    if not gold.strip():
        raise DataError(f"{place}: 'gt_answer' is empty")
    if any(ord(symbol) < 32 and symbol not in "\t\n\r" for symbol in gold):
        raise DataError(
            f"{place}: 'gt_answer' holds a control character; in JSON a backslash of LaTeX is written twice (\\\\frac)"
        )
    return gold
