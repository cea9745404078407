"""The policy: a causal language model and the log-probs of packed responses, as one module that can be spread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zbgrpo.algorithms.logprobs import token_logprobs
from zbgrpo.algorithms.packing import Microbatch
from zbgrpo.trainer import attention
from zbgrpo.trainer.layout import ALONE, Layout, local, vocabulary_shard


class Policy(nn.Module):
    """Everything that uses the model's weights happens inside `forward`, so that weights that are spread over ranks are
    gathered before it and let go behind it."""

    def __init__(
        self, model: Any, dtype: torch.dtype, chunk_tokens: int, layout: Layout = ALONE, kernel: str = "sdpa"
    ) -> None:
        """`dtype` is the one that the model computes in, `kernel` one of `attention.choose_kernel`."""
        super().__init__()
        attention.install(model)
        self._kernel = kernel
        self.model = model
        self._dtype, self._chunk_tokens = dtype, chunk_tokens
        self._is_last_stage = layout.is_last_stage
        self._shard = None
        if layout.is_last_stage:
            self._shard = vocabulary_shard(len(model.get_output_embeddings().weight), layout)

    def forward(self, batch: Microbatch, with_entropy: bool = True, received: Tensor | None = None) -> Any:
        """Log-probs of the response tokens at their sampling temperature, and entropies: both [T].

        On a pipeline stage, `received` [B, N, H] comes from the stage before, and all but the last one return the
        hidden states behind their layers instead.
        """
        inputs = {"input_ids": batch.input_ids} if received is None else {"inputs_embeds": received}
        hidden = self.model.get_decoder()(
            position_ids=batch.position_ids,
            use_cache=False,
            **attention.attention_arguments(batch, self._kernel, self._dtype),
            **inputs,
        ).last_hidden_state
        if not self._is_last_stage:
            return hidden
        head = self.model.get_output_embeddings()
        return token_logprobs(
            hidden.flatten(0, 1)[batch.rows],
            local(head.weight),
            batch.targets,
            batch.temperature,
            self._chunk_tokens,
            None if head.bias is None else local(head.bias),
            with_entropy,
            self._shard,
        )
