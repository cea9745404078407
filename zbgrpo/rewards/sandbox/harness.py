"""The program that runs a solution's functions, or programs that test it, in a sandbox: a text, run by nobody here.

Two processes. The first holds the tests and writes the only line of standard output; it cannot be looked into. The
second, forked from it before it has read anything, runs the solution and does what it is asked: import, call, read an
attribute. Between them goes plain data alone, so what a solution does to its own interpreter (exits, patched modules,
objects that equal everything, walks through frames) stays there; what it prints goes to standard error.

Values on the way are JSON for None, truth values, numbers and text, and otherwise a list whose first element says what
it is: `list`, `tuple`, `set`, `frozenset`, `dict` (of pairs), `complex`, `bytes`, `module`, or `object` for one that
stays where it is and is used through its number. Subclasses of these types count as what they extend, except classes
of the solution itself. Numbers of numpy count as numbers.

The tests take names from the solution that they use, and none of Python's own, or a solution could bring its own `abs`;
unless they use no other, because then that is what it had to write. Modules: a few that only define things.
"""

from __future__ import annotations

import json
from typing import Any, Optional

import msgspec


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line that the harness writes: one of these."""

    token: str
    passed: bool = False
    """Every call returned, or every test program ended."""
    results: list[Any] = []
    """What the calls returned, not decoded; it comes from the solution."""
    error: str = ""
    """For people: why not passed."""
    refused: str = ""
    """Why the harness could not do its work; nothing of the solution had run."""


def calls_task(token: str, solution: str, setup: str, fn_name: str, calls: list[list[Any]]) -> bytes:
    """Standard input of `HARNESS`: call a function of the solution, or method of its class `Solution`, with each."""
    return _task(token=token, solution=solution, setup=setup, fn_name=fn_name, calls=calls, programs=None)


def asserts_task(token: str, solution: str, setup: str, programs: list[str]) -> bytes:
    """Standard input of `HARNESS`: run test programs on the names of the solution."""
    return _task(token=token, solution=solution, setup=setup, fn_name=None, calls=None, programs=programs)


def read_verdict(stdout: bytes, token: str) -> Optional[Verdict]:
    """What the harness says; None if this is anything but the one line of the harness that was given this token."""
    try:
        # Not msgspec: results may hold NaN and infinity, as Python writes them.
        verdict = msgspec.convert(json.loads(stdout), Verdict)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    return verdict if verdict.token == token else None


def _task(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


HARNESS = r'''
import builtins
import ctypes
import importlib
import json
import os
import signal
import sys
import types
import typing

PR_SET_DUMPABLE = 4
LONGEST_REPLY = 1 << 26
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# No others: importing unittest.__main__ runs every file in the current folder whose name begins with "test".
MODULES = {
    "bisect", "cmath", "collections", "collections.abc", "copy", "datetime", "decimal", "fractions", "functools",
    "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "time",
}


class Lost(BaseException):
    """The solution's process has ended or broken the protocol. No test can catch this and go on."""


def encode(value, refer):
    if value is None or value is True or value is False:
        return value
    if type(value).__module__ != "solution":
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", bytes(value).decode("latin-1")]
        for kind, base in SEQUENCES.items():
            if isinstance(value, base):
                return [kind] + [encode(item, refer) for item in base.__iter__(value)]
        if isinstance(value, dict):
            return ["dict"] + [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        number = number_of_numpy(value)
        if number is not None:
            return encode(number, refer)
    return ["object", refer(value)]


def number_of_numpy(value):
    is_number = isinstance(value, getattr(sys.modules.get("numpy"), "generic", ()))
    return value.item() if is_number and type(value.item()) in (bool, int, float, complex) else None


def decode(value, resolve):
    if not isinstance(value, list):
        return value
    kind, items = value[0], value[1:]
    if kind in SEQUENCES:
        return SEQUENCES[kind]([decode(item, resolve) for item in items])
    if kind == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in items}
    if kind == "complex":
        return complex(*items)
    if kind == "bytes":
        return items[0].encode("latin-1")
    if kind == "module":
        return importlib.import_module(items[0]) if items[0] in MODULES else None
    if kind == "object":
        return resolve(items[0])
    raise ValueError("no value of this kind: " + repr(kind))


# ---------------------------------------------------------------------------- the solution's process

TYPING = {name: getattr(typing, name) for name in typing.__all__}


def load(module, setup, solution):
    vars(module).update(TYPING, exit=sys.exit, quit=sys.exit)
    exec(compile(setup, "<setup>", "exec", dont_inherit=True), vars(module))
    exec(compile(solution, "<solution>", "exec", dont_inherit=True), vars(module))


def invoke(module, name, arguments):
    owner = vars(module).get("Solution")
    if isinstance(owner, type) and hasattr(owner, name):
        return getattr(owner(), name)(*arguments)
    return vars(module)[name](*arguments)


def find(module, names):
    found = {name: vars(module)[name] for name in names if name in vars(module)}
    return {name: value for name, value in found.items() if value is not TYPING.get(name, module)}


def special(module, value, name, arguments):
    method = getattr(type(value), name, None)
    if method is None:
        raise TypeError(type(value).__name__ + " has no " + name)
    return method(value, *arguments)


OPERATIONS = {
    "load": load,
    "invoke": invoke,
    "find": find,
    "call": lambda module, function, arguments, keywords: function(*arguments, **keywords),
    "get": lambda module, value, name: getattr(value, name),
    "set": lambda module, value, name, item: setattr(value, name, item),
    "contains": lambda module, value, item: item in value,
    "special": special,
}


def serve(incoming, outgoing):
    module = sys.modules["solution"] = types.ModuleType("solution")
    objects, numbers = [], {}
    loads, dumps = json.loads, json.dumps

    def refer(value):
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    for line in incoming:
        try:
            name, arguments = decode(loads(line), objects.__getitem__)
            reply = dumps(["returned", encode(OPERATIONS[name](module, *arguments), refer)])
        except BaseException as error:
            try:
                text = str(error)[:1000]
            except BaseException:
                text = ""
            reply = dumps(["raised", [kind.__name__ for kind in type(error).__mro__], text])
        outgoing.write(reply + "\n")
        outgoing.flush()


# ------------------------------------------------------------------------------- the tests' process

class Solution:
    """The other process, as the tests see it."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing = incoming, outgoing
        self.lost = False
        self.objects = {}

    def request(self, name, *arguments):
        return self.exchange(name, arguments, lambda value: decode(value, self.resolve))

    def exchange(self, name, arguments, read):
        message = json.dumps(encode([name, list(arguments)], self.refer))
        try:
            self.outgoing.write(message + "\n")
            self.outgoing.flush()
            reply = json.loads(self.incoming.readline(LONGEST_REPLY))
            if reply[0] == "returned":
                return read(reply[1])
            error = exception(*reply[1:])
        except Exception as failure:
            self.lost = True
            raise Lost("the process of the solution ended or broke the protocol: %r" % (failure,))
        if error is None:
            self.lost = True
            raise Lost("the solution raised " + str(reply[1][:1]))
        raise error

    def resolve(self, number):
        if number not in self.objects:
            self.objects[number] = Remote(self, number)
        return self.objects[number]

    def refer(self, value):
        if type(value) is Remote:
            return object.__getattribute__(value, "number")
        raise TypeError("a test hands plain data and the solution's own objects over, but no " + type(value).__name__)


class Remote:
    """An object of the solution, which stays in its process. It equals nothing but itself."""

    def __init__(self, solution, number):
        object.__setattr__(self, "request", solution.request)
        object.__setattr__(self, "number", number)

    def __call__(self, *arguments, **keywords):
        return ask(self, "call", arguments, keywords)

    def __getattribute__(self, name):
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return ask(self, "get", name)

    def __setattr__(self, name, item):
        ask(self, "set", name, item)

    def __contains__(self, item):
        return ask(self, "contains", item)

    def __bool__(self):
        return True


def ask(remote, name, *arguments):
    return object.__getattribute__(remote, "request")(name, remote, *arguments)


def forward(name):
    setattr(Remote, name, lambda self, *arguments: ask(self, "special", name, arguments))


for name in ("__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__delitem__", "__str__", "__repr__"):
    forward(name)


def exception(names, text):
    """The nearest built-in exception, or None if it is none that a program may catch by accident."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:
                continue
    return None


def run_calls(solution, task):
    name = task["fn_name"]
    return [solution.exchange("invoke", (name, arguments), lambda value: value) for arguments in task["calls"]]


def run_programs(solution, task):
    for program in task["programs"]:
        names = names_to_find(task["setup"] + "\n" + program)
        found = solution.request("find", names)
        namespace = {**TYPING, "__name__": "tests", **{name: found[name] for name in names if name in found}}
        for text, place in ((task["setup"], "<setup>"), (program, "<assert>")):
            exec(compile(text, place, "exec", dont_inherit=True, optimize=0), namespace)
    return []


def names_to_find(tests):
    import ast

    used, bound = set(), set()
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        else:
            bound.add(getattr(node, "name", None))  # of a function, a class, an exception that is caught
    found = used - set(dir(builtins))
    return sorted(found if found - bound - set(TYPING) else used)


def judge(solution, task):
    verdict = {"token": task["token"]}
    try:
        solution.request("load", task["setup"], task["solution"])
        verdict["results"] = (run_programs if task["programs"] else run_calls)(solution, task)
        verdict["passed"] = not solution.lost
    except BaseException as error:
        verdict["error"] = (type(error).__name__ + ": " + str(error))[:1000]
    return verdict


def set_dumpable(value):
    return ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) == 0


def become_solution(read_requests, write_replies, path):
    try:
        os.close(answer)
        sys.path[:] = path
        set_dumpable(1)
        nothing, end = os.pipe()
        os.close(end)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        serve(os.fdopen(read_requests, "r"), os.fdopen(write_replies, "w"))
    finally:
        os._exit(0)


def is_beside_solution(folder):
    """Whether the solution can put modules there, and so into the process of the tests."""
    own = [os.path.realpath(place) for place in (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))]
    return any((os.path.realpath(folder) + "/").startswith(place.rstrip("/") + "/") for place in own)


def read_task():
    return json.loads(sys.stdin.buffer.read())


def main():
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if not is_beside_solution(entry)]
    hidden = set_dumpable(0)  # before the fork, so that there is no moment at which it can be looked into
    read_requests, write_requests = os.pipe()
    read_replies, write_replies = os.pipe()
    try:
        solution_pid = os.fork()
    except OSError as error:
        return {"token": read_task()["token"], "refused": "no second process: " + str(error)}
    if solution_pid == 0:
        os.close(write_requests)
        os.close(read_replies)
        become_solution(read_requests, write_replies, path)
    os.close(read_requests)
    os.close(write_replies)
    task = read_task()
    if task["programs"] and not hidden:
        return {"token": task["token"], "refused": "the tests cannot be hidden from the solution"}
    verdict = judge(Solution(os.fdopen(read_replies, "r"), os.fdopen(write_requests, "w")), task)
    os.kill(solution_pid, signal.SIGKILL)
    os.waitpid(solution_pid, 0)
    return verdict


answer = os.dup(1)
os.dup2(2, 1)  # what a test program prints
line = json.dumps(main()).encode() + b"\n"
while line:
    line = line[os.write(answer, line):]
os._exit(0)
'''
"""Reads a task, writes a verdict. Needs Python 3.8 and nothing but the standard library."""
