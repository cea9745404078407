"""Whole runs with a trainer that is spread over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import events, metrics, run
from zbgrpo.engine.check_ledger import check_logs

LAYOUTS = {
    "zero-1": (3, "-t 2 -i 1 -zero 1 -tbs 2 -tMbs 2"),
    "zero-3": (3, "-t 2 -i 1 -zero 3 -tbs 2 -tMbs 2"),
    "tensor": (3, "-t 2 -i 1 -tp 2"),
    "pipeline": (3, "-t 2 -i 1 -pp 2"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_producers_generate_with_the_trainers_weights(workplace: Path, name: str) -> None:
    num_ranks, flags = LAYOUTS[name]
    finished = run(workplace, num_ranks, f"{flags} --max-steps 4 -p {name}")
    assert finished.status == 0, finished.output[-3000:]
    lines = metrics(workplace, name)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["rollout/logprob_gap"] < 1e-5 and all(line["train/grad_norm"] > 0 for line in lines)
    report = check_logs(workplace / "logs" / name)
    assert report.ok, str(report)
    live = [line for line in events(workplace, name, "rank-2") if line["kind"] == "live_digest"]
    assert {line["version"] for line in live} >= {0, 4} or len(live) > 2
