"""Code rewards: what passes, what does not, and what a solution may try to be paid for nothing."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.code_tasks import FUNCTIONS, PROGRAMS, CodeTask
from zbgrpo import cli
from zbgrpo.errors import ConfigError, InfrastructureError
from zbgrpo.rewards import code, manager
from zbgrpo.rewards.code import CodeScorer
from zbgrpo.rewards.comparing import same_output, same_value
from zbgrpo.rewards.extract import extract_code
from zbgrpo.rewards.messages import RewardSpec, ScoreOutcome, ScoreRequest
from zbgrpo.rewards.pool import RewardPool
from zbgrpo.rewards.sandbox.base import End, Execution, Isolation, Limits
from zbgrpo.rewards.sandbox.harness import HARNESS, asserts_task, calls_task, read_verdict
from zbgrpo.rewards.sandbox.local import LocalSandbox
from zbgrpo.rewards.score import build_scorer
from zbgrpo.rewards.test_cases import check_test_cases, parse_test_cases

RIGHT = ScoreOutcome(10.0, 1.0, 1.0)
WRONG = ScoreOutcome(0.0, 1.0, 0.0)
NO_FORMAT = ScoreOutcome(0.0, 0.0, 0.0)
NOBODY = "http://127.0.0.1:1/run_code"
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def scorer() -> Iterator[CodeScorer]:
    made = CodeScorer(LocalSandbox(), RewardSpec("code", 20.0))
    yield made
    made.close()


@pytest.fixture(scope="module")
def bare_scorer() -> Iterator[CodeScorer]:
    """Without anything that the kernel refuses: what holds here is held by the harness."""
    made = CodeScorer(LocalSandbox(level=0), RewardSpec("code", 20.0))
    yield made
    made.close()


def block(source: str) -> str:
    return f"Here it is:\n\n```python\n{source}\n```\n"


def score(scorer: CodeScorer, source: str, test_cases: dict[str, Any]) -> ScoreOutcome:
    return scorer.score(ScoreRequest(block(source), test_cases=test_cases))


# ------------------------------------------------------------------------------------------------------ right and wrong


@pytest.mark.parametrize("task", [*PROGRAMS, *FUNCTIONS], ids=lambda task: task.name)
def test_right_solutions_pass_and_wrong_ones_do_not(scorer: CodeScorer, task: CodeTask) -> None:
    assert check_test_cases(task.test_cases) is None
    assert score(scorer, task.right, task.test_cases) == RIGHT
    assert score(scorer, task.wrong, task.test_cases) == WRONG


def test_there_are_enough_tasks() -> None:
    assert min(len(PROGRAMS), len(FUNCTIONS)) >= 20


ASSERTS = {
    "setup": "import math\ndef check(f):\n    assert f(4) == 2\n    assert f(9) == 3\n",
    "assert": ["check(root)", "assert math.isclose(root(2.25), 1.5)"],
}


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("def root(x):\n    return x ** 0.5", RIGHT),
        ("def root(x):\n    print('root of', x)\n    return math.sqrt(x)", RIGHT),
        ("def root(x):\n    return int(x ** 0.5)", WRONG),  # the second program fails
        ("def root(x):\n    return x / 2 if x == 4 else 3 if x == 9 else None", WRONG),
        ("def square_root(x):\n    return x ** 0.5", WRONG),
        ("def root(x)\n    return x ** 0.5", WRONG),
        ("def root(x):\n    return 1 / 0", WRONG),
    ],
)
def test_programs_that_test(scorer: CodeScorer, source: str, outcome: ScoreOutcome) -> None:
    assert score(scorer, source, ASSERTS) == outcome


OBJECTS = """
from dataclasses import dataclass

LIMIT = (3, {"a": {1, 2}})

@dataclass
class Point:
    x: float = 0.0

class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items

class Full(ValueError): pass

def count(n):
    for i in range(n): yield i

def refuse(kind):
    raise Full("no more") if kind == 1 else UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")

def shape(value): return type(value).__name__
"""


@pytest.mark.parametrize(
    "program",
    [
        "assert LIMIT == (3, {'a': {1, 2}})",
        "s = Stack(); s.push(1).push('b'); assert len(s) == 2 and list(s) == [1, 'b'] and 'b' in s and 3 not in s",
        "s = Stack(); assert s.items == [] and s == s and s != Stack()",
        "p = Point(x=2.0); p.x = 3; assert p.x == 3",
        "assert list(count(3)) == [0, 1, 2]; c = count(2); assert (next(c), next(c), next(c, 'end')) == (0, 1, 'end')",
        "try:\n    refuse(1)\nexcept ValueError as error:\n    assert str(error) == 'no more'\nelse:\n    assert False",
        "try:\n    refuse(2)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "for v in (None, True, 1, 1.5, 'x', b'x', 2j, [1], (1,), {1}, frozenset([1]), {1: (2,)}, Point()):\n"
        "    assert shape(v) == type(v).__name__ or isinstance(v, Point.__class__) or shape(v) == 'Point'",
        "assert shape(10 ** 1000) == 'int' and shape(float('inf')) == 'float'",
        "assert count.__name__ == 'count'",
    ],
)
def test_objects_of_the_solution_are_used_from_afar(scorer: CodeScorer, program: str) -> None:
    assert score(scorer, OBJECTS, {"assert": [program]}) == RIGHT


def test_every_program_must_pass(scorer: CodeScorer) -> None:
    for programs in (["assert x == 1", "assert x == 2"], ["assert x == 2", "assert x == 1"]):
        assert score(scorer, "x = 1", {"assert": programs}) == WRONG
    assert score(scorer, "x = 1", {"assert": ["assert x == 1", "assert x > 0"]}) == RIGHT


LOOP = {"assert": ["for i in range(9):\n    assert abs(solve(i) - 10 * i) < 1e-6"]}
REPLIES = """
import sys
frame = sys._getframe()
while "outgoing" not in frame.f_locals: frame = frame.f_back
names = '["range", ["object", 0]], ["solve", ["object", 0]]'
frame.f_locals["outgoing"].write('["returned", null]\\n["returned", ["dict", %s]]\\n["returned", ["list"]]\\n' % names)
def solve(x): return 1
"""


@pytest.mark.parametrize(
    ("source", "test_cases", "outcome"),
    [
        ("def solve(x): return 10.0 * x", LOOP, RIGHT),
        ("def abs(x): return 0\ndef solve(x): return 1", LOOP, WRONG),
        ("def range(n): return []\ndef solve(x): return 1", LOOP, WRONG),
        (REPLIES, LOOP, WRONG),
        ("def sum(a, b): return a + b", {"assert": ["assert sum(10, 15) == 25"]}, RIGHT),
        ("def other(a, b): return a + b", {"assert": ["assert sum(10, 15) == 25"]}, WRONG),
        ("base = 3\ndef solve(x): return x + base", {"assert": ["assert abs(solve(-9)) == base + 3"]}, RIGHT),
    ],
)
def test_names_of_python_are_those_of_the_tests(
    scorer: CodeScorer, source: str, test_cases: dict[str, Any], outcome: ScoreOutcome
) -> None:
    """Unless one of them is all that the solution had to write."""
    assert score(scorer, source, test_cases) == outcome


def test_modules_of_the_solution_are_those_of_the_tests(scorer: CodeScorer) -> None:
    cases = {"assert": ["assert math.floor(solve(1.5)) == 1 and json is None"]}
    assert score(scorer, "import math, json.tool as json\ndef solve(x): return x", cases) == RIGHT
    assert score(scorer, "import random as math\njson = None\ndef solve(x): return x", cases) == WRONG


def test_numbers_of_numpy_are_numbers(scorer: CodeScorer) -> None:
    source = "import numpy as np\ndef solve(x): return [np.int64(x), np.float32(0.5), np.bool_(x == 3)]"
    assert score(scorer, source, {"fn_name": "solve", "inputs": [[3]], "outputs": [[3, 0.5, True]]}) == RIGHT
    assert score(scorer, source, {"fn_name": "solve", "inputs": [[3]], "outputs": [[3, 0.5, 1]]}) == WRONG
    assert score(scorer, source, {"assert": ["assert solve(3) == [3, 0.5, True]"]}) == RIGHT
    assert score(scorer, "import numpy\ndef solve(x): return numpy.longdouble(x)", {"assert": ["solve(3)"]}) == RIGHT


def test_setup_belongs_to_the_tests(scorer: CodeScorer) -> None:
    """The solution sees it, and cannot replace it."""
    replaced = "def check(f):\n    pass\ndef root(x):\n    return 7"
    assert score(scorer, replaced, ASSERTS) == WRONG
    cases = {"setup": "base = 3", "fn_name": "f", "inputs": [[1]], "outputs": [4]}
    assert score(scorer, "def f(x): return x + base", cases) == RIGHT


# ----------------------------------------------------------------------------------------------- paid for nothing

SECRET = 918273645

EXITS = ["raise SystemExit(0)", "import sys; sys.exit(0)", "quit()", "import os; os._exit(0)", "import os; os.abort()"]
CODE_FOR = """
import atexit, builtins, gc, glob, itertools, json, os, re, signal, sys, threading, types

VERDICT = json.dumps({"token": "0" * 32, "passed": True, "results": [918273600], "error": ""}) + "\\n"

def everywhere(text):
    for fd in range(1, 64):
        try: os.write(fd, text.encode())
        except OSError: pass
    for pid, fd in itertools.product(relatives(), range(16)):
        try: os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), text.encode())
        except OSError: pass

def relatives():  # everybody in a namespace of its own; elsewhere nobody else is to be harmed
    return range(1, 30) if os.getpid() < 30 else (os.getpid(), os.getppid())

def secret_in(data):
    found = re.search(rb"9182736[0-9]{2}(?<!00)", data)
    return int(found[0]) if found else None

def look():
    frame, texts = sys._getframe(), []
    while frame:
        texts.append(repr((frame.f_locals, frame.f_globals, frame.f_code.co_consts)))
        frame = frame.f_back
    texts += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (list, dict, tuple))][:20000]
    yield "".join(texts).encode("utf-8", "replace")
    for pid in relatives():
        for name in ("fd/0", "cmdline", "environ", *(f"fd/{n}" for n in range(3, 12))):
            try: yield os.read(os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_NONBLOCK), 1 << 20)
            except OSError: pass
    above = [os.getcwd() + "/.." * n for n in range(1, 4)]
    for name in glob.glob("**", recursive=True) + glob.glob(".*") + [f"{folder}/stdin" for folder in above]:
        try: yield open(name, "rb").read()
        except OSError: pass
    try:
        maps = open(f"/proc/{os.getppid()}/maps").read()
        memory = open(f"/proc/{os.getppid()}/mem", "rb", 0)
    except OSError:
        return
    for line in maps.splitlines():
        start, end = (int(n, 16) for n in line.split()[0].split("-"))
        if "rw" in line and end - start < 1 << 24:
            memory.seek(start)
            yield memory.read(end - start)

class Anything(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 1
    def __sub__(self, other): return 0
    __lt__ = __gt__ = __le__ = __ge__ = __req__ = __eq__

class Any2:
    def __eq__(self, other): return True
    def __getattr__(self, name): return lambda *a: True

"""
HACKS = {
    **{f"import: {line}": line for line in EXITS},
    **{f"call: {line}": f"def solve(x):\n    {line}" for line in EXITS},
    "nothing": "pass",
    "equals everything": "def solve(x): return Anything(5)",
    "equals everything in a list": "def solve(x): return Any2()",
    "text of a subclass": "class T(str):\n    __eq__ = Anything.__eq__\ndef solve(x): return T('x')",
    "exit at exit": "atexit.register(os._exit, 0)\ndef solve(x): return 1",
    "patched json": "json.dumps = json._default_encoder.encode = lambda *a, **k: VERDICT\ndef solve(x): return 1",
    "patched json that returns": (
        "json.dumps = lambda *a, **k: '[\"returned\", true]'\njson.loads = lambda *a: {}\ndef solve(x): return 1"
    ),
    "patched builtins": (
        "for n in ('isinstance', 'all', 'any', 'len', 'map'): setattr(builtins, n, lambda *a: True)\n"
        "builtins.AssertionError = builtins.Exception = SystemExit\nbuiltins.exec = builtins.compile = print\n"
        "def solve(x): return 1"
    ),
    "overwritten check": (
        "def check(*a): pass\nbuiltins.check = check\nfor m in list(sys.modules.values()):\n"
        "    try: m.check = m.judge = m.main = check\n    except Exception: pass\ndef solve(x): return 1"
    ),
    "forged lines": "everywhere(VERDICT)\ndef solve(x): everywhere(VERDICT); return 1",
    "forged lines and away": "def solve(x): everywhere(VERDICT); os._exit(0)",
    "forged replies": "everywhere('[\"returned\", true]\\n' * 99)\ndef solve(x): return 1",
    "threads": "threading.Thread(target=everywhere, args=[VERDICT * 99]).start()\ndef solve(x): return 1",
    "children": "if os.fork(): os._exit(0)\neverywhere(VERDICT)",
    "kills its parent": "def solve(x):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 1",
    "guesses on standard output": f"print('ok', 'passed', True, {SECRET - 1})\ndef solve(x): return {SECRET - 1}",
    "looks for the answer": "def solve(x): return next(filter(None, map(secret_in, look())), 0)",
    "looks for the answer at import": (
        "found = next(filter(None, map(secret_in, look())), 0)\nprint(found)\ndef solve(x): return found"
    ),
    "files to be imported": (
        "for n in ('sitecustomize', 'usercustomize', 'conftest', 'json', 'math', 'ast', 'random'):\n"
        "    try: open(n + '.py', 'w').write('import os; os._exit(0)')\n    except OSError: pass\n"
        "math = types.ModuleType('random')\ndef solve(x): return 1"
    ),
    "a module that runs files": (
        'open("test_it.py", "w").write("""\n'
        "import __main__, gc, os\n"
        "task = [d for d in gc.get_objects() if type(d) is dict and type(d.get('token')) is str][0]\n"
        "os.write(__main__.answer, __main__.json.dumps({'token': task['token'], 'passed': True}).encode())\n"
        'os._exit(0)\n""")\n'
        "solve = types.ModuleType('unittest.__main__')"
    ),
}
KINDS: dict[str, dict[str, Any]] = {
    "programs": {"inputs": ["41\n"], "outputs": [f"{SECRET}\n"]},
    "functions": {"fn_name": "solve", "inputs": [[41]], "outputs": [SECRET]},
    "asserts": {
        "setup": "def check(solve, answer):\n    assert solve(41) == answer\n    assert abs(solve(41) - answer) < 1",
        "assert": ["check(solve, 918273645)", "import math\nassert math.floor(solve(41)) == 918273645"],
    },
    "asserts that catch": {
        "assert": ["try:\n    solve(41)\nexcept Exception:\n    pass\nassert solve(41) == 918273645"],
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_solution_of_the_attacked_tasks_passes(bare_scorer: CodeScorer, kind: str) -> None:
    honest = f"def solve(x): return {SECRET - 41} + x\nif __name__ == '__main__': print(solve(int(input())))"
    assert score(bare_scorer, honest, KINDS[kind]) == RIGHT
    assert score(bare_scorer, CODE_FOR + honest, KINDS[kind]) == RIGHT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hack", HACKS)
def test_hacks_are_not_paid(bare_scorer: CodeScorer, hack: str, kind: str) -> None:
    assert score(bare_scorer, CODE_FOR + HACKS[hack], KINDS[kind]) == WRONG


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hack", ["looks for the answer", "looks for the answer at import", "forged lines"])
def test_what_the_machine_adds_opens_no_other_way(scorer: CodeScorer, hack: str, kind: str) -> None:
    """As a process namespace does, in which the helpers of the sandbox belong to the program's user."""
    assert score(scorer, CODE_FOR + HACKS[hack], KINDS[kind]) == WRONG


def test_a_call_that_ends_the_process_cannot_be_caught_by_a_test(scorer: CodeScorer) -> None:
    """Every test of these expects an exception, and an end is none."""
    program = "try:\n    solve(1)\n    raise SystemExit('no exception')\nexcept Exception:\n    pass"
    assert score(scorer, "def solve(x): raise KeyError(x)", {"assert": [program]}) == RIGHT
    for line in EXITS:
        assert score(scorer, f"def solve(x):\n    {line}", {"assert": [program]}) == WRONG


def test_expected_values_never_enter_the_sandbox() -> None:
    seen: list[bytes] = []

    class Recording(Scripted):
        def run(self, source: str, stdin: bytes, limits: Limits) -> Execution:
            seen.append(source.encode() + stdin)
            return super().run(source, stdin, limits)

    for kind in ("programs", "functions"):
        score(CodeScorer(Recording(printed(b"")), RewardSpec("code")), "def solve(x): return x", KINDS[kind])
    assert len(seen) == 2
    assert not any(str(SECRET).encode() in data for data in seen)


# ------------------------------------------------------------------------------------------------ limits and failures


class Scripted:
    """A sandbox that has all its executions ready; the last one is repeated."""

    def __init__(self, *executions: Execution) -> None:
        self.executions = list(executions)
        self.limits: list[Limits] = []

    def run(self, source: str, stdin: bytes, limits: Limits) -> Execution:
        self.limits.append(limits)
        return self.executions.pop(0) if len(self.executions) > 1 else self.executions[0]

    def isolation(self) -> Isolation:
        return Isolation(0, {})

    def close(self) -> None:
        pass


def printed(stdout: bytes, wall_seconds: float = 0.1, exit_status: int = 0) -> Execution:
    return Execution(End.EXITED, exit_status, stdout, "", wall_seconds)


BROKEN = Execution(End.INFRASTRUCTURE, None, b"", "", 0.1, "no more processes")
TWO = {"inputs": ["1", "2"], "outputs": ["1", "2"]}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_RETRY_PAUSE_SECONDS", 0.0)


def test_the_first_wrong_output_is_the_last_run() -> None:
    sandbox = Scripted(printed(b"0"))
    assert score(CodeScorer(sandbox, RewardSpec("code")), "x", TWO) == WRONG
    assert len(sandbox.limits) == 1


def test_processes_of_a_response_share_its_time_and_memory_limit() -> None:
    sandbox = Scripted(printed(b"1", 2.25), printed(b"2"))
    spec = RewardSpec("code", 4.0, code_memory_bytes=12345)
    assert score(CodeScorer(sandbox, spec), "x", TWO) == RIGHT
    assert [limits.wall_seconds for limits in sandbox.limits] == [4.0, 1.75]
    assert {limits.memory_bytes for limits in sandbox.limits} == {12345}


@pytest.mark.parametrize(
    "executions",
    [
        (Execution(End.TIME, None, b"1", "", 1.0),),
        (printed(b"1", 0.5), Execution(End.TIME, None, b"2", "", 0.5)),
        (printed(b"1", 1.5), printed(b"2")),
        (printed(b"1", 0.9), printed(b"2", 0.2)),
    ],
)
def test_time_used_up_scores_zero(executions: tuple[Execution, ...]) -> None:
    outcome = score(CodeScorer(Scripted(*executions), RewardSpec("code", 1.0)), "x", TWO)
    assert outcome == ScoreOutcome(0.0, 1.0, 0.0, timed_out=True)


@pytest.mark.parametrize("end", [End.SIGNALLED, End.MEMORY, End.OUTPUT])
def test_a_program_that_did_not_end_by_itself_is_wrong_whatever_it_printed(end: End) -> None:
    sandbox = Scripted(Execution(end, None, b"1", "", 0.1))
    assert score(CodeScorer(sandbox, RewardSpec("code")), "x", {"inputs": ["1"], "outputs": ["1"]}) == WRONG


def test_a_program_that_failed_is_wrong_whatever_it_printed() -> None:
    sandbox = Scripted(printed(b"1", exit_status=1))
    assert score(CodeScorer(sandbox, RewardSpec("code")), "x", {"inputs": ["1"], "outputs": ["1"]}) == WRONG


def test_faults_of_the_sandbox_are_tried_again_twice_and_are_never_a_score() -> None:
    spec = RewardSpec("code", 1.0)
    assert score(CodeScorer(Scripted(BROKEN, BROKEN, printed(b"1"), BROKEN, printed(b"2")), spec), "x", TWO) == RIGHT
    for executions in ((BROKEN,), (printed(b"1"), BROKEN)):
        sandbox = Scripted(*executions)
        outcome = score(CodeScorer(sandbox, spec), "x", TWO)
        assert outcome.infrastructure
        assert "no more processes" in (outcome.error or "")
        assert len(sandbox.limits) == len(executions) + code.NUM_RETRIES


def test_a_sandbox_that_is_too_slow_is_a_fault_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "LOST_SECONDS", -3.0)
    outcome = score(CodeScorer(Scripted(printed(b"1")), RewardSpec("code", 1.0)), "x", TWO)
    assert outcome.infrastructure
    assert outcome.error is not None


def test_what_starting_programs_takes_beside_their_own_time_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds of inputs it adds up to more than any fixed grace."""
    clock = [0.0]
    monkeypatch.setattr(code.time, "monotonic", lambda: clock[0])

    class Slow(Scripted):
        def run(self, source: str, stdin: bytes, limits: Limits) -> Execution:
            clock[0] += 0.05
            return printed(b"1", 0.03)

    cases = {"inputs": ["1"] * 300, "outputs": ["1"] * 300}
    assert score(CodeScorer(Slow(BROKEN), RewardSpec("code", 10.0)), "x", cases) == RIGHT


def test_a_harness_that_cannot_work_is_a_fault_and_no_zero() -> None:
    class Refusing(Scripted):
        def run(self, source: str, stdin: bytes, limits: Limits) -> Execution:
            return printed(json.dumps({"token": json.loads(stdin)["token"], "refused": "no second process"}).encode())

    outcome = score(CodeScorer(Refusing(BROKEN), RewardSpec("code")), "x", ASSERTS)
    assert outcome.infrastructure
    assert "no second process" in (outcome.error or "")


@pytest.mark.parametrize(
    "stdout",
    [b"", b"passed", b"[" * 100_000, b'{"passed": true}', b'{"token": "other", "passed": true}', b"\xff", b"null",
     b'{"token": "t", "passed": true}\n{"token": "t", "passed": true}', b'{"token": "t", "passed": 1}',
     b'{"token": "t", "passed": true, "more": 1}', b'{"token": "", "refused": "no more"}',
     b'{"token": null, "passed": true}'],
)  # fmt: skip
def test_only_the_line_of_the_harness_is_a_verdict(stdout: bytes) -> None:
    assert read_verdict(stdout, "t") is None


def test_a_verdict_is_read() -> None:
    verdict = read_verdict(b'{"token": "t", "results": [NaN, ["list", 1]], "passed": true}\n', "t")
    assert verdict is not None
    assert verdict.passed
    assert verdict.results[1] == ["list", 1]


def test_the_harness_compiles_and_its_tasks_hold_what_they_need_only() -> None:
    ast.parse(HARNESS, feature_version=(3, 8))
    assert json.loads(calls_task("t", "s", "", "f", [[1]]))["programs"] is None
    assert json.loads(asserts_task("t", "s", "", ["p"]))["calls"] is None


def test_the_last_program_has_time_to_start() -> None:
    """What it gets beyond the limit of the response it can use, but not be paid for."""
    sandbox = Scripted(printed(b"1", 3.99), printed(b"2", 0.005))
    assert score(CodeScorer(sandbox, RewardSpec("code", 4.0)), "x", TWO) == RIGHT
    assert sandbox.limits[1].wall_seconds == code.LEAST_SECONDS


@pytest.mark.parametrize(
    ("kind", "source"),
    [*((kind, "while True: pass") for kind in ("programs", "functions", "asserts")),
     ("programs", "import time; time.sleep(60)")],
)  # fmt: skip
def test_real_programs_run_out_of_time(kind: str, source: str) -> None:
    scorer = CodeScorer(LocalSandbox(), RewardSpec("code", 2.0))
    assert score(scorer, source, KINDS[kind]) == ScoreOutcome(0.0, 1.0, 0.0, timed_out=True)
    scorer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_real_programs_run_out_of_memory_and_output(scorer: CodeScorer, kind: str) -> None:
    assert score(scorer, "x = bytearray(1 << 34)", KINDS[kind]) == WRONG
    assert score(scorer, "while True: print('x' * 100000)", KINDS[kind]) == WRONG


def test_prints_of_a_function_do_not_matter(scorer: CodeScorer) -> None:
    noisy = (
        "import os, sys\nprint('x' * 10000)\ndef f(x):\n    print(x); os.write(1, b'{}'); sys.stdout.flush(); return x"
    )
    assert score(scorer, noisy, {"fn_name": "f", "inputs": [[1]], "outputs": [1]}) == RIGHT


def test_a_function_sees_no_standard_input(scorer: CodeScorer) -> None:
    source = "import sys\ndef f(): return sys.stdin.read()"
    assert score(scorer, source, {"fn_name": "f", "inputs": [[]], "outputs": [""]}) == RIGHT


def test_each_call_has_its_own_arguments_and_object(scorer: CodeScorer) -> None:
    source = (
        "class Solution:\n    def __init__(self): self.n = 0\n"
        "    def f(self, x): self.n += len(x); x.append(1); return self.n"
    )
    cases = {"fn_name": "f", "inputs": [[[1]], [[1]]], "outputs": [1, 1]}
    assert score(scorer, source, cases) == RIGHT


def test_strange_solutions_are_wrong_and_no_errors(scorer: CodeScorer) -> None:
    deep = "def f():\n    x = []\n    for _ in range(100000): x = [x]\n    return x"
    returned = ("10 ** 10000", "float('nan')", "'\ud800'", "f", "print", "{(): {}}", "object()")
    broken = ("\0", "(" * 10000, "f = 3", "class Solution:\n    f = 4", "def f(x): return 7")
    for source in (deep, *(f"def f(): return {value}" for value in returned), *broken):
        assert score(scorer, source, {"fn_name": "f", "inputs": [[]], "outputs": [7]}) == WRONG
        assert score(scorer, source, {"assert": ["assert f() == 7"]}) == WRONG


# ------------------------------------------------------------------------------------------------ format, comparison


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\ntext\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n\n```\nb\n```", "a\n"),  # a block of another language, as sample output
        ("```python\na\n```\n\n```text\nb\n```", "a\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ("<answer>```python\na\n```</answer>", "a\n"),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("```python\na\n```python\nb\n```", "b\n"),  # the first is never closed
        ("```python\n'''\n    ```text\n'''\n```", "'''\n    ```text\n'''\n"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("<think>```python\na\n```</think> done", None),
        ("<think>```python\na\n```", None),
        ("```python\na\n```\n```python\nb", None),  # the last is never closed: cut off, or unsure
        ("```python\na", None),
        ("```python\n\n```", None),
        ("```\na\n```", None),
        ("````python\na\n````", None),
        ("`python\na\n`", None),
        ("a", None),
        ("", None),
    ],
)
def test_the_last_block_of_the_answer(response: str, expected: str | None) -> None:
    assert extract_code(response) == (expected is not None, expected)


def test_thinking_that_the_prompt_opened() -> None:
    assert extract_code("```python\na\n```", "<think>\n").answer is None
    assert extract_code("hm</think>```python\na\n```", "<think>\n").answer == "a\n"


def test_extraction_takes_linear_time() -> None:
    for unit in ("```python\n", "```", "`", "```python\na\n```\n", "\n ```", "<think>"):
        extract_code(unit * 100_000)


def test_no_block_is_no_format(scorer: CodeScorer) -> None:
    assert scorer.score(ScoreRequest("print(1)", test_cases=TWO)) == NO_FORMAT


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("1\n2\n", b"1\n2", True),
        ("1\n2", b"1  \r\n2\t\n\n\n", True),
        ("", b"\n", True),
        ("1\n\n2", b"1\n2", False),
        ("1 2", b"1  2", False),
        ("  1", b"1", False),
        ("Yes", b"yes", False),
        ("1", b"1.0", False),
        ("1", b"01", False),
        ("1.0", b"1", True),
        ("0.3333333333", b"0.33333333333333331", True),
        ("0.3333", b"0.33333333333333331", False),
        ("x = 1.50 !", b"x = 1.5 !", True),
        ("1e3", b"1000", True),
        ("1.0", b"nan", False),
        ("1.0", b"1" * 10_000, False),
        ("1.5", b"1_5e-1", False),
        ("é", "é".encode(), True),
        ("e", b"\xff", False),
        ("", b"", True),
    ],
)
def test_same_output(expected: str, output: bytes, same: bool) -> None:
    assert same_output(expected, output) is same


@pytest.mark.parametrize(
    ("expected", "returned", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (True, 1, False),
        (True, True, True),
        (0, None, False),
        (0, False, False),
        ("1", 1, False),
        (1, "1", False),
        (2, 2.0, True),
        (2, 2.0000000001, False),
        (2.0, 2, True),
        (0.1, 0.1000000000001, True),
        (0.1, 0.1001, False),
        (1e300, 10**400, False),
        (10**20, 1e20, True),
        (10**20 + 1, 1e20, False),
        (1.0, float("nan"), False),
        ([1, [2]], ["list", 1, ["tuple", 2]], True),
        ([1, 2], ["set", 1, 2], False),
        ([1, 2], ["list", 1], False),
        ([], ["list"], True),
        ([], [], False),
        ([], ["dict"], False),
        ({}, ["dict"], True),
        ({"a": 1}, ["dict", ["a", 1]], True),
        ({"1": 1}, ["dict", [1, 1]], True),
        ({"true": 1, "null": 2}, ["dict", [True, 1], [None, 2]], True),
        ({"1": 1}, ["dict", [1, 1], ["1", 1]], False),
        ({"a": 1}, ["dict", ["a", 1], ["b", 1]], False),
        ({"a": 1}, {"a": 1}, False),  # not as the harness writes it
        ({"a": 1}, ["dict", 5], False),
        ({"a": 1}, ["dict", [["list"], 1]], False),
        (None, None, True),
        (None, ["object", 0], False),
        ("x", ["object", 0], False),
        ([0], ["object", 0], False),
    ],
)
def test_same_value(expected: Any, returned: Any, same: bool) -> None:
    assert same_value(expected, returned) is same


# ------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("test_cases", "part"),
    [
        ({}, "needs both inputs and outputs, or assert"),
        ({"inputs": ["1"]}, "needs both"),
        ({"inputs": ["1"], "outputs": []}, "outputs is empty"),
        ({"inputs": [], "outputs": []}, "inputs is empty"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs but 1 outputs"),
        ({"inputs": "1", "outputs": ["1"]}, "inputs is not a list"),
        ({"inputs": [1], "outputs": ["1"]}, r"inputs\[0\] is neither"),
        ({"inputs": ["1"], "outputs": [["1", 2]]}, r"outputs\[0\] is neither"),
        ({"inputs": ["\ud800"], "outputs": ["1"]}, "surrogate"),
        ({"inputs": [["\ud800"]], "outputs": [1], "fn_name": "f"}, "surrogate"),
        ({"inputs": [[1]], "outputs": [float("nan")], "fn_name": "f"}, "JSON cannot"),
        ({"inputs": [[float("inf")]], "outputs": [1], "fn_name": "f"}, "JSON cannot"),
        ({"inputs": ["1"], "outputs": ["1"], "setup": "x"}, "setup belongs"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_nmae": "f"}, "unknown key 'fn_nmae'"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "a b"}, "not the name of a function"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": 3}, "not the name of a function"),
        ({"inputs": [{"a": 1}], "outputs": [1], "fn_name": "f"}, r"inputs\[0\] is neither"),
        ({"inputs": ["[1"], "outputs": ["1"], "fn_name": "f"}, r"inputs\[0\] is not JSON"),
        ({"inputs": ["1"], "outputs": ["one"], "fn_name": "f"}, r"outputs\[0\] is not JSON"),
        ({"assert": []}, "assert is empty"),
        ({"assert": "assert f()"}, "assert is not a list"),
        ({"assert": [3]}, r"assert\[0\] is not a text"),
        ({"assert": ["assert f() =="]}, r"assert\[0\] is not a Python program"),
        ({"assert": ["-" * 20_000 + "1"]}, r"assert\[0\] is not a Python program: \S"),
        ({"assert": ["  "]}, "tests nothing"),
        ({"assert": ["assert f()", "'''doc'''\nimport math\ndef check(f):\n    assert f()"]}, r"assert\[1\] defines"),
        ({"assert": ["assert f()"], "setup": 3}, "setup is not a text"),
        ({"assert": ["assert f()"], "setup": "def"}, "setup is not a Python program"),
        ({"assert": ["assert f()"], "inputs": ["1"], "outputs": ["1"]}, "both assert and inputs"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(test_cases: dict[str, Any], part: str) -> None:
    reason = check_test_cases(test_cases)
    assert reason is not None
    assert re.search(part, reason), reason


def test_nulls_count_as_absent_and_both_forms_of_arguments_are_read() -> None:
    given = {"inputs": ['[1, 2]\n"a"\n'], "outputs": ["null"], "fn_name": "f", "setup": None, "assert": None}
    cases = parse_test_cases(given)
    assert (cases.calls, cases.results, cases.elements) == ([[[1, 2], "a"]], [None], None)  # type: ignore[union-attr]


def test_a_row_that_cannot_be_scored_is_an_error_and_no_zero(scorer: CodeScorer) -> None:
    for cases in (None, {}, {"inputs": ["1"], "outputs": []}):
        outcome = scorer.score(ScoreRequest(block("x"), test_cases=cases))
        assert outcome.error is not None
        assert not outcome.infrastructure


# ---------------------------------------------------------------------------------------------- pool and command line


def collect(pool: RewardPool, num_groups: int) -> dict[int, list[ScoreOutcome]]:
    groups: dict[int, list[ScoreOutcome]] = {}
    deadline = time.monotonic() + 3 * PATIENCE_SECONDS
    while len(groups) < num_groups:
        assert time.monotonic() < deadline, f"only {len(groups)} of {num_groups} groups"
        groups.update(pool.poll(1.0))
    return groups


class _NothingReturned(ast.NodeTransformer):
    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(ast.Constant(None))


def test_humaneval_references_pass_and_fail_once_they_return_nothing() -> None:
    folder = os.environ.get("ZBGRPO_TEST_DATA")
    if not folder:
        pytest.skip("ZBGRPO_TEST_DATA does not name a folder with test data")
    lines = (Path(folder) / "humaneval.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [check_test_cases(row["test_cases"]) for row in rows] == [None] * 164
    with RewardPool(RewardSpec("code", 8.0, min_isolation=0), num_workers=2) as pool:
        for key, row in enumerate(rows):
            reference = row["reference_solution"]
            broken = ast.unparse(ast.fix_missing_locations(_NothingReturned().visit(ast.parse(reference))))
            pool.submit(key, [ScoreRequest(block(text), test_cases=row["test_cases"]) for text in (reference, broken)])
        groups = collect(pool, len(rows))
        isolation = pool.isolation()
    # Of those that return nothing, one goes on for ever.
    assert {key: scores for key, scores in groups.items() if scores[0] != RIGHT or scores[1].reward != 0} == {}
    assert isolation is not None
    assert isolation == LocalSandbox().isolation()


@pytest.mark.parametrize(("level", "allowed"), [(0, False), (1, True), (2, True)])
def test_a_machine_that_keeps_programs_in_less_well_is_refused(
    monkeypatch: pytest.MonkeyPatch, level: int, allowed: bool
) -> None:
    isolation = Isolation(level, {"landlock": "this kernel has none"})
    monkeypatch.setattr(LocalSandbox, "isolation", lambda self: isolation)
    if allowed:
        assert build_scorer(RewardSpec("code")).isolation == isolation  # type: ignore[attr-defined]
        return
    with pytest.raises(ConfigError) as caught:
        build_scorer(RewardSpec("code"))
    for part in (
        isolation.describe(),
        "reward.min_isolation",
        "reward.allow_unsafe_code",
        "--code-sandbox-url",
        "bwrap",
    ):
        assert part in str(caught.value)
    build_scorer(RewardSpec("code", allow_unsafe_code=True))
    build_scorer(RewardSpec("code", min_isolation=0))
    build_scorer(RewardSpec("code", code_sandbox_url=NOBODY))


def test_the_pool_passes_the_refusal_on() -> None:
    with RewardPool(RewardSpec("code", min_isolation=9), 1) as pool:
        assert pool.isolation() is None
        with pytest.raises(ConfigError, match=r"isolation level 9 \(reward\.min_isolation\)"):
            pool.poll(PATIENCE_SECONDS)


def test_too_many_faults_end_the_pool() -> None:
    request = ScoreRequest(block("print(1)"), test_cases=TWO)
    with RewardPool(RewardSpec("code", 5.0, code_sandbox_url=NOBODY), 2) as pool:
        pool.submit(0, [request] * manager.BREAKER_LIMIT)
        (outcomes,) = collect(pool, 1).values()
        assert all(outcome.infrastructure for outcome in outcomes)
        assert pool.isolation() == Isolation(3, {f"remote sandbox {NOBODY}": "active"})
        pool.submit(1, [request])
        assert [outcome.infrastructure for outcome in collect(pool, 1)[1]] == [True]
        with pytest.raises(InfrastructureError, match=r"11 of the last 11 .* refused"):
            pool.poll(PATIENCE_SECONDS)


def test_faults_that_are_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "BREAKER_WINDOW", 3)
    monkeypatch.setattr(manager, "BREAKER_LIMIT", 1)
    bad = ScoreRequest(block("print(1)"), test_cases=TWO)
    good = ScoreRequest("no block", test_cases=TWO)
    with RewardPool(RewardSpec("code", 5.0, code_sandbox_url=NOBODY), 1) as pool:
        pool.submit(0, [bad, good, good, bad, good, good, bad, good, good])
        assert [outcome.infrastructure for outcome in collect(pool, 1)[0]] == [True, False, False] * 3
        pool.submit(1, [bad, bad])
        collect(pool, 1)
        with pytest.raises(InfrastructureError):
            pool.poll(PATIENCE_SECONDS)


def test_a_worker_that_does_not_keep_the_limit_is_a_fault_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "CODE_GRACE_SECONDS", 0.2)
    with RewardPool(RewardSpec("code", 0.2, min_isolation=0), 1) as pool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while pool.isolation() is None:
            assert time.monotonic() < deadline
            pool.poll(0.05)
        os.kill(pool._manager._workers[0].process._process.pid, signal.SIGSTOP)
        pool.submit(0, [ScoreRequest(block("print(1)"), test_cases=TWO)])
        (outcome,) = collect(pool, 1)[0]
    assert outcome.infrastructure
    assert not outcome.timed_out


def test_score_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"response": block(source), "test_cases": task.test_cases}
        for task in (PROGRAMS[0], FUNCTIONS[0])
        for source in (task.right, task.wrong, "while True: pass")
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "response": "none"}]))
    arguments = ["score", str(path), "--reward-type", "code", "--time-limit", "2", "--min-isolation", "0"]
    assert cli.main(arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    right, wrong = [{"reward": reward, "format_acc": 1.0, "ans_acc": reward / 10} for reward in (10.0, 0.0)]
    none = {"reward": 0.0, "format_acc": 0.0, "ans_acc": 0.0}
    assert lines == [*[right, wrong, {**wrong, "timed_out": True}] * 2, none]


@pytest.mark.parametrize(
    ("test_cases", "part"),
    [(None, "'test_cases' is missing"), ({"inputs": ["1"], "outputs": []}, "outputs is empty")],
)
def test_score_names_the_line_that_cannot_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], test_cases: Any, part: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"response": "x", "test_cases": TWO})
        + "\n"
        + json.dumps({"response": "x", "test_cases": test_cases})
    )
    assert cli.main(["score", str(path), "--reward-type", "code"]) == 2
    message = capsys.readouterr().err
    assert "rows.jsonl:2: " in message
    assert part in message
