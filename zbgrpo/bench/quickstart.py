"""Makes the quickstart's task and model, without any download: `python -m zbgrpo.bench.quickstart FOLDER [--seed N]`.

The model is a tiny Qwen2 that a short supervised warm-up teaches to add two numbers of two digits, from worked examples
about half of which end in a slip: the stated answer is ten too low. So the model knows how to add and is still right
only half of the time, on any question, seen or not. That is what GRPO can mend, for nearly every group has right and
wrong responses. A policy that is always right on some questions and never on the others would leave it no signal.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zbgrpo.data.arithmetic import Pair, make_row, make_splits, worked_response
from zbgrpo.data.chat import PromptRenderer

if TYPE_CHECKING:
    import torch

RUN_FLAGS: list[str] = [
    "-rt",
    "think_answer_tags",
    "-g",
    "8",
    "-ibs",
    "16",
    "-imbs",
    "16",
    "-tbs",
    "16",
    "-tMbs",
    "16",
    "-tmbs",
    "64",
    "-mpt",
    "32",
    "-mnt",
    "24",
    "-lr",
    "1e-3",
    "-kl",
    "0",
    "--precision",
    "fp32",
    "--max-steps",
    "128",
    "--max-staleness",
    "2",
]
"""Flags of the quickstart run, beside the paths and the roles."""

SAMPLING_TEMPERATURE = 0.6
"""Temperature of every accuracy here; that of evaluation in a run."""

ANSWER_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PAD, END, USER, ASSISTANT = "<|endoftext|>", "<|im_end|>", "<|user|>", "<|assistant|>"

# System messages are left out: the model is too small to follow one, and every prompt stays twelve tokens long.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# How the tokenizers of the Qwen2 family cut text; transformers rebuilds it by itself for a model of this type.
_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MERGED_WORDS = ("What", "Ġis", "Ġ+")  # one token each, so that prompts are short; Ġ stands for a space
_SLIP = 10
_NUM_VALIDATION = 256
_NUM_SAMPLES = 4  # responses per validation pair when the accuracy decides: a standard error of 0.016
_STEPS_PER_ROUND = 5
_MAX_RESPONSE_TOKENS = 16  # a worked response has at most 14, with the end token


class WarmUp(NamedTuple):
    """Settings of the supervised warm-up. The defaults are the quickstart's; tests shorten it."""

    num_steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 5e-3
    slip_share: float = 0.53
    target: tuple[float, float] = (0.42, 0.48)
    """Sampled accuracy on the validation pairs that ends the warm-up."""
    max_rounds: int = 16
    """Most corrections, each of a few steps, if the accuracy is outside the target."""
    correction_rate: float = 5e-5
    """Learning rate of the corrections; halved whenever one jumps over the target."""


class Prepared(NamedTuple):
    """What `prepare` wrote, and the sampled accuracy of the model."""

    model: Path
    train: Path
    heldout: Path
    validation_accuracy: float
    heldout_accuracy: float
    seconds: float


def prepare(folder: str | Path, seed: int = 0, warm_up: WarmUp | None = None, quiet: bool = False) -> Prepared:
    """Writes `model/`, `train.jsonl` and `heldout.jsonl` into `folder` (made if missing, files replaced).

    The same seed gives the same data everywhere, and the same model on machines that round alike.
    """
    import torch

    started = time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            print(f"quickstart: {text}", flush=True)

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    splits = make_splits(seed)
    train, heldout = folder / "train.jsonl", folder / "heldout.jsonl"
    _write_rows(train, splits.train)
    _write_rows(heldout, splits.heldout)
    say(f"{len(splits.train)} training and {len(splits.heldout)} held-out questions, such as 'What is 17 + 25?'")
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        say(
            f"a Qwen2 model of {sum(weight.numel() for weight in model.parameters()):,} parameters, supervised warm-up:"
        )
        pupil = _Pupil(model, tokenizer, splits.warmup, seed)
        validation_accuracy = _teach(pupil, warm_up or WarmUp(), say)
        heldout_accuracy = pupil.accuracy(splits.heldout)
    _save(folder / "model", model, tokenizer)
    seconds = time.monotonic() - started
    say(f"held-out accuracy after the warm-up {heldout_accuracy:.2f}; all in {folder}, after {seconds:.0f} s")
    return Prepared(folder / "model", train, heldout, validation_accuracy, heldout_accuracy, seconds)


def make_tokenizer() -> Any:
    """A byte-level tokenizer that gives back any text (in form NFC); digits and answer tags are one token each."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [(word[:end], word[end]) for word in _MERGED_WORDS for end in range(1, len(word))]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([PAD, END, USER, ASSISTANT])
    # Not special: skip_special_tokens must leave the tags in the text, for the reward reads them.
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ANSWER_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, unk_token=PAD, chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: Any) -> Any:
    """The untrained model: float32, tied embeddings, weights from torch's global generator."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 16) * 16,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def _save(folder: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Releases of transformers before and after 5 do not know each other's generic class; both know this one.
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class _Pupil:
    """The model with what it needs to be taught and examined."""

    def __init__(self, model: Any, tokenizer: Any, pairs: Sequence[Pair], seed: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.validation, self.examples = list(pairs[:_NUM_VALIDATION]), list(pairs[_NUM_VALIDATION:])
        self._renderer = PromptRenderer(tokenizer, None, max_prompt_tokens=32)
        self._random = np.random.Generator(np.random.Philox(key=seed))
        self._optimizer: torch.optim.Optimizer
        self.forget_momentum()

    def forget_momentum(self) -> None:
        """Starts with a fresh optimizer."""
        import torch

        self._optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98))

    def step(self, batch_size: int, learning_rate: float, slip_share: float) -> None:
        """One optimizer step on `batch_size` worked examples, of which `slip_share` on average end in a slip."""
        import torch

        self._optimizer.param_groups[0]["lr"] = learning_rate
        ids, labels = self._batch(batch_size, slip_share)
        loss = self.model(input_ids=ids, labels=labels).loss
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def accuracy(self, pairs: Sequence[Pair]) -> float:
        """Share of right answers in the right form, one sampled response per pair."""
        import torch

        prompts = torch.tensor(self._prompts(pairs))  # all of one length, for every operand has two digits
        with torch.no_grad():
            sequences = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=SAMPLING_TEMPERATURE,
                top_k=0,
                max_new_tokens=_MAX_RESPONSE_TOKENS,
            )
        responses = self.tokenizer.batch_decode(sequences[:, prompts.shape[1] :], skip_special_tokens=True)
        endings = [f"</think><answer>{pair.a + pair.b}</answer>" for pair in pairs]
        right = [
            text.startswith("<think>") and text.endswith(end) for text, end in zip(responses, endings, strict=True)
        ]
        return sum(right) / len(pairs)

    def _batch(self, batch_size: int, slip_share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels, int64 [batch_size, longest], padded on the right; only responses have labels."""
        import torch

        chosen = [self.examples[index] for index in self._random.integers(len(self.examples), size=batch_size)]
        swapped = self._random.random(batch_size) < 0.5
        pairs = [Pair(pair.b, pair.a) if swap else pair for pair, swap in zip(chosen, swapped, strict=True)]
        slips = self._random.random(batch_size) < slip_share
        texts = [
            worked_response(pair, pair.a + pair.b - _SLIP * bool(slip)) + END
            for pair, slip in zip(pairs, slips, strict=True)
        ]
        responses = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts = self._prompts(pairs)
        longest = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
        ids = torch.full((batch_size, longest), self.tokenizer.pad_token_id)
        labels = torch.full_like(ids, -100)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            end = len(prompt) + len(response)
            ids[row, :end] = torch.tensor(prompt + response)
            labels[row, len(prompt) : end] = torch.tensor(response)
        return ids, labels

    def _prompts(self, pairs: Sequence[Pair]) -> list[list[int]]:
        return self._renderer.render_batch([[make_row(pair)["messages"]] for pair in pairs])


def _teach(pupil: _Pupil, warm_up: WarmUp, say: Callable[[str], None]) -> float:
    """The warm-up: a main part of fixed length, then short corrections; returns the last validation accuracy.

    The share of slips among the examples sets how often the model is right, for it learns to be as unsure as they are.
    What chance leaves is corrected at the end, by examples all right or all wrong, until the accuracy is in the target.
    """
    for step in range(1, warm_up.num_steps + 1):
        pupil.step(warm_up.batch_size, warm_up.learning_rate * _schedule(step, warm_up.num_steps), warm_up.slip_share)
        if step % max(1, warm_up.num_steps // 4) == 0:
            say(f"  step {step} of {warm_up.num_steps}: sampled accuracy {pupil.accuracy(pupil.validation):.2f}")
    low, high = warm_up.target
    rate = warm_up.correction_rate
    too_high: bool | None = None
    accuracy = pupil.accuracy(pupil.validation * _NUM_SAMPLES)
    for _ in range(warm_up.max_rounds):
        if low <= accuracy <= high:
            break
        if too_high is not None and too_high != (accuracy > high):
            rate /= 2
        too_high = accuracy > high
        pupil.forget_momentum()
        for _ in range(_STEPS_PER_ROUND):
            pupil.step(warm_up.batch_size, rate, slip_share=float(too_high))
        accuracy = pupil.accuracy(pupil.validation * _NUM_SAMPLES)
        say(f"  corrected: sampled accuracy {accuracy:.2f}")
    return accuracy


def _schedule(step: int, num_steps: int) -> float:
    """Factor of the learning rate: up over 20 steps, then a cosine down to 0."""
    return min(1.0, step / 20) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more threads, and lose a lot where another process wants the core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_rows(file: Path, pairs: Sequence[Pair]) -> None:
    file.write_text("".join(json.dumps(make_row(pair)) + "\n" for pair in pairs), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of `prepare`."""
    parser = argparse.ArgumentParser(
        prog="python -m zbgrpo.bench.quickstart", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", help="where model/, train.jsonl and heldout.jsonl go")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    prepare(options.folder, options.seed)


if __name__ == "__main__":
    main()
