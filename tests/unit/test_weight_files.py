"""A model that is read piece by piece is the one that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models import tiny_model, tiny_tokenizer
from zbgrpo.checkpoint.model_folder import load_model, open_model
from zbgrpo.checkpoint.weight_files import WeightFiles
from zbgrpo.errors import ModelError

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_pieces_make_the_whole(tmp_path: Path, family: str, tied: bool) -> None:
    tiny_model(family, tied, seed=4).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model, files = open_model(str(tmp_path), torch.float32, CPU)
    assert files is not None and all(p.device.type == "meta" for p in model.parameters())
    assert all(b.device.type == "cpu" for b in model.buffers())
    for number, layer in enumerate(model.model.layers):
        files.fill(layer, f"model.layers.{number}", CPU)
    files.fill(model, "", CPU)
    whole = load_model(str(tmp_path), torch.float32, CPU)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    expected = dict(whole.named_parameters())
    assert {n: torch.equal(p, expected[n]) for n, p in model.named_parameters()} == dict.fromkeys(expected, True)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, whole.eval()(ids).logits)
    assert model.generation_config.eos_token_id == whole.generation_config.eos_token_id


def test_files_with_other_names_are_loaded_as_a_whole(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert WeightFiles(tmp_path).holds_all_of(tiny_model())
    # Transformers knows how to read names without the prefix; this module does not have to.
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    assert not WeightFiles(tmp_path).holds_all_of(tiny_model())
    model, files = open_model(str(tmp_path), torch.float32, CPU)
    assert files is None and all(p.device.type == "cpu" for p in model.parameters())


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + bytes(20))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_model(str(tmp_path), torch.float32, CPU)
