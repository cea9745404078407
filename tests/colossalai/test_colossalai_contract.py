"""What the consumer loop relies on, under ColossalAI's layouts: any split, skipped and abandoned steps, weights, files,
states, and producers in the same world."""

from __future__ import annotations

import copy
import math
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.colossalai.training import Case, make_colossalai, share
from tests.support.models import perturbed, tiny_model, tiny_tokenizer
from tests.support.ranks import run_ranks
from tests.support.training import (
    ALGORITHMS,
    DAPO,
    GRPO,
    VERSION,
    differences,
    eight_groups,
    flat,
    make_trainer,
    steps,
    train,
)
from zbgrpo.checkpoint.model_folder import load_model
from zbgrpo.config.schema import TrainerConfig
from zbgrpo.errors import ConfigError, ModelError, NonFiniteError
from zbgrpo.trainer.base import Mesh
from zbgrpo.trainer.colossalai_model import check_model, check_settings
from zbgrpo.trainer.layout import ALONE
from zbgrpo.types import FinishReason

TIMEOUT_SECONDS = 400.0
TOLERANCE = 1e-4


def base() -> Any:
    return tiny_model("qwen2", tied=True, seed=13)


def one_step(trainer: Any, minibatches: list[Any], abandon: bool = False) -> dict[str, Any]:
    """One optimizer step; what it gave, and the weights behind it."""
    train(trainer, minibatches)
    result = trainer.commit(abandon)
    if result is None:
        return {"weights": trainer.gather_model()}
    return {
        "losses": [result.loss],
        "norms": [result.grad_norm],
        "sums": result.sums,
        "skipped": result.skipped,
        "weights": trainer.gather_model(),
    }


# ------------------------------------------------------------------------------------------------ bf16 and zero


def in_bf16(rank: int, store: Any) -> dict[Any, Any]:
    """Five steps under zero 0, 1 and 2; on the first rank, how far they are from zero 0, and that from one rank."""
    apart: dict[Any, Any] = {}
    model = base()
    start, groups = dict(model.named_parameters()), eight_groups(model)
    for preset, algorithm in ALGORITHMS.items():
        found: dict[int, Any] = {}
        for zero in (0, 1, 2):
            case = Case(dp=2, zero=zero, precision="bf16")
            layout = case.layout()
            trainer = make_colossalai(model, algorithm, case, layout)
            found[zero] = steps(trainer, [share(groups[:4], layout), share(groups[4:], layout)])
            assert {spec.dtype for spec in trainer.weight_specs()} == {"bfloat16"}
        if rank == 0:
            torch_trainer = make_trainer(copy.deepcopy(model).bfloat16(), algorithm, layout=ALONE)
            alone = steps(torch_trainer, [groups[:4], groups[4:]])
            update = differences(found[0], alone, start)["update"]
            apart[preset, "one rank"] = {"norm": abs(found[0]["norms"][0] / alone["norms"][0] - 1), "update": update}
            apart |= {(preset, zero): differences(found[zero], found[0], start) for zero in (1, 2)}
    return apart


def with_other_axes(rank: int, store: Any) -> dict[tuple[str, int], dict[str, float]]:
    """GRPO under zero stages beside tensor parallelism and a pipeline; how far from zero 0."""
    apart: dict[tuple[str, int], dict[str, float]] = {}
    model = base()
    start, groups = dict(model.named_parameters()), eight_groups(model)
    for axis, stages in (("tp", (0, 1, 2)), ("pp", (0, 1))):
        found: dict[int, Any] = {}
        for zero in stages:
            case = Case(dp=2, zero=zero, precision="bf16")._replace(**{axis: 2})
            layout = case.layout()
            trainer = make_colossalai(model, GRPO, case, layout)
            found[zero] = steps(trainer, [share(groups[:4], layout), share(groups[4:], layout)])
        if rank == 0:
            apart |= {(axis, zero): differences(found[zero], found[0], start) for zero in stages[1:]}
    return apart


def test_zero_in_bf16_makes_the_steps_of_zero_0_beside_other_axes() -> None:
    apart = run_ranks(4, with_other_axes, TIMEOUT_SECONDS)[0]
    assert sorted(apart) == [("pp", 1), ("tp", 1), ("tp", 2)]
    for key, values in apart.items():
        print(key, values)
        assert all(value <= (1e-6 if key[1] == 1 else 1e-3) for value in values.values()), (key, values)


@pytest.fixture(scope="module")
def bf16() -> dict[Any, Any]:
    found: dict[Any, Any] = run_ranks(2, in_bf16, TIMEOUT_SECONDS)[0]
    return found


@pytest.mark.parametrize("preset", ALGORITHMS)
@pytest.mark.parametrize("zero", [1, 2])
def test_zero_in_bf16_makes_the_steps_of_zero_0(bf16: dict[Any, Any], zero: int, preset: str) -> None:
    """Gradients are added up in float32 under each of them, rounded nowhere but in the weights. Zero 1 adds in the
    order of zero 0. Zero 2 adds ranks before microbatches, which may differ in float32's last bits and so, rarely,
    round a weight to the next bf16 number: 2^-8 of it, as much as a step at this learning rate."""
    print(zero, preset, bf16[preset, zero])
    limit = 1e-6 if zero == 1 else 1e-3
    assert all(value <= limit for value in bf16[preset, zero].values()), bf16[preset, zero]


@pytest.mark.parametrize("preset", ALGORITHMS)
def test_bf16_is_near_the_torch_trainer(bf16: dict[Any, Any], preset: str) -> None:
    """The first gradient is the same but for bf16's rounding. Five steps of it may be as far apart as those of one rank
    with microbatches of another size: 0.1 to 0.25 of the update."""
    print(preset, bf16[preset, "one rank"])
    assert bf16[preset, "one rank"]["norm"] < 0.02 and bf16[preset, "one rank"]["update"] < 0.4


# ------------------------------------------------------------------------------------------------ one optimizer step


def variants(rank: int, store: Any) -> dict[str, Any]:
    """Steps that are to be one and the same, however the work is split: how far each is from one rank's, by name."""
    model = base()
    start, groups = dict(model.named_parameters()), eight_groups(model)
    found: dict[str, Any] = {}

    def compare(name: str, case: Case, minibatches: list[Any], expected_of: list[Any], **settings: Any) -> None:
        trainer = make_colossalai(model, GRPO, case, case.layout(), **settings)
        got = one_step(trainer, minibatches)
        if rank == 0:
            clip = {"max_grad_norm": settings["max_grad_norm"]} if "max_grad_norm" in settings else {}
            found[name] = differences(
                got, one_step(make_trainer(model, GRPO, layout=ALONE, **clip), expected_of), start
            )

    uneven = [groups[:3], groups[3:]][rank]
    compare("tp 2, in pieces", Case(tp=2), [groups[:1], groups[1:3], groups[3:]], [groups], microbatch=3)
    compare("pp 2, fewer microbatches than stages", Case(pp=2), [groups], [groups], microbatch=64)
    compare("pp 2, in pieces", Case(pp=2), [groups[:1], groups[1:3], groups[3:]], [groups], microbatch=3)
    compare("dp 2, uneven", Case(dp=2), [uneven], [groups], microbatch=3)
    compare("zero 1, uneven", Case(dp=2, zero=1), [uneven], [groups], microbatch=3)
    compare("zero 2, uneven", Case(dp=2, zero=2), [uneven], [groups], microbatch=3)
    for zero in (0, 1, 2):
        compare(f"zero {zero}, one rank idle", Case(dp=2, zero=zero), [groups] if rank == 0 else [[]], [groups])
    compare("tp 2, clipped", Case(tp=2), [groups], [groups], max_grad_norm=0.1)
    compare("zero 1, clipped", Case(dp=2, zero=1), [groups[rank::2]], [groups], max_grad_norm=0.1)
    compare("tp 2, checkpointing", Case(tp=2), [groups], [groups], gradient_checkpointing=True)
    compare("pp 2, checkpointing", Case(pp=2), [groups], [groups], gradient_checkpointing=True)
    return found


@pytest.fixture(scope="module")
def splits() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(2, variants, TIMEOUT_SECONDS)[0]
    return found


def test_any_split_gives_the_same_step(splits: dict[str, Any]) -> None:
    """The update may differ by more: the first one of Adam is the sign of the gradient, which rounding decides where it
    is next to nothing."""
    assert len(splits) == 13
    for name, apart in splits.items():
        print(name, apart)
        assert apart.pop("update") < 10 * TOLERANCE, name
        assert all(value < TOLERANCE for value in apart.values()), (name, apart)


# ------------------------------------------------------------------------------------------------ steps left out


def left_out(rank: int, store: Any) -> dict[Any, Any]:
    """Abandoned, empty and broken steps under several layouts: whether the weights stayed, and what came of it."""
    model = base()
    groups = eight_groups(model)
    bad = groups[0]._replace(
        logprobs=np.full_like(groups[0].logprobs, math.nan),
        spans=np.array([[i, 0, VERSION] for i in range(groups[0].num_responses)], np.int32),
        finish=np.full_like(groups[0].finish, FinishReason.END_TOKEN),
    )
    found: dict[Any, Any] = {}
    for name, case in {
        "tp 2": Case(tp=2),
        "pp 2": Case(pp=2),
        "zero 1": Case(dp=2, zero=1, precision="bf16"),
        "zero 2": Case(dp=2, zero=2, precision="bf16"),
    }.items():
        trainer = make_colossalai(model, DAPO, case, case.layout())
        assert trainer.lockstep
        before = trainer.gather_model()

        def stayed(trainer: Any = trainer, before: Any = before) -> bool:
            after = trainer.gather_model()
            return before is None or torch.equal(flat(after), flat(before))

        train(trainer, [groups[:2]])
        assert trainer.commit(abandon=rank == 1) is None and stayed()
        train(trainer, [groups[:2]])
        trainer.discard()
        empty = trainer.commit()
        assert empty.skipped and math.isnan(empty.grad_norm) and empty.loss == 0.0 and stayed()
        train(trainer, [groups[:2]])
        broken_gradient(trainer, rank, case)
        result = trainer.commit()
        assert result.skipped and not math.isfinite(result.grad_norm) and math.isfinite(result.loss) and stayed()
        for _ in range(3):
            train(trainer, [[bad]])
            assert trainer.commit().skipped and stayed()
        train(trainer, [groups[:2]])  # what was left out has left nothing behind
        first, other = trainer.commit(), make_colossalai(model, DAPO, case, case.layout())
        train(other, [groups[:2]])
        second = other.commit()
        assert not first.skipped and (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
        for number in range(5):
            train(trainer, [[bad]])
            if number < 4:
                assert trainer.commit().skipped
        with pytest.raises(NonFiniteError):
            trainer.commit()
        found[name] = True
    return found


def broken_gradient(trainer: Any, rank: int, case: Case) -> None:
    """One element, on rank 1 alone."""
    if rank == 0:
        return
    parameter = next(p for p in trainer.model.parameters() if p.dim() == 2)
    if case.zero == 2:
        (part,) = trainer._spread.optimizer.get_partitioned_gradients_by_param_id(0, id(parameter))
        part[0] = math.inf
    else:
        parameter.grad[0, 0] = math.inf


def test_a_step_that_is_left_out_changes_nothing() -> None:
    assert list(run_ranks(2, left_out, TIMEOUT_SECONDS)[0]) == ["tp 2", "pp 2", "zero 1", "zero 2"]


# ------------------------------------------------------------------------------------------------ weights and states

STATES = {
    "tp 2": Case(tp=2),
    "pp 2": Case(pp=2),
    "zero 1": Case(dp=2, zero=1),
    "zero 2, bf16": Case(dp=2, zero=2, precision="bf16"),
    "pp 2, bf16": Case(pp=2, precision="bf16"),
}


def move_states(rank: int, store: Any, folder: str) -> dict[Any, Any]:
    """Every layout goes on from its own state, from that of every other one, and a single torch rank from all."""
    model = base()
    groups, stranger = eight_groups(model), perturbed(model, seed=5)
    found: dict[Any, Any] = {}
    for saver in (*STATES, "torch"):
        if saver == "torch":
            expected = two_steps_and_one(make_trainer(model, DAPO), groups, Path(folder) / saver) if rank == 0 else {}
            dist.barrier()
        else:
            layout = STATES[saver].layout()
            trainer = make_colossalai(model, DAPO, STATES[saver], layout)
            expected = two_steps_and_one(trainer, share(groups, layout), Path(folder) / saver)
        for loader, other in STATES.items():
            layout = other.layout()
            trainer = make_colossalai(stranger, DAPO, other, layout)
            trainer.load_state(Path(folder) / saver, 2)
            got = one_step(trainer, [share(groups, layout)])
            if rank == 0:
                found[saver, loader] = gap(got, expected)
        alone = make_trainer(stranger, DAPO, layout=ALONE) if rank == 0 else None
        if alone is not None:
            alone.load_state(Path(folder) / saver, 2)
            found[saver, "torch"] = gap(one_step(alone, [groups]), expected)
        dist.barrier()
    return found


def two_steps_and_one(trainer: Any, groups: list[Any], folder: Path) -> dict[str, Any]:
    """What the step gives that follows a saved state."""
    for _ in range(2):
        train(trainer, [groups])
        trainer.commit()
    trainer.save_state(folder)
    return one_step(trainer, [groups])


def gap(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    weights = [flat(each["weights"]).float() for each in (found, expected)]
    return {
        "norm": abs(found["norms"][0] / expected["norms"][0] - 1),
        "largest": float((weights[0] - weights[1]).abs().max()),
    }


@pytest.fixture(scope="module")
def moved_states(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    found: dict[Any, Any] = run_ranks(2, move_states, TIMEOUT_SECONDS, str(tmp_path_factory.mktemp("states")))[0]
    return found


@pytest.mark.parametrize("loader", [*STATES, "torch"])
@pytest.mark.parametrize("saver", [*STATES, "torch"])
def test_a_state_goes_on_under_any_layout(moved_states: dict[Any, Any], saver: str, loader: str) -> None:
    """Of this trainer and of the torch one. Under the same layout bitwise; in float32 within what the order of sums
    does to a step. A state does not hold the precision: one that is read in another one goes on in that."""
    apart = moved_states[saver, loader]
    print(saver, loader, apart)
    if saver == loader:
        assert apart == {"norm": 0.0, "largest": 0.0}
    elif "bf16" in saver + loader:
        assert apart["norm"] < 0.1 and apart["largest"] < 1e-2, apart  # a bf16 weight near 1 has steps of 2^-8
    else:
        assert apart["norm"] < TOLERANCE and apart["largest"] < 1e-5, apart


def write_model(rank: int, store: Any, folder: str) -> dict[Any, Any]:
    """What travels and what is written under several layouts."""
    found: dict[Any, Any] = {}
    for tied in (True, False):
        model = tiny_model("qwen2", tied=tied, seed=5)
        for name in ("tp 2", "pp 2", "zero 1"):
            case = STATES[name]
            trainer = make_colossalai(model, DAPO, case, case.layout())
            weights = {n: tensor.clone() for n, tensor in trainer.weights()}
            assert [(s.name, tuple(s.shape)) for s in trainer.weight_specs()] == [
                (n, tuple(tensor.shape)) for n, tensor in weights.items()
            ]
            expected = dict(model.named_parameters())
            assert all(torch.equal(tensor, expected[n]) for n, tensor in weights.items())
            found[name, tied] = list(weights)
            whole = trainer.gather_model()
            if whole is not None:
                assert list(whole) == list(expected)
                path = Path(folder) / f"{name}-{tied}"
                trainer.save_model(path, tiny_tokenizer(), whole)
                loaded = dict(load_model(str(path), torch.float32, torch.device("cpu")).named_parameters())
                assert all(torch.equal(loaded[n], expected[n]) for n in expected)
            dist.barrier()
    return found


def test_weights_travel_once_and_make_a_model_folder(tmp_path: Path) -> None:
    first, second = run_ranks(2, write_model, TIMEOUT_SECONDS, str(tmp_path))
    for name, tied in first:
        names = [n for n, _ in tiny_model("qwen2", tied=tied, seed=5).named_parameters()]
        both = first[name, tied] + second[name, tied] if name == "pp 2" else first[name, tied]
        assert sorted(both) == sorted(names)
        assert name == "pp 2" or second[name, tied] == names


# ------------------------------------------------------------------------------------------------ beside a producer


def beside_a_producer(rank: int, store: Any, name: str) -> dict[str, float] | None:
    """Ranks 0 and 1 train while rank 2, which has no ColossalAI, gets weights through a group of its own."""
    case, seconds = {"tp 2": Case(tp=2), "pp 2": Case(pp=2), "zero 1": Case(dp=2, zero=1)}[name], 200
    consumers: Any = dist.new_group([0, 1], timeout=timedelta(seconds=seconds), backend="gloo")
    weights: Any = dist.new_group([0, 2], timeout=timedelta(seconds=seconds), backend="gloo")
    layout = case.layout()
    model = base()
    start, groups = dict(model.named_parameters()), eight_groups(model)
    if rank == 2:
        received = torch.empty(1000)
        for number in range(20):
            dist.broadcast(received, src=0, group=weights)
            assert received[0] == number
        dist.barrier()
        return None

    def send() -> None:
        for number in range(20):
            dist.broadcast(torch.full((1000,), float(number)), src=0, group=weights)

    thread = threading.Thread(target=send) if rank == 0 else None
    trainer = make_colossalai(model, GRPO, case, layout, consumers)
    if thread is not None:
        thread.start()
    found = steps(trainer, [share(groups[:4], layout), share(groups[4:], layout)])
    if thread is not None:
        thread.join(seconds)
    assert dist.get_world_size() == 3
    dist.barrier()
    if rank == 0:
        return differences(found, steps(make_trainer(model, GRPO, layout=ALONE), [groups[:4], groups[4:]]), start)
    return None


@pytest.mark.parametrize("name", ["tp 2", "pp 2", "zero 1"])
def test_the_consumers_train_in_a_larger_world(name: str) -> None:
    apart = run_ranks(3, beside_a_producer, TIMEOUT_SECONDS, name)[0]
    print(name, apart)
    assert all(value < TOLERANCE for value in apart.values()), apart


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("mesh", "settings", "words"),
    [
        (Mesh(2, 1, 1), {"zero_stage": 3}, "-zero 3"),
        (Mesh(2, 2, 1), {"zero_stage": 2}, "-zero 2"),
        (Mesh(2, 1, 2), {"zero_stage": 1, "precision": "fp32"}, "float32"),
        (Mesh(1, 1, 2), {"offload_optimizer": True}, "offload_optimizer"),
        (Mesh(1, 1, 2), {"offload_reference": True}, "offload_reference"),
    ],
)
def test_settings_that_colossalai_does_not_have_are_refused(mesh: Mesh, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_settings(TrainerConfig(**settings), mesh)


def test_a_zero_stage_on_one_data_parallel_rank_is_none() -> None:
    check_settings(TrainerConfig(zero_stage=2, precision="fp32"), Mesh(1, 2, 2))


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(1, 1, 3), "does not divide the 4 attention heads"),
        (Mesh(1, 1, 4), "does not divide the 2 key-value heads"),
        (Mesh(1, 3, 1), "3 stages, but path has 2 layers"),
    ],
)
def test_a_model_that_does_not_fit_the_mesh_is_refused(mesh: Mesh, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check_model(base(), mesh, "path")


def test_a_model_that_was_not_tried_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ModelError, match="LlamaForCausalLM and Qwen2ForCausalLM, not GPT2LMHeadModel"):
        check_model(model, Mesh(1, 1, 1), "path")
