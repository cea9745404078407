"""Models and tokenizers in the Hugging Face format: read from a folder or hub name, written as plain folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbgrpo.errors import ModelError


def load_model(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A causal language model in this dtype; raises `ModelError` that names the path and the reason."""
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    dtype_name = "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"
    _require_folder(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", **{dtype_name: dtype})
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"model {path}: cannot be loaded: {_first_line(error)}") from error
    _refuse_unsupported(model.config, path)
    return _without_dropout(model.to(device))


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub name; raises `ModelError`."""
    from transformers import AutoTokenizer

    _require_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"tokenizer {path}: cannot be loaded: {_first_line(error)}; name another with --tokenizer-path"
        ) from error


def save_model(folder: Path, model: Any, tokenizer: Any, weights: dict[str, torch.Tensor]) -> None:
    """Write a folder that `AutoModelForCausalLM` and vLLM load. `weights` by Hugging Face names, tied ones once."""
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def _require_folder(path: str) -> None:
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not Path(path).expanduser().is_dir():
        raise ModelError(
            f"model {path}: no such folder; give a folder with config.json and weights, or a hub name (-m)"
        )


def _refuse_unsupported(config: Any, path: str) -> None:
    """Features that would make the trainer's log-probs differ from the model's without a word."""
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"model {path}: {name} is not supported, its log-probs would be wrong")
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise ModelError(f"model {path}: sliding-window attention layers are not supported")


def _without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
