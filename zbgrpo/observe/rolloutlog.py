"""Sampled groups as JSON Lines, for people who want to read what the model writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from zbgrpo.errors import RunFolderError
from zbgrpo.observe.jsonl import encode_line, replace_file
from zbgrpo.types import FinishReason, GroupPayload, Uid


class RolloutResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One response as it was sampled, scored and trained."""

    text: str
    reward: float | None
    format_acc: float | None
    ans_acc: float | None
    advantage: float | None
    """None where it is not known yet, or the group was filtered."""
    finish: str
    """end_token, stop_string or length."""
    versions: list[tuple[int, int]]
    """(start token, policy version), ordered by start: who sampled which tokens."""
    num_tokens: int
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    """Those that were recorded when the tokens were sampled. Both with observe.rollout_tokens only."""


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt and its responses; one line of a rollout file."""

    uid: Uid
    prompt: str
    responses: list[RolloutResponse]
    prompt_ids: list[int] | None = None


def rollout_group(
    uid: Uid,
    prompt: str,
    texts: Sequence[str],
    payload: GroupPayload,
    advantages: Sequence[float] | None = None,
    with_tokens: bool = False,
) -> RolloutGroup:
    """The readable form of a group: `texts` are its R decoded responses, `advantages` R numbers where known."""
    ends = payload.lengths.cumsum().tolist()
    parts = [slice(end - length, end) for end, length in zip(ends, payload.lengths.tolist(), strict=True)]
    versions: list[list[tuple[int, int]]] = [[] for _ in texts]
    for response, start, version in payload.spans.tolist():
        versions[response].append((start, version))
    responses = [
        RolloutResponse(
            text=text,
            reward=float(payload.rewards[i]),
            format_acc=float(payload.format_acc[i]),
            ans_acc=float(payload.ans_acc[i]),
            advantage=None if advantages is None else float(advantages[i]),
            finish=FinishReason(int(payload.finish[i])).name.lower(),
            versions=versions[i],
            num_tokens=int(payload.lengths[i]),
            token_ids=payload.response_ids[parts[i]].tolist() if with_tokens else None,
            logprobs=payload.logprobs[parts[i]].tolist() if with_tokens else None,
        )
        for i, text in enumerate(texts)
    ]
    ids = payload.prompt_ids.tolist() if with_tokens else None
    return RolloutGroup(uid=uid, prompt=prompt, responses=responses, prompt_ids=ids)


class RolloutLog:
    """Writes one file `step-N.jsonl` per sampled step, whole or not at all; writing a step again replaces its file."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def write(self, step: int, groups: Sequence[RolloutGroup]) -> Path:
        """Write the groups of one step; returns the path of the file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{step}.jsonl"
        replace_file(path, b"".join(encode_line(group) for group in groups))
        return path


def read_rollouts(path: str | Path) -> Iterator[RolloutGroup]:
    """Groups of a rollout file. Raises RunFolderError with `file:line` for a line that is not one."""
    decoder = msgspec.json.Decoder(RolloutGroup)
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RunFolderError(f"{path}:{number}: not a rollout: {error}") from None


def render_rollouts(path: str | Path, stream: TextIO) -> None:
    """Print a rollout file for reading: bold headings on a terminal that has them, plain text elsewhere.

    Control characters that a model wrote are shown as escapes, so that they cannot act on the terminal.
    """
    heading = _heading_printer(stream)
    for index, group in enumerate(read_rollouts(path)):
        if index:
            stream.write("\n")
        heading(f"=== group {group.uid}: {len(group.responses)} responses, {_summary_of(group)} ===", "bold cyan")
        stream.write(_printable(group.prompt).rstrip() + "\n")
        for number, response in enumerate(group.responses, start=1):
            right = response.ans_acc is not None and response.ans_acc > 0
            heading(f"--- {number}/{len(group.responses)}: {_describe(response)} ---", "green" if right else "yellow")
            stream.write(_printable(response.text).rstrip() + "\n")


def _summary_of(group: RolloutGroup) -> str:
    known = [response.ans_acc for response in group.responses if response.ans_acc is not None]
    return f"accuracy {100 * sum(known) / len(known):.0f} %" if known else "not scored"


def _describe(response: RolloutResponse) -> str:
    parts = [f"reward {_number(response.reward)}"]
    if response.advantage is not None:
        parts.append(f"advantage {response.advantage:+.2f}")
    parts.append(f"format {_number(response.format_acc)}, answer {_number(response.ans_acc)}")
    parts.append(f"{response.num_tokens} tokens, {response.finish.replace('_', ' ')}")
    if response.versions:
        parts.append("version " + " ".join(_span(start, version) for start, version in response.versions))
    return ", ".join(parts)


def _span(start: int, version: int) -> str:
    return f"{version} from {start}" if start else str(version)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _printable(text: str) -> str:
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _heading_printer(stream: TextIO) -> Any:
    """A function (text, style) that prints a line, styled where `stream` is a terminal and rich is installed."""
    if stream.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            console = Console(file=stream, highlight=False)
            return lambda text, style: console.print(text, style=style, markup=False, soft_wrap=True)
    return lambda text, style: stream.write(text + "\n")
