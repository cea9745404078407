"""What rank 0 shows: a bar or a line per step while the run goes on, and a table when it ends."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

from zbgrpo.observe.timeledger import ACCOUNTS, UNBOOKED

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

ProgressMode = Literal["auto", "bar", "lines", "none"]

TABLE_WIDTH = 78
_LABEL_WIDTH = 14
_REFRESHES_PER_SECOND = 2


class Progress:
    """Shows steps on `stream`. States: open -> closed; `update` and `note` after `close` do nothing.

    auto and bar: a rich bar where `stream` is a terminal and rich is installed, else lines. lines: one plain line per
    step, without escape sequences. none: nothing at all. A stream that breaks (a closed pipe) silences the display and
    never the run. `total_steps` None: not known yet; `done_steps`: steps of earlier lives of the run.
    """

    def __init__(
        self,
        total_steps: int | None,
        mode: ProgressMode,
        stream: TextIO,
        *,
        done_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._stream = stream
        self._clock = clock
        self._first = done_steps
        self._started = clock()
        self._lines = mode != "none"
        self._bar = _open_bar(stream, total_steps, done_steps) if mode in ("auto", "bar") else None

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` is committed. `metrics`: a record of metrics.jsonl; what it lacks shows as `-`."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, status=_status(metrics, short=True))
            return
        total = "" if self._total is None else f"/{self._total}"
        width = len(total) - 1 if total else 1
        self._print(f"step {step:>{width}}{total}  {_status(metrics)}{self._time_left(step)}")

    def note(self, text: str) -> None:
        """Print `text` above the bar, or as a line of its own."""
        if self._bar is None:
            self._print(text)
            return
        try:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            self.close()

    def close(self) -> None:
        """Leave the display as it is and give the terminal back; may be called again."""
        self._lines = False
        if self._bar is not None:
            # The terminal may be gone: stopping draws once more.
            with contextlib.suppress(OSError):
                self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        if self._lines:
            self._lines = _write(self._stream, text + "\n")

    def _time_left(self, step: int) -> str:
        done = step - self._first
        if self._total is None or done <= 0 or step >= self._total:
            return ""
        left = (self._clock() - self._started) / done * (self._total - step)
        return f"  {human_duration(left)} left"


def _open_bar(stream: TextIO, total_steps: int | None, done_steps: int) -> RichProgress | None:
    """A started rich bar with one task; None where there is no terminal or no rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        return None
    console = Console(file=stream)
    if console.is_dumb_terminal:
        return None
    bar = RichProgress(
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}", markup=False),
        TimeElapsedColumn() if total_steps is None else TimeRemainingColumn(compact=True),
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        expand=True,
    )
    bar.add_task("steps", total=total_steps, completed=done_steps, status="waiting for the first step")
    bar.start()
    return bar


def _status(metrics: Mapping[str, Any], short: bool = False) -> str:
    def shown(key: str, form: Callable[[float], str]) -> str:
        value = metrics.get(key)
        return "-" if value is None else form(value)

    reward = shown("reward/mean", "{:.2f}".format)
    accuracy = shown("reward/ans_acc", lambda x: f"{100 * x:.1f}%")
    speed = shown("throughput/completion_tokens_per_s", human_count)
    lag = shown("staleness/mean", "{:.1f}".format)
    bubbles = [shown(f"bubble/{role}", lambda x: f"{100 * x:.1f}%") for role in ("consumers", "producers")]
    if short:
        return f"rew {reward} acc {accuracy} {speed} tok/s lag {lag} bubble {'/'.join(bubbles)}"
    return (
        f"reward {reward:>5}  acc {accuracy:>6}  {speed:>5} tok/s  lag {lag}  bubble {bubbles[0]:>5} / {bubbles[1]:>5}"
    )


def closing_table(summary: Mapping[str, Any], bold: bool = False) -> str:
    """The end of a run as text of at most 78 columns (longer paths stay whole), from a `RunSummary`.

    `bold`: headings in bold, for terminals; without it there is no escape sequence in the text.
    """
    sections = [
        _headline(summary),
        _accuracies(summary),
        _work(summary),
        _times(summary),
        [_row(name, path, wrap=False) for name, path in summary["paths"].items()],
    ]
    lines: list[str] = ["=" * TABLE_WIDTH]
    for section in (section for section in sections if section):
        if len(lines) > 1:
            lines.append("")
        head, *rest = section
        lines.extend([f"\x1b[1m{head}\x1b[0m" if bold and section is not sections[-1] else head, *rest])
    return "\n".join([*lines, "=" * TABLE_WIDTH]) + "\n"


def print_closing_table(summary: Mapping[str, Any], stream: TextIO) -> None:
    """Print `closing_table`, with bold headings on a terminal. A broken stream is ignored."""
    _write(stream, closing_table(summary, bold=stream.isatty()))


def _headline(summary: Mapping[str, Any]) -> list[str]:
    steps, now = summary["steps"], summary.get("steps_of_this_start", summary["steps"])
    text = f"zbgrpo: {steps:,} step{'' if steps == 1 else 's'}"
    if now != steps:
        text += f", {now:,} of them now,"
    return [f"{text} in {human_duration(summary['seconds'])}", _row("ended", summary["exit_reason"])]


def _accuracies(summary: Mapping[str, Any]) -> list[str]:
    before, after = summary["accuracy_before_by_task"], summary["accuracy_after_by_task"]
    if not before:
        return []
    lines = [f"{'accuracy':<40}{'before':>12}{'after':>12}{'change':>14}"]
    for task, first in before.items():
        last = after.get(task)
        change = "-" if first is None or last is None else f"{100 * (last - first):+.1f}"
        name = task if len(task) <= 36 else task[:35] + "~"
        lines.append(f"  {name:<38}{_percent(first):>12}{_percent(last):>12}{change:>14}")
    return lines


def _work(summary: Mapping[str, Any]) -> list[str]:
    tokens, samples = summary["completion_tokens_per_s"], summary["samples_per_s"]
    lines = ["work"]
    lines.append(_row("trained", f"{summary['samples']:,} samples, {summary['completion_tokens']:,} completion tokens"))
    lines.append(_row("throughput", f"{samples:,.2f} samples/s, {tokens:,.0f} completion tokens/s"))
    lines.append(_row("groups", ", ".join(f"{count:,} {state}" for state, count in summary["ledger"].items())))
    dropped = {reason: count for reason, count in summary["dropped_by_reason"].items() if count}
    if dropped:
        lines.append(_row("dropped for", ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())))
    return lines


def _times(summary: Mapping[str, Any]) -> list[str]:
    roles = [role for role in ("consumers", "producers") if summary["time_by_role"].get(role)]
    if not roles:
        return []
    shares = summary["time_by_role"]
    lines = [f"{'time':<28}" + "".join(f"{role:>14}" for role in roles)]
    for account in ACCOUNTS:
        row = [shares[role].get(account, 0.0) for role in roles]
        if any(row) or account != UNBOOKED:
            name = account.replace("_", " ")
            lines.append(f"  {name:<26}" + "".join(f"{_percent(share):>14}" for share in row))
    lines.append("  " + "-" * (26 + 14 * len(roles)))
    lines.append(f"  {'bubble (startup to end)':<26}" + "".join(f"{_percent(summary['bubble'][r]):>14}" for r in roles))
    return lines


def _row(label: str, text: str, wrap: bool = True) -> str:
    head = f"  {label:<{_LABEL_WIDTH}}"
    if not wrap:
        return head + text
    lines = textwrap.wrap(text, TABLE_WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * len(head)).join([head + "".join(lines[:1]), *lines[1:]])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def human_count(number: float) -> str:
    """3 significant digits with k, M or G: 987, 1.23k, 45.6k."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.5 of the smaller unit would round to 1000 of it.
        if abs(number) >= factor * 0.9995:
            scaled = number / factor
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{number:.0f}"


def human_duration(seconds: float) -> str:
    """12s, 3m05s, 2h07m, 3d04h."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def _write(stream: TextIO, text: str) -> bool:
    """Write and flush; whether the stream still works. A character that its encoding lacks is written as `?`."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        return False
    return True
