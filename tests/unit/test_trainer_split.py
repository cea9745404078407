"""One optimizer step of the torch trainer: the same gradient whatever the split, and the one of the definition."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models import tiny_model, tiny_tokenizer
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
from zbgrpo.algorithms.packing import pack
from zbgrpo.errors import NonFiniteError
from zbgrpo.trainer.schedule import learning_rate, schedule_steps
from zbgrpo.trainer.torch_backend import TorchTrainer
from zbgrpo.types import FinishReason, GroupPayload


@pytest.fixture(scope="module")
def model() -> Any:
    return base_model()


@pytest.fixture(scope="module")
def groups(model: Any) -> list[GroupPayload]:
    return eight_groups(model)


@pytest.fixture(scope="module")
def by_definition(model: Any, groups: list[GroupPayload]) -> dict[str, Any]:
    return {name: gradient_by_definition(model, groups, algorithm) for name, algorithm in ALGORITHMS.items()}


def snapshot(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.weights()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def broken(group: GroupPayload) -> GroupPayload:
    """A counted token whose recorded log-prob is NaN: the loss is not finite."""
    logprobs, spans, finish = group.logprobs.copy(), group.spans.copy(), group.finish.copy()
    logprobs[0], spans[:, 2], finish[:] = math.nan, VERSION, FinishReason.END_TOKEN
    return group._replace(logprobs=logprobs, spans=spans, finish=finish)


def truncated(group: GroupPayload) -> GroupPayload:
    return group._replace(finish=np.full_like(group.finish, FinishReason.LENGTH))


# ------------------------------------------------------------------------------------------------ the gradient


@pytest.mark.parametrize("minibatches", MINIBATCHES)
@pytest.mark.parametrize("microbatch", [1, 2, 8, 64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_split_gives_the_gradient_of_the_definition(
    model: Any, groups: list[GroupPayload], by_definition: dict[str, Any], name: str, microbatch: int, minibatches: str
) -> None:
    gradients, loss, denominator = by_definition[name]
    trainer = make_trainer(model, ALGORITHMS[name], microbatch=microbatch)
    train(trainer, MINIBATCHES[minibatches](groups))
    got, result = commit_without_update(trainer)
    assert relative_error(got, gradients) < 1e-5
    assert result.sums["denominator"] == denominator
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert result.grad_norm == pytest.approx(float(got.norm()), rel=1e-5)
    assert not result.skipped


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rule_of_the_loss_acts_on_these_groups(model: Any, groups: list[GroupPayload], name: str) -> None:
    trainer = make_trainer(model, ALGORITHMS[name])
    train(trainer, [groups])
    _, result = commit_without_update(trainer)
    sums = result.sums
    assert sums["clipped"] > 20 and sums["responses_skipped"] >= 1 and sums["lag_left_out"] > 20
    assert sums["truncated"] > 5 and sums["zero_variance"] == 1 and sums["groups"] == 8 and sums["responses"] == 64
    assert sums["tokens_left_out"] > sums["lag_left_out"] and sums["num_tokens"] > 100
    assert sums["num_responses"] < 64 and (sums["kl"] > 0.1) == (name == "GRPO")
    assert 0 < sums["gap_tokens"] < sums["tokens"] and 0 < sums["gap"] / sums["gap_tokens"] < 1
    assert 0 < sums["entropy"] / sums["tokens"] < math.log(72)


def test_statistics_do_not_depend_on_the_split(model: Any, groups: list[GroupPayload]) -> None:
    results = []
    for microbatch in (1, 5, 64):
        trainer = make_trainer(model, GRPO, microbatch=microbatch)
        train(trainer, [groups])
        results.append(commit_without_update(trainer)[1].sums)
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-4)


def test_tokens_that_do_not_count_may_be_nan_and_leave_no_statistic_without_a_value(
    model: Any, groups: list[GroupPayload]
) -> None:
    logprobs = groups[2].logprobs.copy()
    logprobs[groups[2].lengths[:5].sum() :][: groups[2].lengths[5]] = math.nan  # response 5, which is too old
    trainer = make_trainer(model, GRPO)
    train(trainer, [[groups[1], groups[2]._replace(logprobs=logprobs)]])
    sums = commit_without_update(trainer)[1].sums
    assert all(math.isfinite(value) for value in sums.values()) and sums["gap_tokens"] > 0
    train(trainer, [[groups[1], groups[2]]])
    assert commit_without_update(trainer)[1].sums == sums


def test_a_microbatch_is_trained_without_waiting_for_the_device(
    model: Any, groups: list[GroupPayload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every read of a value counts: on an accelerator each one would stop the host until the device is idle."""
    reads: list[str] = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "cpu", "nonzero"):
        real = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            reads.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    trainer = make_trainer(model, GRPO)
    for batch in list(pack(groups[:2], VERSION, trainer._rules)):  # packing is on the host
        reads.clear()
        trainer._train_microbatch(batch, batch.old_logprobs)
        assert reads == []


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_untied_weights_and_gradient_checkpointing(family: str) -> None:
    model = tiny_model(family, tied=False, seed=8)
    groups = eight_groups(model)[1:3]
    gradients, _, _ = gradient_by_definition(model, groups, DAPO)
    for checkpointing in (False, True):
        trainer = make_trainer(model, DAPO, gradient_checkpointing=checkpointing)
        train(trainer, [groups])
        assert relative_error(commit_without_update(trainer)[0], gradients) < 1e-5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bfloat16_is_close_and_its_split_too(model: Any, name: str) -> None:
    rounded = copy.deepcopy(model).bfloat16()
    groups = eight_groups(rounded, noise=0.0)  # ratios near 1: with others, a rounding decides what is clipped
    gradients, _, _ = gradient_by_definition(rounded, groups, ALGORITHMS[name])
    found = []
    for microbatch in (1, 64):
        trainer = make_trainer(rounded, ALGORITHMS[name], microbatch=microbatch)
        train(trainer, [groups])
        found.append(commit_without_update(trainer)[0])
        assert found[-1].dtype == torch.float32
        assert relative_error(found[-1], gradients) < 0.1
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.05


def test_bfloat16_gradients_add_up_in_float32(model: Any, groups: list[GroupPayload]) -> None:
    """Twenty times the same group has the gradient of one, which rounded sums would not."""
    found = []
    for times in (1, 20):
        trainer = make_trainer(copy.deepcopy(model).bfloat16(), DAPO)
        train(trainer, [groups[:1]] * times)
        found.append(commit_without_update(trainer)[0])
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


def test_discard_forgets_the_open_step(model: Any, groups: list[GroupPayload], by_definition: dict[str, Any]) -> None:
    trainer = make_trainer(model, GRPO)
    train(trainer, [groups[:5]])
    trainer.discard()
    train(trainer, [groups])
    got, result = commit_without_update(trainer)
    assert relative_error(got, by_definition["GRPO"][0]) < 1e-5
    assert result.sums["groups"] == 8


def test_nothing_of_a_step_is_left_for_the_next(model: Any, groups: list[GroupPayload]) -> None:
    trainer = make_trainer(model, GRPO)
    train(trainer, [groups[:4]])
    commit_without_update(trainer)
    train(trainer, [groups[4:]])
    got, result = commit_without_update(trainer)
    assert relative_error(got, gradient_by_definition(model, groups[4:], GRPO)[0]) < 1e-5
    assert result.sums["groups"] == 4


# ------------------------------------------------------------------------------------------------ the update


def test_updates_are_those_of_adamw_with_the_clipped_gradient(model: Any, groups: list[GroupPayload]) -> None:
    limit = 0.05
    trainer = make_trainer(model, DAPO, max_grad_norm=limit, weight_decay=0.1, num_schedule_steps=2)
    witness = copy.deepcopy(model).requires_grad_(True)
    optimizer = torch.optim.AdamW(witness.parameters(), lr=1.0, weight_decay=0.1, foreach=False)
    for rate in (1e-3, 5.5e-4, 1e-4):
        twin = make_trainer(witness, DAPO)
        train(twin, [groups])
        gradient, whole = commit_without_update(twin)
        assert whole.grad_norm > limit
        gradient = gradient * (limit / gradient.norm())
        parts = gradient.split([p.numel() for p in witness.parameters()])
        for parameter, part in zip(witness.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        train(trainer, [groups])
        result = trainer.commit()
        assert result.learning_rate == pytest.approx(rate)
        assert result.grad_norm == pytest.approx(whole.grad_norm, rel=1e-3)
        # A gradient near zero may differ in sign, which Adam makes a whole step of: so nearly all and on average.
        updated = dict(trainer.weights())
        difference = torch.cat([(updated[n] - p).detach().abs().flatten() for n, p in witness.named_parameters()])
        assert float(difference.mean()) < 1e-3 * rate and float((difference > 0.05 * rate).float().mean()) < 1e-3
        witness.load_state_dict(dict(trainer.weights()), strict=False)


def test_bfloat16_weights_are_the_rounded_masters(model: Any, groups: list[GroupPayload]) -> None:
    """A hundredth of a rounding step per update gets lost in bfloat16 weights; float32 masters add it up."""
    trainer = make_trainer(copy.deepcopy(model).bfloat16(), DAPO, learning_rate=1e-5, schedule="constant")
    start = snapshot(trainer)
    for _ in range(3):
        train(trainer, [groups[:2]])
        trainer.commit()
    for name, tensor in trainer.weights():
        assert tensor.dtype == torch.bfloat16
        master = trainer._masters[name]
        assert master.dtype == torch.float32 and torch.equal(tensor, master.bfloat16())
        assert 0 < float((master - start[name].float()).detach().abs().max()) < 1e-4


def test_learning_rates_by_hand() -> None:
    assert [learning_rate(2.0, step, 4, "cosine") for step in range(6)] == pytest.approx(
        [2.0, 0.2 + 1.8 * (2 + math.sqrt(2)) / 4, 1.1, 0.2 + 1.8 * (2 - math.sqrt(2)) / 4, 0.2, 0.2]
    )
    assert learning_rate(2.0, 1000, 1, "cosine") == pytest.approx(0.2)
    assert [learning_rate(2.0, step, 4, "constant") for step in (0, 3, 99)] == [2.0] * 3
    assert schedule_steps(2, 100, 32) == 6
    assert schedule_steps(9, 100, 32) == 12  # never more than four passes
    assert schedule_steps(1, 5, 32) == 1


# ------------------------------------------------------------------------------------------------ skipped steps


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_skips_the_step_and_the_version_goes_on(
    model: Any, groups: list[GroupPayload], tmp_path: Path, what: str
) -> None:
    trainer = make_trainer(model, GRPO)
    train(trainer, [groups[:2]])
    assert not trainer.commit().skipped
    weights, moments = snapshot(trainer), copy.deepcopy(trainer._optimizer.state_dict()["state"])
    if what == "loss":
        train(trainer, [groups[:2], [broken(groups[2])]])
    else:
        train(trainer, [groups[:3]])
        trainer.parameters.gradients[5] = math.inf
    result = trainer.commit()
    assert result.skipped and not math.isfinite(result.loss if what == "loss" else result.grad_norm)
    assert result.learning_rate == pytest.approx(learning_rate(1e-3, 1, 10, "cosine"))
    assert equal(weights, snapshot(trainer))
    after = trainer._optimizer.state_dict()["state"]
    assert all(torch.equal(moments[i][key], after[i][key]) for i in moments for key in moments[i])
    train(trainer, [groups[:2]])
    result = trainer.commit()
    assert not result.skipped and math.isfinite(result.grad_norm) and math.isfinite(result.loss)
    assert result.learning_rate == pytest.approx(learning_rate(1e-3, 2, 10, "cosine"))
    assert not equal(weights, snapshot(trainer))
    trainer.save_state(tmp_path / "state")
    make_trainer(model, GRPO).load_state(tmp_path / "state", version=3)  # three versions, two updates


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_five_in_a_row_end_the_run_and_fewer_do_not(model: Any, groups: list[GroupPayload], precision: str) -> None:
    trainer = make_trainer(model if precision == "fp32" else copy.deepcopy(model).bfloat16(), DAPO)
    for _ in range(2):
        for _ in range(4):
            train(trainer, [[broken(groups[0])]])
            assert trainer.commit().skipped
        train(trainer, [groups[:1]])
        assert not trainer.commit().skipped
    for _ in range(4):
        train(trainer, [[broken(groups[0])]])
        trainer.commit()
    train(trainer, [[broken(groups[0])]])
    with pytest.raises(NonFiniteError, match="5 steps in a row"):
        trainer.commit()


def test_steps_where_nothing_counts_leave_the_weights_alone_and_are_no_failure(
    model: Any, groups: list[GroupPayload]
) -> None:
    trainer = make_trainer(model, DAPO, weight_decay=0.5)
    train(trainer, [groups[:2]])
    trainer.commit()
    weights = snapshot(trainer)
    for _ in range(6):
        train(trainer, [[truncated(group) for group in groups]])
        result = trainer.commit()
        assert result.skipped and result.loss == 0.0 and result.sums["denominator"] == 0
        assert equal(weights, snapshot(trainer))
    assert trainer.commit().skipped  # no group at all
    assert equal(weights, snapshot(trainer))


def test_a_truncated_response_counts_where_it_is_not_masked(model: Any, groups: list[GroupPayload]) -> None:
    trainer = make_trainer(model, GRPO)
    train(trainer, [[truncated(group) for group in groups]])
    assert trainer.commit().sums["denominator"] > 40


# ------------------------------------------------------------------------------------------------ state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("updates", [0, 2])
def test_the_update_after_a_restore_is_bitwise_the_same(
    model: Any, groups: list[GroupPayload], tmp_path: Path, precision: str, updates: int
) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    trainer = make_trainer(copy.deepcopy(model).to(dtype), GRPO)
    for step in range(updates):
        train(trainer, [groups[step : step + 2]])
        trainer.commit()
    trainer.save_state(tmp_path / "state")
    stranger = make_trainer(copy.deepcopy(model).to(dtype), GRPO)
    with torch.no_grad():
        for tensor in (*stranger._masters.values(), *stranger.model.parameters()):
            tensor.add_(1.0)
    stranger.load_state(tmp_path / "state", version=updates)
    assert equal(snapshot(trainer), snapshot(stranger))
    for _ in range(2):
        results = []
        for each in (trainer, stranger):
            train(each, [groups[:3]])
            results.append(each.commit())
        assert results[0] == results[1]
        assert equal(snapshot(trainer), snapshot(stranger))


def test_the_model_folder_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for tied in (True, False):
        model = tiny_model("qwen2", tied)
        trainer = make_trainer(model, DAPO)
        weights = trainer.gather_model()
        assert weights is not None
        trainer.save_model(tmp_path / str(tied), tiny_tokenizer(), weights)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / str(tied))
        assert equal(dict(loaded.named_parameters()), dict(model.named_parameters()))
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
        assert len(AutoTokenizer.from_pretrained(tmp_path / str(tied))) == len(tiny_tokenizer())
