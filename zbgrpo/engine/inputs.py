"""The rows of a run: what every rank reads, in the same way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zbgrpo.config.schema import RunConfig
from zbgrpo.data.chat import PromptRenderer
from zbgrpo.data.rows import Row, load_rows
from zbgrpo.errors import DataError
from zbgrpo.rewards.messages import ANSWER_TYPES
from zbgrpo.rewards.prompts import default_system_prompt
from zbgrpo.rewards.test_cases import check_test_cases

logger = logging.getLogger(__name__)


def load_data(config: RunConfig) -> list[Row]:
    """Training rows; raises `DataError` naming file and line."""
    loaded = load_rows(config.data.path, config.data.skip_bad_rows, row_check(config.reward.type))
    if loaded.num_bad:
        logger.warning("%s: %d bad rows skipped, the first: %s", config.data.path, loaded.num_bad, loaded.first_bad)
    return loaded.rows


def load_evaluation(config: RunConfig, renderer: PromptRenderer) -> dict[str, list[Row]]:
    """Rows of every evaluation set that fit the prompt limit; the same on every rank."""
    sets = {}
    for task, path in config.evaluation.datasets.items():
        rows = load_rows(path, config.data.skip_bad_rows, row_check(config.reward.type)).rows
        usable = renderer.usable_rows(rows)
        if usable.num_too_long:
            logger.warning("%s: %d prompts are too long and left out (-mpt)", path, usable.num_too_long)
        if not usable.indices:
            raise DataError(f"{path}: the evaluation set {task!r} has no usable rows")
        sets[task] = [rows[i] for i in usable.indices]
    return sets


def make_renderer(config: RunConfig, tokenizer: Any) -> PromptRenderer:
    """The one way in which rows become token ids."""
    system = config.data.system_prompt
    if system is None:
        system = default_system_prompt(config.reward.type)
    return PromptRenderer(tokenizer, system or None, config.data.max_prompt_tokens)


def row_check(reward_type: str) -> Callable[[Row], str | None]:
    """What is wrong with a row for this reward, so that it is said before anything is generated for it."""

    def check_answer(row: Row) -> str | None:
        return None if row.gt_answer is not None else f"no gt_answer, and reward type {reward_type} compares with it"

    def check_tests(row: Row) -> str | None:
        if row.test_cases is None:
            return "no test_cases, and reward type code runs them"
        return check_test_cases(row.test_cases)

    if reward_type in ANSWER_TYPES:
        return check_answer
    return check_tests if reward_type == "code" else lambda row: None
