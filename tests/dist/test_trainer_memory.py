"""What `--dry-run` says a consumer rank needs is what ranks do need: an optimizer step of a model of 98 million
parameters under every layout, by the kernel's count of resident memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.memory import ALLOCATOR, Case, measure
from tests.support.ranks import run_ranks
from zbgrpo.config.memory import estimate
from zbgrpo.config.model_size import read_model_size

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of resident memory is read from /proc"),
]

TIMEOUT_SECONDS = 800.0
TOLERANCE = 0.15
COMING_AND_GOING = 0.3
"""Of what is not there all the time: activations, gradients, gathered weights. A part that is left out shows here."""

CASES = {
    "zero 0": Case(dp=2),
    "zero 1": Case(dp=2, zero=1),
    "zero 2": Case(dp=2, zero=2),
    "zero 3": Case(dp=2, zero=3),
    "tp 2": Case(tp=2),
    "bf16, reference": Case(dp=2, precision="bf16", kl=True),
}


def measure_all(rank: int, store: Any, names: list[str]) -> dict[str, dict[str, int]]:
    """A small case first: what libraries load and keep at their first use is not the model's."""
    measure(Case(dp=2, layers=1, response=16))
    return {name: measure(CASES[name]) for name in names}


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, int]]]:
    """Of both ranks; the first is the source."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALLOCATOR.items():
            patch.setenv(name, value)
        ranks = run_ranks(2, measure_all, TIMEOUT_SECONDS, list(CASES))
    return {name: [found[name] for found in ranks] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_takes_what_the_dry_run_says(
    measured: dict[str, list[dict[str, int]]], name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    case.write_headers(tmp_path)
    size = read_model_size(str(tmp_path))
    assert size is not None and 90e6 < size.num_parameters < 110e6
    expected = estimate(case.config, size)
    source, other = measured[name]
    peak = max(source.values())
    print(f"{name}: estimated {expected.device_bytes / 2**20:.0f} MiB, measured {peak / 2**20:.0f} MiB; {expected}")
    assert expected.device_bytes == pytest.approx(peak, rel=TOLERANCE)
    # What is there all the time is known to the byte, so that what comes and goes is held to its own size.
    assert expected.device_bytes - source["state"] == pytest.approx(peak - source["state"], rel=COMING_AND_GOING)
    (snapshots,) = (part.num_bytes for part in expected.on_device if part.what == "two snapshots")
    assert expected.device_bytes - snapshots == pytest.approx(max(other.values()), rel=TOLERANCE)
