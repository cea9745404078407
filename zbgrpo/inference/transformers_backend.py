"""The `transformers` engine: continuous decoding, slot by slot, over any Hugging Face causal language model.

    submit -> waiting groups -> prefill once per group -> responses start as slots become free
           -> one decode step for all active slots -> finished responses leave at once

New weights take effect between two steps: active responses keep their cache and go on, each token remembers the
version that sampled it; groups with unstarted responses prefill again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zbgrpo.config.schema import InferenceConfig
from zbgrpo.inference.base import GenerationRequest, Response
from zbgrpo.inference.sampling import sample, uniforms
from zbgrpo.inference.slots import PrefillCache, Prefix, SlotCache, install_slot_attention
from zbgrpo.inference.stopping import StopRule, model_end_ids
from zbgrpo.types import FinishReason
from zbgrpo.weights.manifest import named_weights

_PREFILL_TOKENS = 8192  # padded tokens of one prefill batch


@dataclass
class _Group:
    request: GenerationRequest
    started: int = 0
    prefix: Prefix | None = None
    logits: Tensor | None = None  # [V], at the last prompt token


class _Slot(NamedTuple):
    """A response being decoded; what changes with every token is in arrays by slot. It does not keep its group: the
    prompt's keys and values go when the group's last response has started."""

    key: int
    response_index: int
    spans: list[tuple[int, int]]


class TransformersBackend:
    """See the module's text and `InferenceBackend`."""

    def __init__(
        self, model: Any, tokenizer: Any, config: InferenceConfig, stop: Sequence[str], max_prompt_tokens: int
    ) -> None:
        """`model` is on its device already and belongs to this engine from now on."""
        self._model = model.eval()
        install_slot_attention(model)
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._max_new, self._top_k, self._top_p = config.max_new_tokens, config.top_k, config.top_p
        self._rule = StopRule(tokenizer, model.config.vocab_size, model_end_ids(model, tokenizer), stop)
        self._num_slots = config.inference_microbatch_size * config.num_generations
        self._cache = SlotCache(self._num_slots, max_prompt_tokens + config.max_new_tokens)
        self._waiting: deque[_Group] = deque()
        self._slots: list[_Slot] = []
        self._version, self._version_is_new = -1, False
        self._streams = np.zeros(self._num_slots, dtype=np.uint64)
        self._temperatures = np.ones(self._num_slots)
        self._lengths = np.zeros(self._num_slots, dtype=np.int64)  # tokens of the response so far
        self._limits = np.zeros(self._num_slots, dtype=np.int64)  # most tokens of the response
        self._prompts = np.zeros(self._num_slots, dtype=np.int64)
        self._last = np.zeros(self._num_slots, dtype=np.int64)  # the newest token
        self._tokens = np.zeros((self._num_slots, self._max_new), dtype=np.int32)
        self._logprobs = np.zeros((self._num_slots, self._max_new), dtype=np.float32)

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_active(self) -> int:
        return len(self._slots)

    @property
    def num_unstarted(self) -> int:
        return sum(len(group.request.streams) - group.started for group in self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        if len(request.streams) == 0:
            raise ValueError(f"request {request.key} asks for no response: its streams are empty")
        self._waiting.append(_Group(request))

    def take_lost(self) -> list[int]:
        return []  # it lives and dies with this process

    def live_weights(self) -> Mapping[str, Tensor]:
        return dict(named_weights(self._model))

    def weights_changed(self, version: int) -> list[str]:
        self._version, self._version_is_new = version, True
        for group in self._waiting:
            group.prefix = group.logits = None
        return []

    def close(self) -> None:
        self._waiting.clear()
        self._slots.clear()

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """Start what fits, then decode one token of every active response."""
        finished = self._start()
        if self._slots:
            if self._version_is_new:
                self._begin_spans()
            logits = self._decode()
            finished += self._append(range(len(self._slots)), logits)
        return finished

    # ------------------------------------------------------------------------------------------ starting

    def _start(self) -> list[Response]:
        finished: list[Response] = []
        while self._waiting and len(self._slots) < self._num_slots:
            self._prefill()
            first = len(self._slots)
            rows = []
            while self._waiting and self._waiting[0].prefix is not None and len(self._slots) < self._num_slots:
                group = self._waiting[0]
                assert group.logits is not None and group.prefix is not None
                self._occupy(group)
                rows.append(group.logits)
                if group.started == len(group.request.streams):
                    self._waiting.popleft()
            finished += self._append(range(first, len(self._slots)), torch.stack(rows))
        return finished

    def _occupy(self, group: _Group) -> None:
        slot, request = len(self._slots), group.request
        assert group.prefix is not None
        self._cache.load(slot, group.prefix)
        self._streams[slot] = np.uint64(request.streams[group.started])
        self._temperatures[slot] = request.temperature
        self._prompts[slot], self._lengths[slot] = len(request.prompt_ids), 0
        own = self._max_new if request.max_new_tokens is None else request.max_new_tokens[group.started]
        self._limits[slot] = min(own, self._max_new)
        self._slots.append(_Slot(request.key, group.started, [(0, self._version)]))
        group.started += 1

    def _prefill(self) -> None:
        """Prefill the waiting groups whose responses fit into the free slots, as one batch padded on the right.

        Attention is causal, so padding behind a prompt changes nothing in it.
        """
        free, longest = self._num_slots - len(self._slots), 0
        batch: list[_Group] = []
        for group in self._waiting:
            longest = max(longest, len(group.request.prompt_ids))
            if free <= 0 or (batch and longest * (len(batch) + 1) > _PREFILL_TOKENS):
                break
            free -= len(group.request.streams) - group.started
            if group.prefix is None:
                batch.append(group)
        if not batch:
            return
        lengths = [len(group.request.prompt_ids) for group in batch]
        ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
        for row, group in enumerate(batch):
            ids[row, : lengths[row]] = torch.as_tensor(group.request.prompt_ids)
        cache = PrefillCache()
        hidden = self._model.get_decoder()(
            input_ids=ids.to(self._device), past_key_values=cache, use_cache=True, attention_mask=None
        ).last_hidden_state
        last = hidden[torch.arange(len(batch), device=self._device), torch.as_tensor(lengths, device=self._device) - 1]
        logits = self._model.get_output_embeddings()(last).float()
        for row, group in enumerate(batch):
            group.prefix, group.logits = cache.prefix(row, lengths[row]), logits[row]

    # ------------------------------------------------------------------------------------------ decoding

    def _decode(self) -> Tensor:
        num = len(self._slots)
        # The newest token of each response is not in the cache yet: it goes behind its prompt and earlier tokens.
        positions = self._prompts[:num] + self._lengths[:num] - 1
        width = int(positions.max()) + 1
        device_positions = torch.from_numpy(positions).to(self._device)
        self._cache.begin_step(device_positions, width)
        visible = torch.arange(width, device=self._device)[None] <= device_positions[:, None]
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(~visible, torch.finfo(self._dtype).min)
        output = self._model(
            input_ids=torch.from_numpy(self._last[:num, None]).to(self._device),
            position_ids=device_positions[:, None],
            past_key_values=self._cache,
            attention_mask=mask[:, None, None, :],
            use_cache=True,
        )
        return output.logits[:, -1].float()

    def _begin_spans(self) -> None:
        """The next token of every response is of a version that those before it may not have."""
        for slot, length in zip(self._slots, self._lengths[: len(self._slots)].tolist(), strict=True):
            if slot.spans[-1][1] != self._version:
                slot.spans.append((length, self._version))
        self._version_is_new = False

    def _append(self, slots: range, logits: Tensor) -> list[Response]:
        """Sample one token for each of these slots (rows of logits) and free the slots that have finished."""
        part = slice(slots.start, slots.stop)
        lengths = self._lengths[part]  # a view
        draws = uniforms(self._streams[part], lengths)
        chosen, values = sample(logits, self._temperatures[part], draws, self._top_k, self._top_p)
        tokens = chosen.cpu().numpy()
        self._last[part] = tokens
        numbers = np.arange(slots.start, slots.stop)
        self._tokens[numbers, lengths], self._logprobs[numbers, lengths] = tokens, values.cpu().numpy()
        lengths += 1
        ended, full = self._rule.is_end(tokens), lengths == self._limits[part]
        reasons = {row: FinishReason.LENGTH for row in np.flatnonzero(full).tolist()}
        for row in np.flatnonzero(self._rule.may_complete(tokens) & ~ended).tolist():
            if self._rule.has_stop_string(self._tokens[slots[row], : lengths[row]]):
                reasons[row] = FinishReason.STOP_STRING
        reasons |= {row: FinishReason.END_TOKEN for row in np.flatnonzero(ended).tolist()}
        # From the last one, because freeing a slot moves the last into its place.
        return [self._free(slots[row], reasons[row]) for row in sorted(reasons, reverse=True)]

    def _free(self, number: int, reason: FinishReason) -> Response:
        """Take a response out; the last slot moves into its place."""
        slot, last, length = self._slots[number], len(self._slots) - 1, int(self._lengths[number])
        tokens, logprobs = self._tokens[number, :length].copy(), self._logprobs[number, :length].copy()
        if number != last:
            self._cache.move(last, number, int(self._prompts[last] + self._lengths[last]) - 1)
            self._slots[number] = self._slots[last]
            for array in (self._streams, self._temperatures, self._lengths, self._limits, self._prompts, self._last):
                array[number] = array[last]
            moved = int(self._lengths[last])
            for matrix in (self._tokens, self._logprobs):
                matrix[number, :moved] = matrix[last, :moved]
        self._slots.pop()
        return Response(slot.key, slot.response_index, tokens, logprobs, slot.spans, reason)
