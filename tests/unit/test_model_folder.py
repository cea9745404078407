"""Model and tokenizer folders: what is loaded, what is refused and in which words, and that nothing is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny_model, tiny_tokenizer
from zbgrpo.checkpoint.model_folder import load_model, load_tokenizer, save_model
from zbgrpo.errors import ModelError

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good one."""
    model = tiny_model(tied=False)
    save_model(tmp_path / "model", model, tiny_tokenizer(), dict(model.named_parameters()))
    return tmp_path / "model"


def load(path: str | Path) -> Any:
    return load_model(str(path), torch.float32, torch.device("cpu"))


def written(folder: Path, kind: str, **settings: Any) -> Path:
    """A tiny random model of this configuration class."""
    import transformers
    from transformers import AutoModelForCausalLM

    config = getattr(transformers, kind)(**{**SMALL, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------ architectures


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LlamaConfig", {}),
        ("Qwen2Config", {}),
        ("Qwen2Config", {"sliding_window": 16, "use_sliding_window": False}),
        ("Qwen3Config", {}),
        ("MistralConfig", {"sliding_window": None}),
        ("Phi3Config", {}),
        ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_full_attention_is_accepted_without_dropout(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    model = load(written(tmp_path / "model", kind, **settings))
    assert type(model).__name__ == kind.replace("Config", "LMHeadModel" if kind == "GPT2Config" else "ForCausalLM")
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("MistralConfig", {"sliding_window": 16}, r"sliding-window attention \(sliding_window 16\)"),
        ("Phi3Config", {"sliding_window": 8}, r"sliding-window attention \(sliding_window 8\)"),
        (
            "Qwen2Config",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "layers of type sliding_attention",
        ),
        ("Gemma2Config", {"final_logit_softcapping": None}, "layers of type sliding_attention"),
        ("Gemma2Config", {}, "final_logit_softcapping"),
        ("Llama4TextConfig", {"intermediate_size_mlp": 32}, "layers of type chunked_attention"),
        ("Lfm2Config", {"full_attn_idxs": [1]}, "layers of type conv"),
        (
            "Qwen3NextConfig",
            {
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            "Qwen3NextForCausalLM keeps a recurrent state",
        ),
        ("JambaConfig", {"num_experts": 2}, "JambaForCausalLM keeps a recurrent state"),
        ("MambaConfig", {"state_size": 4}, "does not support an attention implementation"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str
) -> None:
    path = written(tmp_path / "model", kind, **settings)
    with pytest.raises(ModelError, match=f"^model {path}: .*{reason}"):
        load(path)


def test_weights_that_are_missing_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    weights = {name: tensor for name, tensor in model.named_parameters() if "k_proj" not in name}
    save_model(tmp_path / "part", model, tiny_tokenizer(), weights)
    first = r"model\.layers\.0\.self_attn\.k_proj\.bias"
    with pytest.raises(ModelError, match=f"its files lack {first} and 3 more"):
        load(tmp_path / "part")

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 80}))
    with pytest.raises(ModelError, match=r"do not fit config\.json in the shape of lm_head\.weight and 1 more"):
        load(folder)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    model = tiny_model(tied=True)
    weights = {name: tensor for name, tensor in model.named_parameters() if name != "lm_head.weight"}
    save_model(tmp_path / "model", model, tiny_tokenizer(), weights)
    loaded = load(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_damaged_files_are_named_with_the_reason(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"rubbish" * 10)
    with pytest.raises(ModelError, match=f"^model {folder}: cannot be loaded: .*header"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=f"^model {folder}: cannot be loaded: (?!.*hub name)"):
        load(folder)


# ------------------------------------------------------------------------------------------------ paths


@pytest.mark.parametrize("path", ["./nowhere", "../nowhere", "/nowhere", "~/nowhere-at-all", "nowhere/at/all", "."])
def test_a_local_path_that_is_no_folder_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    problem = "cannot be loaded" if path == "." else "no such folder"  # one that is there but empty
    with pytest.raises(ModelError, match=rf"^model {path}: {problem}") as caught:
        load(path)
    assert path == "." or "-m" in str(caught.value)
    with pytest.raises(ModelError, match=rf"^tokenizer {path}: {problem}.*--tokenizer-path"):
        load_tokenizer(path)


@pytest.mark.parametrize("name", ["gpt2-that-nobody-has", "owner/gpt2-that-nobody-has"])
def test_one_word_or_two_are_a_hub_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    asked: list[str] = []

    def record(source: str, **_: Any) -> Any:
        asked.append(source)
        raise OSError("no connection\nand advice over several lines")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", record)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", record)
    for kind, call in (("model", load), ("tokenizer", load_tokenizer)):
        with pytest.raises(
            ModelError, match=rf"^{kind} {name}: cannot be loaded: no connection \(taken for a hub name"
        ) as caught:
            call(name)
        assert "\n" not in str(caught.value)
    assert asked == [name, name]


@pytest.mark.parametrize("path", ["~/model", "model", "./model"])
def test_home_and_relative_folders_load(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    expected = tiny_model(tied=False).state_dict()
    loaded = load(path).state_dict()
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[n], expected[n]) for n in expected)
    assert len(load_tokenizer(path)) == len(tiny_tokenizer())


# ------------------------------------------------------------------------------------------------ the terminal


def test_loading_and_saving_print_nothing_and_restore_the_settings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    try:
        model = tiny_model(tied=False)
        weights = dict(model.named_parameters())
        weights["unknown"] = torch.zeros(3)  # transformers reports it at loading
        save_model(tmp_path / "model", model, tiny_tokenizer(), weights)
        load(tmp_path / "model")
        load_tokenizer(str(tmp_path / "model"))
        assert logging.is_progress_bar_enabled() and logging.get_verbosity() == logging.WARNING
        captured = capfd.readouterr()
        assert captured.out == "" and captured.err == ""
        model.save_pretrained(tmp_path / "by-itself")
        assert "Writing model shards" in capfd.readouterr().err, "nothing to silence: the test has lost its sense"
    finally:
        logging.set_verbosity(verbosity)
