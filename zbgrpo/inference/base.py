"""What a generation engine promises to the producer loop. Suits engines that step and engines that stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Protocol

import numpy as np
from torch import Tensor

from zbgrpo.types import FinishReason


class GenerationRequest(NamedTuple):
    """All responses to one prompt. `key` is the caller's name for it."""

    key: int
    prompt_ids: Sequence[int]
    streams: Sequence[int]
    """One 64-bit number per response that decides all its random numbers; see `sampling.stream`."""
    temperature: float
    """0 is greedy."""
    max_new_tokens: Optional[Sequence[int]] = None
    """Most tokens of each response, where that is less than the engine's own limit."""


class Response(NamedTuple):
    """One finished response."""

    key: int
    response_index: int
    """Which of the request's responses."""
    token_ids: np.ndarray  # int32 [L], with the end token or the whole token that completed a stop string
    logprobs: np.ndarray  # float32 [L], log-softmax(logits / temperature) over the full vocabulary
    spans: list[tuple[int, int]]
    """(first token, policy version), ascending; the first starts at 0."""
    finish: FinishReason


class InferenceBackend(Protocol):
    """Decode slots, filled and refilled one response at a time.

    A response keeps its tokens whatever happens to its neighbours, and what it samples depends only on its prompt,
    its stream and the weights. New weights take effect between two tokens; every token knows its version.
    """

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; its responses start as slots become free, in order of submission."""

    def step(self) -> list[Response]:
        """Do a bounded amount of work and return the responses that it finished."""

    def take_lost(self) -> list[int]:
        """Keys of requests that were given up since the last call, through no fault of theirs: the engine died while
        it had some of their responses in work. Nothing more comes of them; ask again for what is still wanted."""

    def live_weights(self) -> Mapping[str, Tensor]:
        """The tensors that generation uses, by their Hugging Face names, tied ones once."""

    def weights_changed(self, version: int) -> list[str]:
        """The live weights are now those of `version`: responses that have not started prefill again.

        Returns the digest (`weights.manifest.digest`) of what each further process of the engine has read, where there
        are such and they have taken it."""

    @property
    def num_slots(self) -> int:
        """Responses that can be decoded together."""

    @property
    def num_active(self) -> int:
        """Responses being decoded."""

    @property
    def num_unstarted(self) -> int:
        """Responses submitted and not started."""

    def close(self) -> None:
        """Free what the engine holds."""
