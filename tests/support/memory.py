"""Memory that a rank really takes: its resident set, which the kernel counts, and a model that is large enough to see.

Resident memory, and not tensors counted by a hook of the allocator: it has everything in it, also what libraries take
for communication. It is exact to some 20 MiB because ALLOCATOR makes malloc give every large tensor its own mapping,
which the system gets back as soon as the tensor is gone. What a process has before the model is subtracted.
"""

from __future__ import annotations

import gc
import json
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zbgrpo.config.load import load_config
from zbgrpo.config.schema import RunConfig
from zbgrpo.types import FinishReason, GroupPayload

ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_MMAP_MAX_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
"""Environment of the processes; malloc reads it when they start."""

MODEL = {
    "vocab_size": 30000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
"""With 6 layers and tied weights: 98 million parameters, a third of them in the embedding."""


class Case(NamedTuple):
    """A layout and a microbatch, all of whose prompts and responses are as long as they may be."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    precision: str = "fp32"
    kl: bool = False
    tied: bool = True
    checkpointing: bool = False
    responses: int = 2
    """Of a group, and of a microbatch; two of these make a minibatch. The first minibatch of a step has one here."""
    prompt: int = 64
    response: int = 128
    layers: int = 6

    @property
    def config(self) -> RunConfig:
        return load_config(
            [
                *("-t", str(self.dp * self.pp * self.tp), "-i", "1", "-zero", str(self.zero)),
                *("-tp", str(self.tp), "-pp", str(self.pp), "--precision", self.precision),
                *("-g", str(self.responses), "-tmbs", str(self.responses), "-tMbs", "2", "-tbs", "4"),
                *("-mpt", str(self.prompt), "-mnt", str(self.response), "-kl", "0.1" if self.kl else "0"),
                f"trainer.gradient_checkpointing={str(self.checkpointing).lower()}",
            ]
        ).config

    def write_headers(self, folder: Path) -> None:
        """What can be read about the model before it is loaded: its configuration, and safetensors without data."""
        import torch

        with torch.device("meta"):
            model = self.build(torch.float32)
        entries = {
            n: {"dtype": "F32", "shape": list(p.shape), "data_offsets": [0, 0]} for n, p in model.named_parameters()
        }
        header = json.dumps(entries).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        (folder / "config.json").write_text(model.config.to_json_string(use_diff=False))

    def build(self, dtype: Any) -> Any:
        """A random model."""
        import torch
        from transformers import AutoModelForCausalLM, Qwen2Config

        config = Qwen2Config(**MODEL, num_hidden_layers=self.layers, tie_word_embeddings=self.tied)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        finally:
            torch.set_default_dtype(before)

    def minibatch(self, generator: np.random.Generator, num_groups: int) -> list[GroupPayload]:
        return [self._group(generator) for _ in range(num_groups)]

    def _group(self, generator: np.random.Generator) -> GroupPayload:
        count, vocabulary = self.responses, MODEL["vocab_size"]
        return GroupPayload(
            generator.integers(0, vocabulary, self.prompt).astype(np.int32),
            generator.integers(0, vocabulary, count * self.response).astype(np.int32),
            np.full(count * self.response, -10.0, np.float32),
            np.full(count, self.response, np.int32),
            generator.random(count).astype(np.float32),
            np.ones(count, np.float32),
            np.ones(count, np.float32),
            np.full(count, FinishReason.LENGTH, np.int32),
            np.array([(number, 0, 0) for number in range(count)], np.int32),
        )


def resident_bytes(peak: bool = False) -> int:
    """What this process has in memory, or the most that it had since `forget_peak`."""
    key = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(case: Case) -> dict[str, int]:
    """Bytes of this rank, for every phase of an optimizer step with optimizer state from the start: before it, at the
    peak of training, of the commit and of a publication. All ranks of the world call it."""
    import torch
    import torch.distributed as dist

    from tests.support.training import mesh_of
    from zbgrpo.algorithms.packing import PackingRules
    from zbgrpo.trainer.layout import Layout
    from zbgrpo.trainer.torch_backend import TorchTrainer
    from zbgrpo.weights.manifest import WeightManifest

    gc.collect()
    dist.barrier()
    before, config = resident_bytes(), case.config
    layout = Layout.of(mesh_of(case.dp, case.pp, case.tp))
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    reference = case.build(dtype).requires_grad_(False) if case.kl else None
    trainer = TorchTrainer(
        case.build(torch.float32 if case.zero else dtype),
        reference,
        config.trainer,
        config.algorithm,
        rules=PackingRules(case.responses, 8, False),
        num_schedule_steps=10,
        group=dist.group.WORLD,
        wait=nullcontext,
        layout=layout,
    )
    del reference
    manifest = WeightManifest(trainer.weight_specs(), config.weights.bucket_bytes)
    is_source = layout.dp_index == layout.tp_index == 0
    staging = [manifest.allocate(torch.device("cpu")) for _ in range(2 if is_source else 0)]
    trainer._state()  # makes the optimizer's
    generator = np.random.default_rng(layout.dp_index)
    gc.collect()
    found = {"state": resident_bytes() - before}

    def peak_of(phase: str) -> None:
        found[phase] = resident_bytes(peak=True) - before
        forget_peak()

    forget_peak()
    for count in (1, 2):
        trainer.train_minibatch(case.minibatch(generator, count), 0, [1.0] * count)
    peak_of("train")
    result = trainer.commit()
    assert result is not None and not result.skipped
    peak_of("commit")
    views = manifest.views(staging[0]) if is_source else {}
    for name, tensor in trainer.weights():
        if is_source:
            views[name].copy_(tensor)
        del tensor
    peak_of("publish")
    return found
