"""Event logs: whole lines, torn tails, moving later lines aside."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from zbgrpo.errors import RunFolderError
from zbgrpo.observe import events, jsonl
from zbgrpo.observe.events import EventLog, read_events, void_later, void_path
from zbgrpo.types import DropReason, Uid


def log_of(path: Path, *steps: int) -> None:
    log = EventLog(path, clock=lambda: 5.0)
    for step in steps:
        log.append("commit", step=step)
    log.close()


def steps_of(path: Path) -> list[int]:
    return [event["step"] for event in read_events(path)]


def test_events_come_back_in_order_with_engine_types(tmp_path: Path) -> None:
    path = tmp_path / "events" / "hub.jsonl"
    log = EventLog(path, clock=lambda: 12.5)
    log.append("dropped", uid=Uid(0, 17), reason=DropReason.END, count=np.int64(3), share=np.float32(0.5))
    log.append("odd", value=float("nan"), ids=np.arange(2), where=tmp_path)
    log.close()
    assert read_events(path) == [
        {"kind": "dropped", "time": 12.5, "uid": [0, 17], "reason": "end", "count": 3, "share": 0.5},
        {"kind": "odd", "time": 12.5, "value": None, "ids": [0, 1], "where": str(tmp_path)},
    ]


def test_a_batch_is_one_write_and_waits_for_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    real_write = os.write
    monkeypatch.setattr(jsonl.os, "write", lambda fd, data: writes.append(len(data)) or real_write(fd, data))
    path = tmp_path / "hub.jsonl"
    log = EventLog(path)
    for step in range(100):
        log.append("commit", step=step)
    assert path.read_bytes() == b""
    log.flush()
    log.flush()
    assert len(writes) == 1
    assert steps_of(path) == list(range(100))
    for _ in range(3000):  # beyond the buffer, it does not wait for ever
        log.append("commit", step=0)
    assert len(writes) > 1
    log.close()


def test_a_full_disk_loses_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    budget = [10]

    def short_write(descriptor: int, data: bytes) -> int:
        if budget[0] == 0:
            raise OSError(28, "No space left on device")
        size = min(budget[0], len(data))
        budget[0] -= size
        return real_write(descriptor, bytes(data[:size]))

    path = tmp_path / "hub.jsonl"
    log = EventLog(path)
    log.append("commit", step=1)
    with monkeypatch.context() as patch:
        patch.setattr(jsonl.os, "write", short_write)
        with pytest.raises(OSError, match="No space"):
            log.flush()
    log.append("commit", step=2)
    log.close()
    assert steps_of(path) == [1, 2]


def test_threads_never_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    log = EventLog(path)

    def work(thread: int) -> None:
        for number in range(300):
            log.append("x", thread=thread, number=number)
            if number % 7 == 0:
                log.flush()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    found = read_events(path)
    for thread in range(4):
        assert [event["number"] for event in found if event["thread"] == thread] == list(range(300))


def test_append_after_close_is_an_error(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.append("x")


@pytest.mark.parametrize("tail", [b'{"kind":"commit","st', b'{"kind":"commit","step":3}', b"\x00\x00\x00\n"])
def test_torn_last_line_is_dropped_and_reported(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "hub.jsonl"
    log_of(path, 1, 2)
    with open(path, "ab") as file:
        file.write(tail)
    reports: list[str] = []
    assert [event["step"] for event in read_events(path, reports.append)] == [1, 2]
    assert len(reports) == 1
    assert f"hub.jsonl:3: torn last line dropped ({len(tail)} bytes)" in reports[0]


def test_a_bad_line_in_the_middle_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "hub.jsonl"
    path.write_bytes(b'{"step":1}\n[2]\n{"step":3}\n')
    with pytest.raises(RunFolderError, match=r"hub\.jsonl:2"):
        read_events(path)


@pytest.mark.parametrize("length", [5, 200_000])
def test_opening_cuts_a_torn_line(tmp_path: Path, length: int) -> None:
    path = tmp_path / "hub.jsonl"
    log_of(path, 1)
    with open(path, "ab") as file:
        file.write(b"{" * length)
    log_of(path, 2)
    assert steps_of(path) == [1, 2]
    path.write_bytes(b"{" * length)  # nothing but a torn line
    log_of(path, 3)
    assert steps_of(path) == [3]


def test_void_later_moves_lines_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "hub.jsonl"
    path.write_bytes(b'{"step": 1, "x": 1.50}\n{"step":3}\n{"step":2}\n{"step": 4}\n{"torn')
    assert void_later(path, lambda event: event["step"] <= 2, "void-2") == 2
    assert path.read_bytes() == b'{"step": 1, "x": 1.50}\n{"step":2}\n'
    assert void_path(path, "void-2").read_bytes() == b'{"step":3}\n{"step": 4}\n'
    assert {p.name for p in tmp_path.iterdir()} == {"hub.jsonl", "hub.jsonl.void-2"}
    assert list(tmp_path.glob("*.jsonl")) == [path]


def test_void_later_with_nothing_to_do(tmp_path: Path) -> None:
    path = tmp_path / "hub.jsonl"
    assert void_later(path, lambda event: False, "void-0") == 0
    log_of(path, 1, 2)
    before = path.read_bytes()
    assert void_later(path, lambda event: True, "void-9") == 0
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["hub.jsonl"]


def test_void_later_adds_to_an_earlier_void_file(tmp_path: Path) -> None:
    path = tmp_path / "hub.jsonl"
    log_of(path, 1, 2, 3)
    void_later(path, lambda event: event["step"] <= 1, "void-1")
    log_of(path, 2, 5)
    assert void_later(path, lambda event: event["step"] <= 1, "void-1") == 2
    assert steps_of(void_path(path, "void-1")) == [2, 3, 2, 5]


@pytest.mark.parametrize("crash_at", [0, 1])
def test_void_later_survives_a_crash_before_either_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    path = tmp_path / "hub.jsonl"
    log_of(path, 1, 2, 3)
    calls = []

    def dying_replace(target: Path, data: bytes) -> None:
        calls.append(target)
        if len(calls) > crash_at:
            raise KeyboardInterrupt
        jsonl.replace_file(target, data)

    with monkeypatch.context() as patch:
        patch.setattr(events, "replace_file", dying_replace)
        with pytest.raises(KeyboardInterrupt):
            void_later(path, lambda event: event["step"] <= 1, "void-1")
    assert steps_of(path) == [1, 2, 3]
    assert void_later(path, lambda event: event["step"] <= 1, "void-1") == 2
    assert steps_of(path) == [1]
    assert steps_of(void_path(path, "void-1")) == [2, 3]


def test_replace_file_leaves_the_old_content_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")

    def fail(source: Path, target: Path) -> None:
        raise OSError("no")

    monkeypatch.setattr(jsonl.os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        jsonl.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
