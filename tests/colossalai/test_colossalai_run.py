"""A whole run that trains with ColossalAI."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.launching import Run, events, make_workplace, metrics
from zbgrpo.engine.check_ledger import check_logs

LAYOUTS = {"tensor": "-tp 2", "pipeline": "-pp 2"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("colossalai"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_producers_generate_with_its_weights(workplace: Path, name: str) -> None:
    """Consumers under this interpreter, the launcher and the producer under one with the newer transformers."""
    python = os.environ.get("ZBGRPO_TEST_PYTHON")
    if python is None:
        pytest.skip("ZBGRPO_TEST_PYTHON names no interpreter for producers; bash launch/test.sh --colossalai does")
    flags = f"-t 2 -i 1 --trainer colossalai --consumer-python {sys.executable} {LAYOUTS[name]} --max-steps 3 -p {name}"
    finished = Run(workplace, 3, flags, python=python).wait()
    assert finished.status == 0, finished.output[-3000:]
    lines = metrics(workplace, name)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["rollout/logprob_gap"] < 1e-5
    assert check_logs(workplace / "logs" / name).ok
    assert [line for line in events(workplace, name, "rank-2") if line["kind"] == "live_digest"]
