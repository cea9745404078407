"""Models and tokenizers in the Hugging Face format: read from a folder or hub name, written as plain folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbgrpo.checkpoint.weight_files import WeightFiles, without_weights
from zbgrpo.errors import ModelError


def load_model(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A causal language model in this dtype, without dropout.

    `path` is a hub name or a folder: one that starts with `.`, `/` or `~`, or has more than one `/`, is a folder.
    Raises `ModelError`, which names the path and the reason, also for files that lack some of the model's weights and
    for a model that the engine would generate or train wrongly.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    source = _source("model", path, "-m")
    try:
        with _quiet_transformers():
            model, found = AutoModelForCausalLM.from_pretrained(
                source,
                attn_implementation="sdpa",
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **{_dtype_name(): dtype},
                **({"config": _config(source)} if transformers_is_4() else {}),
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"model {path}: cannot be loaded: {_reason(error, source)}") from error
    _refuse_incomplete(found, path)
    _refuse_unsupported(model, path)
    return _without_dropout(model.to(device))


def open_model(path: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, WeightFiles | None]:
    """The model without its weights, and the files to fill it from module by module; or, where its files do not allow
    that (a hub name, another format), the whole model and None. Raises what `load_model` raises."""
    from transformers import AutoModelForCausalLM

    folder = Path(_source("model", path, "-m"))
    if not folder.is_dir():
        return load_model(path, dtype, device), None
    files = WeightFiles(folder)
    try:
        with _quiet_transformers(), without_weights():
            model = AutoModelForCausalLM.from_config(
                _config(str(folder)), attn_implementation="sdpa", **{_dtype_name(): dtype}
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"model {path}: cannot be loaded: {_reason(error, str(folder))}") from error
    if not files.holds_all_of(model):
        return load_model(path, dtype, device), None
    with _quiet_transformers():
        model.generation_config = _generation_config(folder) or model.generation_config
    _refuse_unsupported(model, path)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return _without_dropout(model), files


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(str(folder)) if (folder / "generation_config.json").is_file() else None


def _config(source: str) -> Any:
    """The configuration of a model. Folders written by transformers 5 keep the base of rotary embeddings where a 4.x
    does not look for it, and would use another one without a word."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    rope = getattr(config, "rope_parameters", None)
    if transformers_is_4() and isinstance(rope, dict):
        config.rope_theta = rope.get("rope_theta", config.rope_theta)
        if rope.get("rope_type", "default") != "default":
            config.rope_scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return config


def _dtype_name() -> str:
    return "torch_dtype" if transformers_is_4() else "dtype"


def transformers_is_4() -> bool:
    """Whether the installed transformers is a 4.x, whose interfaces differ here and there."""
    import transformers

    return transformers.__version__.startswith("4.")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub name, told apart as in `load_model`; raises `ModelError`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = _source("tokenizer", path, "--tokenizer-path, without it -m")
    try:
        with _quiet_transformers():
            try:
                return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            except (ValueError, AttributeError):
                if not transformers_is_4():
                    raise
                # Written by transformers 5, whose class and format of special tokens a 4.x does not know.
                return PreTrainedTokenizerFast.from_pretrained(source, extra_special_tokens={})
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelError(
            f"tokenizer {path}: cannot be loaded: {_reason(error, source)}; name another with --tokenizer-path"
        ) from error


def save_model(folder: Path, model: Any, tokenizer: Any, weights: dict[str, torch.Tensor]) -> None:
    """Write a folder that `AutoModelForCausalLM` and vLLM load. `weights` by Hugging Face names, tied ones once."""
    with _quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no notices of transformers inside: the terminal is that of the run."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _source(kind: str, path: str, flag: str) -> str:
    """What transformers is given for a path, `~` expanded; a folder that is missing is an error."""
    source = str(Path(path).expanduser()) if path.startswith("~") else path
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if is_local and not Path(source).is_dir():
        content = "config.json and weights" if kind == "model" else "tokenizer files"
        raise ModelError(f"{kind} {path}: no such folder; give a folder with {content}, or a hub name ({flag})")
    return source


def _refuse_incomplete(found: dict[str, Any], path: str) -> None:
    """Weights that the files lack, or have in another shape, would be random numbers."""
    mismatched = [name for name, *_ in found["mismatched_keys"]]
    for names, problem in ((found["missing_keys"], "lack"), (mismatched, "do not fit config.json in the shape of")):
        if names:
            first, more = min(names), f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"model {path}: its files {problem} {first}{more}")


def _refuse_unsupported(model: Any, path: str) -> None:
    """Features that would make the log-probs of generation or training differ from the model's without a word."""
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"model {path}: {type(model).__name__} keeps a recurrent state, which is not supported")
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"model {path}: {name} is not supported, its log-probs would be wrong")
    layer_types = getattr(config, "layer_types", None)
    others = sorted(set(layer_types or ()) - {"full_attention"})
    if others:
        raise ModelError(f"model {path}: layers of type {', '.join(others)} are not supported, only full_attention")
    # Some families have no list of layer types: there, a window holds for all layers.
    window = getattr(config, "sliding_window", None)
    if layer_types is None and window is not None and getattr(config, "use_sliding_window", None) is not False:
        raise ModelError(f"model {path}: sliding-window attention (sliding_window {window}) is not supported")


def _without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


def _reason(error: BaseException, source: str) -> str:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return first_line if Path(source).is_dir() else f"{first_line} (taken for a hub name: there is no such folder)"
