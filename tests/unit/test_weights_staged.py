"""Weights of several stages: a version is used when all of them have it, and only then."""

from __future__ import annotations

import threading
from typing import Any

from zbgrpo.weights.staged import StagedSubscriber
from zbgrpo.weights.subscriber import Incoming


class Stage:
    """A subscriber whose shadow copy the test fills."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.incoming: Incoming | None = None
        self.applied_version = -1
        self.expected: list[tuple[int, bool]] = []
        self.closed = False

    def expect(self, version: int, keep: bool = False) -> None:
        self.expected.append((version, keep))

    def ready(self) -> Incoming | None:
        return self.incoming

    def held(self) -> Any:
        return self.lock

    def apply(self) -> Incoming | None:
        incoming, self.incoming = self.incoming, None
        assert incoming is not None
        self.applied_version = incoming.version
        return incoming

    def close(self) -> None:
        self.closed = True


def staged(*stages: Stage) -> StagedSubscriber:
    return StagedSubscriber(stages)  # type: ignore[arg-type]


def test_the_example_of_the_module() -> None:
    first, second = Stage(), Stage()
    both = staged(first, second)
    first.incoming, second.incoming = Incoming(4, "a4"), Incoming(3, "b3")
    assert both.ready() is None and both.apply() is None
    assert (first.applied_version, second.applied_version) == (-1, -1), "half a version was used"
    second.incoming = Incoming(4, "b4")
    assert both.ready() == Incoming(4, "a4+b4")
    first.incoming = Incoming(5, "a5")
    assert both.ready() is None
    second.incoming = Incoming(5, "b5", keep=True)
    assert both.apply() == Incoming(5, "a5+b5", keep=True)
    assert first.applied_version == second.applied_version == both.applied_version == 5
    assert both.ready() is None


def test_nothing_is_ready_while_a_stage_has_nothing() -> None:
    first, second = Stage(), Stage()
    first.incoming = Incoming(0, "a")
    assert staged(first, second).apply() is None and first.incoming is not None


def test_an_arrival_between_looking_and_applying_waits() -> None:
    """What is READY is held while it is applied, on every stage."""
    first, second = Stage(), Stage()
    first.incoming = second.incoming = Incoming(1, "x")
    held: list[bool] = []

    def try_to_overwrite() -> None:
        for stage in (first, second):
            held.append(not stage.lock.acquire(blocking=False))

    original = second.apply

    def apply() -> Incoming | None:
        thread = threading.Thread(target=try_to_overwrite)
        thread.start()
        thread.join()
        return original()

    second.apply = apply  # type: ignore[method-assign]
    assert staged(first, second).apply() == Incoming(1, "x+x")
    assert held == [True, True]


def test_one_stage_is_itself() -> None:
    only = Stage()
    one = staged(only)
    one.expect(0, 7, True)
    only.incoming = Incoming(7, "digest", keep=True)
    assert only.expected == [(7, True)] and one.ready() == only.incoming
    one.close()
    assert only.closed
