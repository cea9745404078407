r"""What a model is told, and where its responses stop, when the user says nothing else."""

from __future__ import annotations

from typing import Optional

_SYSTEM_PROMPTS: dict[str, str] = {
    "think_answer_tags": (
        "You answer questions carefully. First work the problem out between <think> and </think>. "
        "Then give the final answer, and nothing else, between <answer> and </answer>. "
        "Your whole reply has the form: <think> your reasoning </think> <answer> your final answer </answer>"
    ),
    "boxed": "Reason step by step, and write your final answer within \\boxed{}.",
    "code": "You are a helpful assistant.",
}


def default_system_prompt(reward_type: str) -> Optional[str]:
    """System message for a reward type; None for a user's own function, which decides the form of its responses."""
    return _SYSTEM_PROMPTS.get(reward_type)


def default_stop_strings(reward_type: str) -> list[str]:
    """Strings that end a response and stay in its text."""
    return ["</answer>"] if reward_type == "think_answer_tags" else []
