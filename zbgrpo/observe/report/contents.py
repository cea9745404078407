"""What the page shows of a run beside figures: sampled rollouts, settings, and what kind of run it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbgrpo.config import fields
from zbgrpo.observe.report.folder import RunFolder
from zbgrpo.observe.rolloutlog import RolloutGroup, RolloutResponse, read_rollouts

MAX_FILES, MAX_GROUPS, MAX_RESPONSES = 8, 4, 8
"""Of sampled rollouts: files of the run, groups of a file, responses of a group."""
MAX_CHARACTERS = 4_000
"""Of a text."""

_STEP_FILE = re.compile(r"step-(\d+)\.jsonl")


def rollouts(run: RunFolder) -> dict[str, Any]:
    """Some sampled groups from the first to the last sampled step; the texts exactly as they were written.

    Raises RunFolderError, with `file:line`, for a line that is not a rollout.
    """
    folder = run.folder(run.config.observe.rollout_save_dir)
    steps = {int(found[1]): path for path in folder.glob("step-*.jsonl") if (found := _STEP_FILE.fullmatch(path.name))}
    chosen = _spread(sorted(steps), MAX_FILES)
    groups = []
    for step in chosen:
        for number, group in enumerate(read_rollouts(steps[step])):
            if number == MAX_GROUPS:
                break
            groups.append({"step": step, **_shown(group)})
    return {"groups": groups, "num_files": len(steps), "num_shown": len(chosen), "folder": str(folder)}


def _spread(values: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the values, evenly, the first and the last among them."""
    if len(values) <= limit:
        return list(values)
    return [values[round(n * (len(values) - 1) / (limit - 1))] for n in range(limit)]


def _shown(group: RolloutGroup) -> dict[str, Any]:
    prompt, prompt_cut = _cut(group.prompt)
    return {
        "uid": str(group.uid),
        "prompt": prompt,
        "prompt_cut": prompt_cut,
        "num_responses": len(group.responses),
        "responses": [_response(response) for response in group.responses[:MAX_RESPONSES]],
    }


def _response(response: RolloutResponse) -> dict[str, Any]:
    text, cut = _cut(response.text)
    return {
        "text": text,
        "cut": cut,
        "reward": response.reward,
        "answer": response.ans_acc,
        "format": response.format_acc,
        "advantage": response.advantage,
        "finish": response.finish.replace("_", " "),
        "tokens": response.num_tokens,
        "versions": response.versions,
    }


def _cut(text: str) -> tuple[str, int]:
    """The beginning of a text, and how many characters are not shown."""
    return text[:MAX_CHARACTERS], max(0, len(text) - MAX_CHARACTERS)


def settings(run: RunFolder) -> list[dict[str, Any]]:
    """Every setting by section, with its default where it has another value."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for path, leaf in fields.leaves().items():
        section, _, name = path.rpartition(".")
        value = fields.get(run.config, path)
        row = {"name": name, "value": _text(value)}
        # A default of None is decided by a preset or another setting, so there is nothing to differ from.
        if leaf.default is not None and value != leaf.default:
            row["default"] = _text(leaf.default)
        sections.setdefault(section or "run", []).append(row)
    return [{"name": name, "rows": rows} for name, rows in sections.items()]


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "–"
    return str(value)


def description(run: RunFolder) -> list[str]:
    """What kind of run this is, in a few words each."""
    config = run.config
    cluster, trainer, inference = config.cluster, config.trainer, config.inference
    layout = [
        ("tp", trainer.tensor_parallel_size),
        ("pp", trainer.pipeline_parallel_size),
        ("zero", trainer.zero_stage),
    ]
    spread = ", ".join(f"{name} {size}" for name, size in layout if size > (name != "zero"))
    return [
        f"{config.algorithm.name} on {Path(config.model.path).name or config.model.path}",
        f"data {Path(config.data.path).name}, reward {config.reward.type}",
        f"{_number(cluster.num_trainers, 'consumer')} ({trainer.backend}{', ' + spread if spread else ''})",
        f"{_number(cluster.num_inferencer, 'producer')} ({inference.backend})",
        f"{inference.num_generations} responses per prompt, at most {inference.max_new_tokens:,} tokens",
        f"max staleness {config.ledger.max_staleness}",
    ]


def _number(count: int | None, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
