"""The baseline of `zbgrpo bench train`: TRL's GRPOTrainer. Runs in an environment of its own.

    python trl_grpo.py '{"model": FOLDER, "data": FILE, "steps": N, ...}'

Prints one JSON object last: samples and response tokens per second between the end of the first step and that of the
last, so that start-up and the first, slower step are outside and all generation between is inside.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any


def distinct_share(token_ids: list[int]) -> float:
    """The reward: no verifier is timed, and nearly every group has an advantage."""
    return len(set(token_ids)) / max(1, len(token_ids))


def main(settings: dict[str, Any]) -> None:
    """Train as `settings` say and print what was measured."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16)
    with open(settings["data"], encoding="utf-8") as file:
        prompts = [[json.loads(line)["messages"]] for line in file]
    num_tokens, ends = 0, []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal num_tokens
        num_tokens += sum(map(len, completion_ids))
        return [distinct_share(ids) for ids in completion_ids]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.monotonic(), num_tokens))

    num_samples = settings["prompts_per_step"] * settings["generations"]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=settings["microbatch"],
            gradient_accumulation_steps=num_samples // settings["microbatch"],
            num_generations=settings["generations"],
            max_completion_length=settings["max_new_tokens"],
            max_steps=settings["steps"],
            learning_rate=settings["learning_rate"],
            temperature=1.0,
            beta=0.0,
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    seconds, tokens = ends[-1][0] - ends[0][0], ends[-1][1] - ends[0][1]
    measured = {
        "samples_per_s": num_samples * (len(ends) - 1) / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_sample": tokens / (num_samples * (len(ends) - 1)),
        "seconds": seconds,
    }
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
