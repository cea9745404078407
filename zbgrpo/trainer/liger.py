"""Liger's kernels for the parts of a layer that are not matrix products: norms, rotary embedding, gated activation."""

from __future__ import annotations

from typing import Any

import torch

from zbgrpo.errors import ConfigError


def use_liger(model: Any, device: torch.device) -> None:
    """Replace those parts of a Hugging Face model in place. The loss stays this project's own.

    Raises ConfigError where the package is not installed, without a GPU, and for a model that it has no kernels for.
    """
    if device.type != "cuda":
        raise ConfigError("trainer.liger_kernels: they need a GPU; leave it off")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(f"trainer.liger_kernels: {error}; install liger-kernel, or leave it off") from None

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"trainer.liger_kernels: it has no kernels for models of type {kind}; leave it off")
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
