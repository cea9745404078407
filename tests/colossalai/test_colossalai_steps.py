"""Every layout of the ColossalAI trainer makes the steps of one rank of the torch trainer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.colossalai.training import Case, make_colossalai, share
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks
from tests.support.training import ALGORITHMS, differences, eight_groups, make_trainer, steps
from zbgrpo.trainer.layout import ALONE

TIMEOUT_SECONDS = 400.0
TOLERANCE = 1e-4
MODELS = {"qwen2, tied": ("qwen2", True), "qwen2": ("qwen2", False), "llama": ("llama", False)}
CASES = {
    "one rank": Case(),
    "tp 2": Case(tp=2),
    "pp 2": Case(pp=2),
    "dp 2": Case(dp=2),
    "zero 1": Case(dp=2, zero=1),
    "zero 2": Case(dp=2, zero=2),
    "tp 2 x pp 2": Case(tp=2, pp=2),
    "tp 2 x dp 2": Case(tp=2, dp=2),
    "pp 2 x dp 2": Case(pp=2, dp=2),
}


def base(kind: str) -> Any:
    """Adam makes a whole step of a gradient that is next to nothing, whose sign rounding decides, and a ratio next to
    the clip falls on either side of it. With this model, what other sums do to the update of a single rank stays far
    below the tolerance, so that the comparison tells something: 1e-5, where other models are at up to 6e-4."""
    family, tied = MODELS[kind]
    return tiny_model(family, tied=tied, seed=13)


def rank_main(rank: int, store: Any, names: list[str]) -> dict[Any, dict[str, float]]:
    """All cases of one number of ranks; the first rank compares."""
    errors: dict[Any, dict[str, float]] = {}
    for kind in MODELS:
        model = base(kind)
        groups = eight_groups(model)
        for preset, algorithm in ALGORITHMS.items():
            alone = None
            if rank == 0:
                alone = steps(make_trainer(model, algorithm, layout=ALONE), [groups[:4], groups[4:]])
            for name in names:
                layout = CASES[name].layout()
                trainer = make_colossalai(model, algorithm, CASES[name], layout)
                assert trainer.mesh == CASES[name][:3]
                found = steps(trainer, [share(groups[:4], layout), share(groups[4:], layout)])
                if alone is not None:
                    errors[name, kind, preset] = differences(found, alone, dict(model.named_parameters()))
    return errors


@pytest.fixture(scope="module")
def errors() -> dict[Any, dict[str, float]]:
    found: dict[Any, dict[str, float]] = {}
    for num_ranks in sorted({case.num_ranks for case in CASES.values()}):
        names = [name for name, case in CASES.items() if case.num_ranks == num_ranks]
        found |= run_ranks(num_ranks, rank_main, TIMEOUT_SECONDS, names)[0]
    return found


@pytest.mark.parametrize("preset", ALGORITHMS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_those_of_one_rank(errors: dict[Any, Any], name: str, kind: str, preset: str) -> None:
    found = errors[name, kind, preset]
    print(name, kind, preset, found)
    assert all(value < TOLERANCE for value in found.values()), found
