"""The quickstart's maker: what it writes loads, round-trips and follows the seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zbgrpo.bench import quickstart
from zbgrpo.bench.quickstart import ANSWER_TAGS, Prepared, WarmUp, prepare
from zbgrpo.config.load import load_config
from zbgrpo.config.validate import validate
from zbgrpo.data.arithmetic import NUM_TRAIN, make_splits, worked_response
from zbgrpo.data.chat import PromptRenderer
from zbgrpo.data.rows import load_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHORT = WarmUp(num_steps=3, batch_size=4, max_rounds=1)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("quickstart"), seed=7, warm_up=SHORT, quiet=True)


def weights_of(folder: Path) -> dict[str, Any]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_data_is_that_of_the_task_and_fits_the_prompt_limit(prepared: Prepared) -> None:
    splits = make_splits(7)
    train = load_rows(str(prepared.train), skip_bad_rows=False).rows
    heldout = load_rows(str(prepared.heldout), skip_bad_rows=False).rows
    assert [row.gt_answer for row in train] == [str(pair.a + pair.b) for pair in splits.train]
    assert len(heldout) == len(splits.heldout) >= 200
    questions = [{row.messages[0]["content"] for row in rows} for rows in (train, heldout)]
    assert not questions[0] & questions[1]

    limit = int(quickstart.RUN_FLAGS[quickstart.RUN_FLAGS.index("-mpt") + 1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared.model)
    renderer = PromptRenderer(tokenizer, "A system prompt that the template leaves out.", limit)
    assert renderer.usable_rows(train + heldout).num_too_long == 0
    assert {len(renderer.render(row.messages)) for row in train + heldout} == {12}


def test_model_loads_small_tied_and_float32(prepared: Prepared) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(prepared.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared.model)
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert sum(weight.numel() for weight in model.parameters()) < 2_000_000
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert len(tokenizer) <= model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.parametrize(
    "text",
    [
        "<think>12+30</think><answer>42</answer>",
        "What is 17 + 25?",
        " leading,  double\n\n\ttab and end ",
        "< answer>not a tag</ answer>",
        "Grüße, 你好 🎉 \u2028",
    ],
)
def test_tokenizer_gives_every_text_back(prepared: Prepared, text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared.model)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(text)["input_ids"] == ids  # no special token is ever added
    # Text alone must not decide: the saved tokenizer cuts as the one the model was taught with.
    assert quickstart.make_tokenizer()(text)["input_ids"] == ids


def test_tags_and_digits_are_single_tokens_and_responses_fit(prepared: Prepared) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared.model)
    limit = int(quickstart.RUN_FLAGS[quickstart.RUN_FLAGS.index("-mnt") + 1])
    for piece in [*ANSWER_TAGS, *"0123456789"]:
        assert len(tokenizer(piece, add_special_tokens=False)["input_ids"]) == 1
    for pair in make_splits(7).heldout:
        response = worked_response(pair, pair.a + pair.b) + tokenizer.eos_token
        ids = tokenizer(response, add_special_tokens=False)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        assert len(ids) < limit


def test_same_seed_same_model_and_data(prepared: Prepared, tmp_path: Path) -> None:
    again = prepare(tmp_path / "again", seed=7, warm_up=SHORT, quiet=True)
    other = prepare(tmp_path / "other", seed=8, warm_up=SHORT, quiet=True)
    assert again.train.read_bytes() == prepared.train.read_bytes() != other.train.read_bytes()
    first, second, third = weights_of(prepared.model), weights_of(again.model), weights_of(other.model)
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    assert not all(torch.allclose(first[name], third[name], atol=1e-6) for name in first)


def test_warm_up_leaves_threads_and_random_state_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    prepare(tmp_path, seed=1, warm_up=SHORT._replace(num_steps=1, max_rounds=0), quiet=True)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == threads


def test_warm_up_teaches_the_form_of_a_response() -> None:
    torch.manual_seed(0)
    tokenizer = quickstart.make_tokenizer()
    pupil = quickstart._Pupil(quickstart.make_model(tokenizer), tokenizer, make_splits(0).warmup, seed=0)
    said: list[str] = []
    quickstart._teach(pupil, WarmUp(num_steps=60, max_rounds=0), said.append)
    assert [line.split(":")[0].strip() for line in said] == [f"step {step} of 60" for step in (15, 30, 45, 60)]
    ids, labels = pupil._batch(64, slip_share=0.0)
    loss = float(pupil.model(input_ids=ids, labels=labels).loss.detach())
    assert loss < 1.5  # nats per response token; untrained it is the logarithm of the vocabulary, 5.6


def test_correction_goes_against_the_error_in_ever_smaller_steps() -> None:
    class Scripted:
        """Reports these accuracies and notes how it is taught."""

        validation = (None,)

        def __init__(self) -> None:
            self.accuracies = [0.70, 0.55, 0.30, 0.60, 0.45]
            self.taught: list[tuple[float, float]] = []

        def accuracy(self, pairs: Any) -> float:
            return self.accuracies.pop(0)

        def forget_momentum(self) -> None:
            self.taught.append((-1.0, -1.0))

        def step(self, batch_size: int, learning_rate: float, slip_share: float) -> None:
            if self.taught[-1] != (learning_rate, slip_share):
                self.taught.append((learning_rate, slip_share))

    pupil = Scripted()
    warm_up = WarmUp(num_steps=0, target=(0.4, 0.5), correction_rate=8.0)
    assert quickstart._teach(pupil, warm_up, lambda text: None) == 0.45  # type: ignore[arg-type]
    fresh = (-1.0, -1.0)
    assert pupil.taught == [fresh, (8.0, 1.0), fresh, (8.0, 1.0), fresh, (4.0, 0.0), fresh, (2.0, 1.0)]


def test_labels_are_the_responses_and_slips_follow_their_share() -> None:
    tokenizer = quickstart.make_tokenizer()
    pupil = quickstart._Pupil(quickstart.make_model(tokenizer), tokenizer, make_splits(0).warmup, seed=0)
    for slip_share, offset in ((0.0, 0), (1.0, -10)):
        ids, labels = pupil._batch(32, slip_share)
        assert ids.shape == labels.shape
        for row, marks in zip(ids, labels, strict=True):
            prompt = tokenizer.decode(row[:12])
            assert (marks[:12] == -100).all()
            response = tokenizer.decode(marks[marks != -100])
            a, b = prompt.removeprefix("<|user|>What is ").removesuffix("?<|assistant|>").split(" + ")
            assert response.endswith(f"<answer>{int(a) + int(b) + offset}</answer><|im_end|>")


def test_run_flags_are_a_valid_run_without_warnings() -> None:
    config = load_config(quickstart.RUN_FLAGS, world_size=2).config
    assert validate(config, world_size=2) == []
    assert (config.cluster.num_trainers, config.cluster.num_inferencer) == (1, 1)
    # One pass over the data is enough for all steps.
    assert (config.ledger.max_steps or 0) * config.groups_per_step <= NUM_TRAIN


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(quickstart, "prepare", lambda folder, seed: calls.append((folder, seed)))
    quickstart.main([str(tmp_path), "--seed", "3"])
    assert calls == [(str(tmp_path), 3)]
