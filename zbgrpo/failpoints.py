"""Named places at which a test can make a process fail: kill it, stop it, delay it, raise, damage what it holds.

Nothing is armed unless the launcher's environment says so (`ZBGRPO_FAILPOINTS`), and a place that is not armed costs
one look at an empty dictionary. What is armed is text, rules separated by semicolons:

    NAME[#COUNT][@WHO]=ACTION[:ARGUMENT][!ONCE]

NAME is one of `PLACES`. COUNT: only when it is reached for that time (1). WHO: only in that process (`consumer:0`,
`producer:1`, `hub`, `relay:1`, `reward`; all if left out). ONCE: a file; only by the process that creates it, so that
a restarted run does not fail again. ACTION is

    kill             SIGKILL to itself                     stop      SIGSTOP to itself
    delay:SECONDS    sleep                                 raise:X   OSError with that errno, or that class of errors
    corrupt          the place damages what it holds       note:FILE append a line with name and process
    hold:FILE        create the file, then wait until FILE.go is there (two minutes at most)

Example: `step.commit#3@consumer:1=kill` kills the second consumer when it is about to commit its third step.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Optional

from zbgrpo import errors
from zbgrpo.errors import ConfigError, ZbgrpoError

PLACES = {
    "init.world": "every rank: has joined the world group",
    "init.hub": "hub and relays: have opened socket and ring, and told nobody yet",
    "init.model": "every rank: has loaded its model",
    "init.ready": "every rank: is about to meet the others for the first time with all parts made",
    "hub.grant": "hub: has granted leases, not sent yet",
    "hub.deliver": "hub: is about to take a group from a message",
    "hub.plan": "hub: has planned an entry, not published yet",
    "hub.commit": "hub: is about to account for a committed step",
    "hub.snapshot": "hub: is about to send its state for a checkpoint",
    "lease.start": "producer: has got a training lease",
    "generate.step": "producer: is about to decode a token in every occupied slot",
    "reward.submit": "producer: is about to hand a group to the reward workers",
    "reward.score": "reward worker: is about to score a response",
    "send.groups": "producer: has logged finished groups, not sent yet",
    "wire.send": "every rank: has encoded a message (corrupt: flips a bit of its last part)",
    "wire.receive": "hub and relays: have received a message (corrupt: flips a bit of its last part)",
    "ring.write": "hub and relays: are about to write groups into the ring (corrupt: flips a bit in them)",
    "ring.read": "consumer: is about to copy groups out of the ring",
    "step.minibatch": "consumer: is about to train a minibatch",
    "step.gradients": "consumer: has its gradients of a step, not added up yet (corrupt: they become NaN)",
    "step.commit": "consumer: is about to commit a step, together with the others",
    "step.committed": "consumer: has committed a step, and told nobody yet",
    "weights.publish": "source consumer: is about to copy the weights of a new version",
    "weights.broadcast": "source consumer: has announced a version, sent nothing yet (corrupt: its digest is wrong)",
    "weights.receive": "producer: is about to join the broadcast of a version",
    "weights.apply": "producer: is about to generate with a new version",
    "checkpoint.write": "every rank: has written a file of a save",
    "checkpoint.fsync": "every rank: has synced a file or folder of a save",
    "checkpoint.rename": "every rank: has renamed a file or folder of a save",
    "checkpoint.state": "consumer: is about to save a state",
    "checkpoint.model": "consumer: is about to save the model",
    "evaluation.row": "producer: has got an evaluation lease",
    "evaluation.result": "producer: is about to send an evaluated row",
    "shutdown.producer": "producer: has left its loop",
    "shutdown.consumer": "consumer: has left its loop",
    "shutdown.hub": "hub: has heard that everything has ended, and is about to let producers go",
}

_ACTIONS = ("kill", "stop", "delay", "raise", "corrupt", "note", "hold")
_HOLD_SECONDS = 120.0
_RULE = re.compile(r"([a-z.]+)(?:#(\d+))?(?:@([a-z]+(?::\d+)?))?=([a-z]+)(?::([^!]*))?(?:!(.*))?")


@dataclass
class _Rule:
    text: str
    count: int
    action: str
    argument: str
    once: Optional[Path]
    reached: int = 0


_armed: dict[str, list[_Rule]] = {}
_lock = threading.Lock()
_process = ""
_text = ""


def arm(text: str, process: str) -> None:
    """Arm the rules for this process, in place of earlier ones. Raises `ConfigError` for a rule that means nothing."""
    global _process, _text
    _armed.clear()
    _process, _text = process, text
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        found = _RULE.fullmatch(part)
        if found is None:
            raise ConfigError(f"ZBGRPO_FAILPOINTS: {part!r} is not NAME[#COUNT][@WHO]=ACTION[:ARGUMENT][!ONCE]")
        name, count, who, action, argument, once = found.groups()
        if name not in PLACES:
            near = get_close_matches(name, PLACES, 1, 0.0)[0]
            raise ConfigError(f"ZBGRPO_FAILPOINTS: there is no place {name!r}; did you mean {near}?")
        if action not in _ACTIONS:
            raise ConfigError(f"ZBGRPO_FAILPOINTS: {part!r}: the action is one of {', '.join(_ACTIONS)}")
        if who is None or who in (process, process.partition(":")[0]):
            rule = _Rule(part, int(count or 1), action, argument or "", Path(once) if once else None)
            _armed.setdefault(name, []).append(rule)


def armed_text() -> str:
    """What `arm` was given: for a process that this one starts."""
    return _text


def fire(name: str) -> bool:
    """The process is at this place. True if what it holds here is to be damaged."""
    if not _armed:
        return False
    corrupt = False
    for rule in _armed.get(name, ()):
        with _lock:
            rule.reached += 1
            due = rule.reached == rule.count or rule.action == "note"
        if due and (rule.once is None or _first(rule.once)):
            corrupt = _act(name, rule) or corrupt
    return corrupt


def damaged(name: str, data: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    """The data of this place: as it is, or a copy in which one bit is another if it is to be damaged."""
    if not _armed or not fire(name) or len(data) == 0:
        return data
    copy = bytearray(data)
    copy[len(copy) // 2] ^= 0x10
    return copy


def _first(marker: Path) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _act(name: str, rule: _Rule) -> bool:
    if rule.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rule.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rule.action == "delay":
        time.sleep(float(rule.argument))
    elif rule.action == "raise":
        raise _error(rule)
    elif rule.action == "note":
        with open(rule.argument, "a", encoding="utf-8") as file:
            file.write(f"{name} {_process}\n")
    elif rule.action == "hold":
        _hold(Path(rule.argument))
    return rule.action == "corrupt"


def _error(rule: _Rule) -> Exception:
    number = getattr(errno, rule.argument, None)
    if isinstance(number, int):
        return OSError(number, os.strerror(number))
    kind = getattr(errors, rule.argument, None)
    text = f"failpoint {rule.text}"
    return kind(text) if isinstance(kind, type) and issubclass(kind, ZbgrpoError) else RuntimeError(text)


def _hold(reached: Path) -> None:
    reached.write_text(f"{os.getpid()}\n", encoding="utf-8")
    released, deadline = reached.with_name(reached.name + ".go"), time.monotonic() + _HOLD_SECONDS
    while not released.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
