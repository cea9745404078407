"""Runs with what is off by default: an annealed temperature, profiles, programs as answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.launching import events, metrics, run, write_rows
from zbgrpo.engine.check_ledger import check_logs

CASES = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}


def test_temperature_falls_through_the_episode_and_both_roles_know_it(workplace: Path) -> None:
    """200 rows, 4 a step: by the 40th of 50 steps it is near its end. The gap would show any other temperature."""
    flags = "-t 1 -i 1 --max-staleness 0 --max-steps 40 -temp 1.2 inference.temperature_end=0.4 -p annealed"
    finished = run(workplace, 2, f"{flags} --enable_profiling observe.profiling_steps=2")
    assert finished.status == 0, finished.output[-3000:]
    lines = metrics(workplace, "annealed")
    temperatures = [line["rollout/temperature"] for line in lines]
    assert temperatures == sorted(temperatures, reverse=True)
    # The first step has rows 0 to 3 of 0 to 199.
    assert temperatures[0] == pytest.approx(1.2 - 0.8 * 1.5 / 199)
    assert temperatures[-1] == pytest.approx(1.2 - 0.8 * (156 + 1.5) / 199)
    assert all(line["rollout/logprob_gap"] < 1e-4 for line in lines)
    assert check_logs(workplace / "logs" / "annealed").ok
    for rank in range(2):
        with gzip.open(workplace / "logs" / "annealed" / "trace" / f"rank-{rank}.json.gz") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert "aten::mm" in names, f"rank {rank} has profiled nothing"


def test_programs_are_scored_in_a_sandbox_that_is_written_down(workplace: Path) -> None:
    rows = [{"content": f"double {n}", "extra": {"test_cases": CASES}} for n in range(16)]
    write_rows(workplace / "programs.jsonl", rows)
    finished = run(workplace, 2, "-d programs.jsonl -rt code -t 1 -i 1 --max-steps 2 -p programs -mnt 24")
    assert finished.status == 0, finished.output[-3000:]
    lines = metrics(workplace, "programs")
    assert [line["reward/mean"] for line in lines] == [0.0, 0.0]
    (sandbox,) = [line for line in events(workplace, "programs", "rank-1") if line["kind"] == "sandbox"]
    assert sandbox["level"] >= 1 and sandbox["mechanisms"]
    log = (workplace / "logs" / "programs" / "rank-1.log").read_text()
    assert f"isolation level {sandbox['level']}" in log


@pytest.mark.parametrize(
    ("extra", "reason"),
    [({}, "no test_cases"), ({"test_cases": {"inputs": ["1"], "outputs": []}}, "outputs")],
    ids=["none", "unequal"],
)
def test_a_row_that_cannot_be_scored_is_named_before_anything_starts(
    workplace: Path, extra: dict[str, object], reason: str
) -> None:
    write_rows(
        workplace / "bad.jsonl", [{"content": "1", "extra": {"test_cases": CASES}}, {"content": "2", "extra": extra}]
    )
    finished = run(workplace, 2, "-d bad.jsonl -rt code -t 1 -i 1 -p bad")
    assert finished.status != 0
    assert "DataError: bad.jsonl:2: " in finished.first_line and reason in finished.first_line, finished.output
