"""What rank 0 shows, and the summary behind the closing table."""

import io
from pathlib import Path
from typing import Any

import pytest

from zbgrpo.observe.metrics import MetricsWriter
from zbgrpo.observe.progress import (
    TABLE_WIDTH,
    Progress,
    closing_table,
    human_count,
    human_duration,
    print_closing_table,
)
from zbgrpo.observe.summary import RankTime, RunSummary, build_summary, role_bubble
from zbgrpo.types import Role

METRICS = {
    "reward/mean": 6.414,
    "reward/ans_acc": 0.613,
    "throughput/completion_tokens_per_s": 12345.0,
    "staleness/mean": 1.14,
    "bubble/consumers": 0.004,
    "bubble/producers": None,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class BrokenPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture
def summary() -> RunSummary:
    # Consumer: 100 s between startup and shutdown, 2 lost. Producers: 100 and 50 s, 6 lost and 3 unbooked beyond 1 %.
    consumer = {"busy": 98.0, "starved": 0.5, "blocked_on_weights": 0.5, "imbalance": 1.0, "startup": 20.0}
    producers = [{"busy": 94.0, "starved": 6.0, "startup": 20.0}, {"busy": 46.5, "unbooked": 3.5, "shutdown": 5.0}]
    return build_summary(
        run="0a1b",
        steps=400,
        seconds=3725.4,
        exit_reason="completed",
        tasks=["gsm8k", "math500"],
        accuracy_before={"math500": 0.08, "gsm8k": 0.124},
        accuracy_after={"gsm8k": 0.613},
        ledger={"leased": 13200, "consumed": 12800, "filtered": 380, "dropped": 20, "live": 0},
        dropped_by_reason={"end": 17, "reward_error": 3, "non_finite": 0},
        ranks=[
            RankTime(0, Role.CONSUMER, consumer),
            *(RankTime(1 + i, Role.PRODUCER, seconds) for i, seconds in enumerate(producers)),
        ],
        num_completion_tokens=45_678_900,
        num_samples=102_400,
        paths={"model": Path("model/GRPO/step-400"), "logs": "logs/GRPO"},
    )


def test_summary_by_hand(summary: RunSummary, tmp_path: Path) -> None:
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.124, 0.613)
    assert summary["accuracy_after_by_task"] == {"gsm8k": 0.613, "math500": None}
    assert summary["completion_tokens_per_s"] == pytest.approx(456_789)
    assert summary["samples_per_s"] == pytest.approx(1024)
    assert summary["bubble"]["consumers"] == pytest.approx(0.02)
    assert summary["bubble"]["producers"] == pytest.approx((6 + 3) / 150)
    assert set(summary["time_shares"]) == {"0", "1", "2"}
    for entry in summary["time_shares"].values():
        assert sum(entry["shares"].values()) == pytest.approx(1)
    for shares in summary["time_by_role"].values():
        assert sum(shares.values()) == pytest.approx(1)
    assert summary["time_by_role"]["producers"]["startup"] == pytest.approx(20 / 175)
    writer = MetricsWriter(tmp_path)
    assert '"exit_reason": "completed"' in writer.write_summary(summary).read_text()
    writer.close()


def test_summary_of_a_run_that_measured_nothing() -> None:
    summary = build_summary(
        run="0a1b",
        steps=0,
        seconds=0.0,
        exit_reason="stopped",
        tasks=[],
        accuracy_before={},
        accuracy_after={},
        ledger={},
        dropped_by_reason={},
        ranks=[],
        num_completion_tokens=0,
        num_samples=0,
        paths={},
    )
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (None, None)
    assert summary["bubble"] == {"consumers": None, "producers": None}
    assert summary["samples_per_s"] == 0.0
    assert "stopped" in closing_table(summary)
    assert role_bubble([{"startup": 3.0}]) is None


def test_closing_table_has_the_figures(summary: RunSummary) -> None:
    text = closing_table(summary)
    words = " ".join(text.split())
    for expected in (
        "zbgrpo: 400 steps in 1h02m",
        "ended completed",
        "gsm8k 12.4 % 61.3 % +48.9",
        "math500 8.0 % - -",
        "throughput 1,024.00 samples/s, 456,789 completion tokens/s",
        "groups 13,200 leased, 12,800 consumed, 380 filtered, 20 dropped, 0 live",
        "dropped for end 17, reward_error 3",
        "busy 81.7 % 80.3 %",
        "blocked on weights 0.4 % 0.0 %",
        "unbooked 0.0 % 2.0 %",
        "bubble (startup to end) 2.0 % 6.0 %",
        "model model/GRPO/step-400",
        "logs logs/GRPO",
    ):
        assert expected in words
    assert max(map(len, text.splitlines())) <= TABLE_WIDTH
    assert "\x1b" not in text
    assert text.isascii()


def test_closing_table_wraps_long_figures_but_not_paths(summary: RunSummary) -> None:
    long: dict[str, Any] = {**summary, "ledger": {f"state{i}": 10**9 for i in range(6)}, "paths": {"a": "/x y" * 40}}
    lines = closing_table(long).splitlines()
    assert "  a             " + "/x y" * 40 in lines
    assert all(len(line) <= TABLE_WIDTH for line in lines if "/x y" not in line)


def test_closing_table_is_bold_only_on_a_terminal(summary: RunSummary) -> None:
    plain, terminal = io.StringIO(), Terminal()
    print_closing_table(summary, plain)
    print_closing_table(summary, terminal)
    assert "\x1b" not in plain.getvalue()
    assert terminal.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "") == plain.getvalue()
    assert "\x1b[1m" in terminal.getvalue()
    print_closing_table(summary, BrokenPipe())


@pytest.mark.parametrize("mode", ["auto", "bar", "lines"])
def test_lines_without_escapes(mode: Any) -> None:
    out = io.StringIO()
    clock = iter([0.0, 60.0, 70.0])
    progress = Progress(400, mode, out, done_steps=100, clock=lambda: next(clock))
    progress.update(110, METRICS)
    progress.note("eval gsm8k: [bold] 61.3 %")
    progress.update(400, {**METRICS, "bubble/producers": 0.012})
    progress.close()
    progress.close()
    progress.update(401, METRICS)
    progress.note("late")
    first, note, last = out.getvalue().splitlines()
    words = " ".join(first.split())
    assert words == "step 110/400 reward 6.41 acc 61.3% 12.3k tok/s lag 1.1 bubble 0.4% / - 29m00s left"
    assert note == "eval gsm8k: [bold] 61.3 %"
    assert last.endswith("bubble  0.4% /  1.2%")
    assert "\x1b" not in out.getvalue()


def test_lines_mode_on_a_terminal_stays_plain() -> None:
    out = Terminal()
    progress = Progress(None, "lines", out)
    progress.update(7, {})
    progress.close()
    assert " ".join(out.getvalue().split()) == "step 7 reward - acc - - tok/s lag - bubble - / -"


def test_none_shows_nothing() -> None:
    out = Terminal()
    progress = Progress(3, "none", out)
    progress.update(1, METRICS)
    progress.note("x")
    progress.close()
    assert out.getvalue() == ""


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    progress = Progress(400, "auto", out)
    progress.update(200, METRICS)
    progress.note("[bold] note")
    progress.close()
    progress.close()
    text = out.getvalue()
    assert "200/400" in text
    assert "[bold] note" in text
    assert "acc 61.3% 12.3k tok/s lag 1.1 bubble 0.4%/-" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is back"


def test_a_broken_pipe_silences_and_never_raises() -> None:
    progress = Progress(3, "lines", BrokenPipe())
    progress.update(1, METRICS)
    progress.note("x")
    progress.close()


def test_an_ascii_stream_gets_question_marks() -> None:
    raw = io.BytesIO()
    progress = Progress(3, "lines", io.TextIOWrapper(raw, encoding="ascii"))
    progress.note("résumé")
    assert raw.getvalue() == b"r?sum?\n"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (987, "987"), (999.7, "1.00k"), (1234, "1.23k"), (99960, "100k"), (45_600, "45.6k"), (2.5e9, "2.50G")],
)
def test_human_count(number: float, text: str) -> None:
    assert human_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (273_600, "3d04h")]
)
def test_human_duration(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_importing_observe_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from zbgrpo.observe import events, logs, metrics, progress, rolloutlog, summary, timeledger\n"
        "print([m for m in ('torch', 'rich', 'tensorboard', 'wandb', 'zmq', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
