"""When a profile begins and ends, and what is in its file."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zbgrpo.observe.profiling import MAX_DECODE_STEPS, Profiler


def events_of(path: Path) -> list[dict[str, Any]]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace["traceEvents"]


def spans(path: Path) -> list[str]:
    return sorted({event["name"] for event in events_of(path) if event["name"].startswith("version ")})


def work(profiler: Profiler, versions: list[int]) -> None:
    """One unit of work per version, each with an operation that is found again by its name and size."""
    for version in versions:
        profiler.advance(version)
        with torch.profiler.record_function(f"unit at {version}"):
            torch.ones(8, 8) @ torch.ones(8, 8)


def units(path: Path) -> list[int]:
    names = [event["name"] for event in events_of(path) if event["name"].startswith("unit at ")]
    return sorted(int(name.rpartition(" ")[2]) for name in names)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace" / "rank-3.json.gz"


def test_consumer_profiles_the_steps_after_the_first(path: Path) -> None:
    profiler = Profiler(path, True, 2)
    work(profiler, [0, 1, 2])
    assert not path.exists() and not profiler.is_over
    work(profiler, [3, 4])
    assert profiler.is_over and path.exists(), "written as soon as its steps are over"
    assert spans(path) == ["version 1", "version 2"]
    assert units(path) == [1, 2]
    names = {event["name"] for event in events_of(path)}
    assert "aten::mm" in names or "aten::matmul" in names
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_several_entries_of_a_step_belong_to_it(path: Path) -> None:
    profiler = Profiler(path, True, 1)
    work(profiler, [5, 5, 6, 6, 6, 7])
    assert units(path) == [6, 6, 6] and spans(path) == ["version 6"]


def test_producer_waits_for_its_first_version_and_may_skip_some(path: Path) -> None:
    profiler = Profiler(path, True, 2, MAX_DECODE_STEPS)
    work(profiler, [-1, -1, 0, 0, 3, 3, 4, 8])
    assert units(path) == [3, 3, 4]


def test_the_number_of_decode_steps_is_bounded(path: Path) -> None:
    profiler = Profiler(path, True, 2, max_calls=4)
    work(profiler, [0, 1, 1, 1, 1, 1, 1])
    assert profiler.is_over and units(path) == [1, 1, 1, 1]


def test_a_run_with_fewer_steps_writes_what_there_is(path: Path) -> None:
    profiler = Profiler(path, True, 3)
    work(profiler, [0, 1])
    profiler.close()
    before = path.read_bytes()
    assert units(path) == [1]
    profiler.close()
    work(profiler, [2, 3])
    assert path.read_bytes() == before


@pytest.mark.parametrize("versions", [[], [-1, -1], [4, 4]])
def test_a_run_that_ends_in_the_warm_up_writes_nothing(path: Path, versions: list[int]) -> None:
    profiler = Profiler(path, True, 3)
    work(profiler, versions)
    profiler.close()
    assert not path.parent.exists()


def test_an_earlier_profile_is_replaced(path: Path) -> None:
    for version in (10, 20):
        profiler = Profiler(path, True, 1)
        work(profiler, [version, version + 1, version + 2])
        assert units(path) == [version + 1]


def test_off_costs_nothing_and_loads_nothing(path: Path) -> None:
    program = (
        "import sys; from zbgrpo.observe.profiling import Profiler; "
        f"p = Profiler({str(path)!r}, False, 3); [p.advance(n) for n in range(9)]; p.close(); "
        "print('torch' in sys.modules, p.is_over)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert not path.parent.exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    profiler = Profiler(tmp_path / "file" / "rank-0.json.gz", True, 1)
    with caplog.at_level(logging.WARNING):
        work(profiler, [0, 1, 2])
    assert profiler.is_over and "no profile is written" in caplog.text


def test_the_file_appears_as_a_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that fails half way leaves the earlier file and nothing else."""
    profiler = Profiler(path, True, 1)
    work(profiler, [0, 1, 2])
    before = path.read_bytes()

    def torn(self: Any, target: str) -> None:
        Path(target).write_text('{"traceEvents": [')
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", torn)
    work(Profiler(path, True, 1), [0, 1, 2])
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
