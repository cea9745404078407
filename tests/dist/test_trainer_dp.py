"""Two data-parallel ranks, as real processes: the same step as one rank makes, whatever each of them holds."""

from __future__ import annotations

import copy
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.training import (
    ALGORITHMS,
    DAPO,
    GRPO,
    MINIBATCHES,
    VERSION,
    base_model,
    commit_without_update,
    eight_groups,
    gradient_by_definition,
    make_trainer,
    relative_error,
    train,
)
from zbgrpo.errors import NonFiniteError
from zbgrpo.types import FinishReason, GroupPayload

TIMEOUT_SECONDS = 120.0
MICROBATCHES = [1, 2, 8, 64]


def shares(groups: list[GroupPayload]) -> list[list[GroupPayload]]:
    """What each rank trains: not the same number of groups, responses or tokens."""
    return [groups[:3], groups[3:]]


def rank_main(rank: int, store: Any, groups: list[GroupPayload], folder: str) -> dict[str, Any]:
    """All that two ranks do, in one go: starting processes is the slow part."""
    world, model, mine = dist.group.WORLD, base_model(), shares(groups)[rank]
    found: dict[str, Any] = {"gradients": {}}
    for name, algorithm in ALGORITHMS.items():
        for microbatch in MICROBATCHES:
            for kind, split in MINIBATCHES.items():
                trainer = make_trainer(model, algorithm, microbatch=microbatch, group=world)
                train(trainer, split(mine))
                gradient, result = commit_without_update(trainer)
                found["gradients"][name, microbatch, kind] = gradient.numpy(), result._asdict()
    found["mesh"] = tuple(trainer.mesh)
    found["one rank idle"] = idle_rank(rank, model, groups)
    found["abandoned"] = abandoned(rank, model, groups)
    found["one rank broken"] = broken_rank(rank, model, groups)
    found["restored"] = [
        restore(rank, copy.deepcopy(model).to(dtype), groups, Path(folder) / str(dtype)) for dtype in DTYPES
    ]
    return found


DTYPES = [torch.float32, torch.bfloat16]


def idle_rank(rank: int, model: Any, groups: list[GroupPayload]) -> tuple[np.ndarray, dict[str, float]]:
    """Rank 1 has nothing to train in this step, yet takes part in it."""
    trainer = make_trainer(model, GRPO, group=dist.group.WORLD)
    train(trainer, [groups] if rank == 0 else [])
    gradient, result = commit_without_update(trainer)
    return gradient.numpy(), result.sums


def broken_rank(rank: int, model: Any, groups: list[GroupPayload]) -> dict[str, Any]:
    """Rank 1 alone has a loss that is not finite, five times: both skip, and both end."""
    bad = groups[0]._replace(
        logprobs=np.full_like(groups[0].logprobs, math.nan),
        spans=np.array([[i, 0, VERSION] for i in range(groups[0].num_responses)], np.int32),
        finish=np.full_like(groups[0].finish, FinishReason.END_TOKEN),
    )
    trainer = make_trainer(model, DAPO, group=dist.group.WORLD)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    skipped, error = [], ""
    try:
        for _ in range(5):
            train(trainer, [[groups[1]], [groups[1] if rank == 0 else bad]])
            skipped.append(trainer.commit().skipped)
    except NonFiniteError as raised:
        error = str(raised)
    same = all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    return {"skipped": skipped, "error": error, "same": same}


def abandoned(rank: int, model: Any, groups: list[GroupPayload]) -> dict[str, Any]:
    """Rank 1 has left work out: the step has not happened on either rank, and the next one is as if it never had."""
    trainer, other = (make_trainer(model, GRPO, group=dist.group.WORLD) for _ in range(2))
    train(trainer, [shares(groups[:4])[rank]] if rank == 0 else [])
    results = [trainer.commit(abandon=rank == 1)]
    for each in (trainer, other):
        train(each, [shares(groups[4:])[rank]])
        results.append(each.commit())
    pairs = zip(trainer.model.parameters(), other.model.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs) and results[1] == results[2]
    return {"happened": results[0] is not None, "same": same}


def restore(rank: int, model: Any, groups: list[GroupPayload], folder: Path) -> dict[str, Any]:
    """Two updates, a state, another update; and that update again by a trainer that began with the state."""
    trainer = make_trainer(model, GRPO, group=dist.group.WORLD)
    for step in range(2):
        train(trainer, [shares(groups[step : step + 5])[rank]])
        trainer.commit()
    trainer.save_state(folder)
    dist.barrier()
    stranger = make_trainer(model, GRPO, group=dist.group.WORLD)
    stranger.load_state(folder, version=2)
    results = []
    for each in (trainer, stranger):
        train(each, [shares(groups[2:7])[rank]])
        results.append(each.commit())
    pairs = zip(trainer.model.parameters(), stranger.model.parameters(), strict=True)
    flat = torch.cat([p.detach().flatten() for p in stranger.model.parameters()]).float().numpy()
    return {"same": all(torch.equal(a, b) for a, b in pairs), "results": results[0] == results[1], "weights": flat}


# ------------------------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def model() -> Any:
    return base_model()


@pytest.fixture(scope="module")
def groups(model: Any) -> list[GroupPayload]:
    return eight_groups(model)


@pytest.fixture(scope="module")
def ranks(groups: list[GroupPayload]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, rank_main, TIMEOUT_SECONDS, groups, folder)


@pytest.fixture(scope="module")
def by_definition(model: Any, groups: list[GroupPayload]) -> dict[str, Any]:
    return {name: gradient_by_definition(model, groups, algorithm) for name, algorithm in ALGORITHMS.items()}


@pytest.mark.parametrize("minibatches", MINIBATCHES)
@pytest.mark.parametrize("microbatch", MICROBATCHES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_have_the_gradient_of_the_definition(
    ranks: list[dict[str, Any]], by_definition: dict[str, Any], name: str, microbatch: int, minibatches: str
) -> None:
    (first, result), (second, result_of_second) = (each["gradients"][name, microbatch, minibatches] for each in ranks)
    gradients, loss, denominator = by_definition[name]
    assert np.array_equal(first, second) and result == result_of_second
    assert relative_error(torch.from_numpy(first), gradients) < 1e-5
    assert result["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert result["sums"]["denominator"] == denominator
    assert result["sums"]["groups"] == 8 and result["sums"]["responses"] == 64


def test_maxima_are_not_summed_over_ranks(ranks: list[dict[str, Any]], groups: list[GroupPayload]) -> None:
    lags = [max(int((VERSION - g.token_versions()).max()) for g in share) for share in shares(groups)]
    for each in ranks:
        _, result = each["gradients"]["GRPO", 8, "one minibatch"]
        assert result["sums"]["lag_max"] == max(lags) > 0
        assert each["mesh"] == (2, 1, 1)


def test_a_rank_with_nothing_to_train_takes_part(ranks: list[dict[str, Any]], by_definition: dict[str, Any]) -> None:
    for each in ranks:
        gradient, sums = each["one rank idle"]
        assert relative_error(torch.from_numpy(gradient), by_definition["GRPO"][0]) < 1e-5
        assert sums["groups"] == 8


def test_a_step_that_one_rank_abandons_has_not_happened_on_any(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["abandoned"] == {"happened": False, "same": True}


def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        found = each["one rank broken"]
        assert found["skipped"] == [True] * 4
        assert "5 steps in a row" in found["error"]
        assert found["same"]


@pytest.mark.parametrize("which", range(len(DTYPES)), ids=map(str, DTYPES))
def test_the_update_after_a_restore_is_bitwise_the_same(ranks: list[dict[str, Any]], which: int) -> None:
    first, second = (each["restored"][which] for each in ranks)
    assert first["same"] and second["same"] and first["results"] and second["results"]
    assert np.array_equal(first["weights"], second["weights"])
