"""A folder to run in: a model with random weights, its tokenizer, rows, and a reward that tells responses apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

REWARD = '''
def distinct(response, **_):
    """Share of distinct characters, and a little for every character."""
    return len(set(response)) / max(1, len(response)) + 1e-4 * len(response)
'''
_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}= {% endif %}"
)
_SPECIAL = ["<pad>", "<eos>", "<unk>"]
_CHARACTERS = list("abcdefghijklmnopqrstuvwxyz0123456789 \n.,<>/=+")


class Size(NamedTuple):
    """Of a decoder, and of the run with it."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    num_steps: int
    num_rows: int
    flags: str


SIZES = {
    "135m": Size(
        576, 1536, 30, 9, 3, 49_152, 8, 1000,
        "-g 8 -tbs 32 -tMbs 16 -tmbs 32 -imbs 32 -ibs 64 -mnt 192 -mpt 64 -lr 1e-4 trainer.logprob_chunk_tokens=2048",
    ),
    "tiny": Size(
        48, 96, 2, 4, 2, 512, 6, 100,
        "-g 4 -tbs 2 -tMbs 2 -tmbs 4 -imbs 2 -ibs 4 -mnt 8 -mpt 64 -lr 1e-3",
    ),
}  # fmt: skip
"""135m has the sizes of SmolLM2-135M."""


def make(folder: Path, size: Size, seed: int = 0) -> Any:
    """Fill the folder; returns the model, on the CPU in float32."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    _tokenizer(size.vocabulary).save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = ({"messages": {"role": "user", "content": f"{n}+{n % 7}"}, "gt_answer": "1"} for n in range(size.num_rows))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


def _tokenizer(vocabulary: int) -> Any:
    """One token per character of a prompt; every token of the vocabulary decodes to a piece of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*_SPECIAL, *_CHARACTERS]
    pieces += [f"{number:x} " for number in range(vocabulary - len(pieces))]
    fast = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
