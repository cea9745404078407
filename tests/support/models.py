"""Tiny random models, a character tokenizer, and groups of responses, for tests that need real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zbgrpo.types import FinishReason, GroupPayload

SPECIAL = ["<pad>", "<eos>", "<eot>", "<unk>"]
PAD, EOS, EOT, UNKNOWN = range(4)
BYTES = ["<0xC3>", "<0xA9>"]  # together the character é
CHARACTERS = list("abcdefghijklmnopqrstuvwxyz0123456789 \n.,<>/=")
PIECES = ["ab", "cd", "ing", "the", "xyz", "q7!", "</", "</a", "er>", " =", "..", "\n\n", "he", "on", "w?w", "k#k"]
VOCABULARY = [*SPECIAL, *BYTES, *CHARACTERS, *PIECES]
MODEL_VOCABULARY = 72  # larger than the tokenizer's, as in many real models


def tiny_tokenizer(pad_is_eos: bool = False) -> Any:
    """One token per character; the longer pieces occur in generated text only. Decodes to exactly the pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(VOCABULARY)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token="<eos>" if pad_is_eos else "<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<eot>"],
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    family: str = "qwen2",
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 2,
    hidden_size: int = 64,
) -> Any:
    """A random model of a real architecture with grouped query attention and a peaked distribution."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    kind = {"qwen2": Qwen2Config, "llama": LlamaConfig}[family]
    config = kind(
        vocab_size=MODEL_VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=1.6 / hidden_size**0.5,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases and norms, which start at 0 and 1
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def perturbed(model: Any, seed: int, scale: float = 0.02) -> Any:
    """A copy with other weights nearby."""
    generator = torch.Generator().manual_seed(seed)
    result = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return result


def log_softmax_of(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """Full log-softmax at every response token, [L, V], by one plain forward pass of one sequence."""
    ids = torch.tensor([[*map(int, prompt), *map(int, response)]])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)


def logprobs_of(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """Log-prob of every response token, [L], differentiable."""
    full = log_softmax_of(model, prompt, response, temperature)
    return full[torch.arange(len(response)), torch.as_tensor([int(t) for t in response])]


def random_group(
    model: Any,
    generator: np.random.Generator,
    *,
    num_responses: int,
    temperature: float | Callable[[np.ndarray], float],
    version: int,
    noise: float = 0.0,
    longest: int = 10,
    oldest_lag: int = 0,
) -> GroupPayload:
    """Random tokens with the model's log-probs plus noise, random rewards, spans and finish reasons.

    The last token of every response has lag 0 to `oldest_lag // 2`, the first one up to `oldest_lag`.
    """
    prompt = generator.integers(4, len(VOCABULARY), generator.integers(2, 9))
    heat = temperature if isinstance(temperature, float) else temperature(prompt)
    lengths = generator.integers(1, longest + 1, num_responses)
    responses = [generator.integers(0, MODEL_VOCABULARY, n) for n in lengths]
    spans = []
    for number, length in enumerate(lengths.tolist()):
        newest = version - int(generator.integers(0, oldest_lag // 2 + 1))
        oldest = version - int(generator.integers(0, oldest_lag + 1))
        if length > 1 and oldest < newest:
            spans += [(number, 0, oldest), (number, int(generator.integers(1, length)), newest)]
        else:
            spans.append((number, 0, newest))
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        logprobs = np.concatenate([logprobs_of(exact, prompt, r, heat).numpy() for r in responses])
    right = generator.integers(0, 2, num_responses)
    return GroupPayload(
        prompt.astype(np.int32),
        np.concatenate(responses).astype(np.int32),
        (logprobs + noise * generator.standard_normal(len(logprobs))).astype(np.float32),
        lengths.astype(np.int32),
        (10.0 * right + generator.random(num_responses)).astype(np.float32),
        np.ones(num_responses, np.float32),
        right.astype(np.float32),
        generator.choice([FinishReason.END_TOKEN, FinishReason.LENGTH], num_responses, p=[0.7, 0.3]).astype(np.int32),
        np.array(spans, np.int32).reshape(-1, 3),
    )


def responses_of(group: GroupPayload) -> list[np.ndarray]:
    """Token ids of each response."""
    return np.split(group.response_ids, np.cumsum(group.lengths)[:-1])
