"""Rollouts through one Ray actor that holds a queue: `python ray_queue.py PROMPTS RESPONSES PROMPT_TOKENS NEW_TOKENS`.

A batch is a dictionary of tensors padded to [prompts, responses, prompt + response tokens]. The actor gives each reader
a copy of its own, found by number; the reader copies it once more into memory that it owns. Then the next one follows,
as each call waits for its answer.

Stays between two measurements: for every line with a number of seconds on standard input it moves batches for that long
and answers with one JSON line, {"batches", "seconds", "batch_bytes"}. It ends with its input.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_NUM_WARM_UP = 5


class _Held:
    """A batch in the actor, and how many readers have had it."""

    def __init__(self, number: int, batch: Any) -> None:
        self.number, self.batch, self.num_taken = number, batch, 0


class BatchQueue:
    """The actor: batches by number, each given to every reader once."""

    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        self._next = 0
        self._held: list[_Held] = []

    def put(self, batch: Any) -> int:
        """Keep a batch; returns its number."""
        self._held.append(_Held(self._next, batch))
        self._next += 1
        return self._next - 1

    def take(self, number: int) -> Any:
        """A copy of the batch with this number, or None; gone when every reader has had it."""
        from copy import deepcopy

        for place, held in enumerate(self._held):
            if held.number == number:
                held.num_taken += 1
                batch = deepcopy(held.batch)
                if held.num_taken == self._num_readers:
                    del self._held[place]
                return batch
        return None


def padded_batch(prompts: int, responses: int, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Random rollouts in the shapes of a training batch, every response as long as it may be."""
    import torch

    shape = (prompts, responses)
    whole, new = (*shape, prompt_tokens + new_tokens), (*shape, new_tokens)
    return {
        "input_ids": torch.randint(0, 150_000, whole),
        "attention_mask": torch.ones(whole, dtype=torch.bool),
        "action_mask": torch.ones(new, dtype=torch.bool),
        "action_log_probs": torch.randn(new),
        "response_idx": torch.zeros((*shape, 2), dtype=torch.int32),
        "reward": torch.randn((*shape, 1)),
        "format_acc": torch.randn((*shape, 1)),
        "ans_acc": torch.randn((*shape, 1)),
        "temperature": torch.ones(shape),
    }


def move(queue: Any, batch: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Move a batch again and again for at least `seconds`."""
    import ray  # type: ignore[import-not-found]
    import torch

    num_batches, start = 0, time.monotonic()
    while num_batches < 2 or time.monotonic() - start < seconds:
        number = ray.get(queue.put.remote(batch))
        taken = ray.get(queue.take.remote(number))
        owned = {name: tensor.clone() for name, tensor in taken.items()}
        num_batches += 1
    elapsed = time.monotonic() - start
    if not torch.equal(owned["input_ids"], batch["input_ids"]):
        raise RuntimeError("a batch arrived changed")
    size = sum(tensor.numel() * tensor.element_size() for tensor in batch.values())
    return {"batches": num_batches, "seconds": elapsed, "batch_bytes": size}


def main() -> int:
    """Serve measurements until the input ends."""
    import ray

    batch = padded_batch(*map(int, sys.argv[1:5]))
    ray.init(address="local", num_cpus=4, log_to_driver=False, include_dashboard=False, logging_level="error")
    try:
        queue = ray.remote(BatchQueue).remote(1)
        for _ in range(_NUM_WARM_UP):
            move(queue, batch, 0.0)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(move(queue, batch, float(line))), flush=True)
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
