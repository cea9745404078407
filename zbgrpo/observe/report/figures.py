"""The figures of the page: headline, curves, time by rank, groups, lags. All plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zbgrpo.observe.progress import human_count, human_duration
from zbgrpo.observe.report.folder import RunFolder
from zbgrpo.observe.report.groups import ENDS, quantile
from zbgrpo.observe.report.timeline import account_seconds
from zbgrpo.observe.summary import role_bubble
from zbgrpo.observe.timeledger import ACCOUNTS, bubble, shares_of

MAX_STEPS = 3_000
"""Points of a curve; of more steps than that, neighbours are averaged."""

CURVES: tuple[dict[str, Any], ...] = (
    {"title": "Reward", "series": {"reward/mean": "mean"}},
    {
        "title": "Accuracy",
        "percent": True,
        "evaluations": True,
        "series": {"reward/ans_acc": "right while training", "reward/format_acc": "valid format"},
    },
    {"title": "Response length", "unit": "tokens", "series": {"rollout/response_length_mean": "mean"}},
    {"title": "KL to the first model", "series": {"train/kl": "per token"}},
    {"title": "Entropy", "unit": "nats", "series": {"train/entropy": "per token"}},
    {"title": "Lag", "unit": "versions", "series": {"staleness/mean": "mean", "staleness/max": "oldest token"}},
    {
        "title": "Bubble",
        "percent": True,
        "series": {"bubble/consumers": "consumers", "bubble/producers": "producers"},
    },
    {
        "title": "Throughput",
        "unit": "tokens/s",
        "series": {"throughput/completion_tokens_per_s": "trained response tokens"},
    },
    {"title": "Gradient norm", "series": {"train/grad_norm": "before clipping"}},
    {"title": "Loss", "series": {"train/loss": "of the step"}},
    {
        "title": "Groups kept by the filter",
        "percent": True,
        "dull": 1.0,
        "series": {"rollout/effective_groups": "of those generated"},
    },
    {"title": "Truncated responses", "percent": True, "series": {"train/overlong_ratio": "cut off at the limit"}},
)
"""Charts of the page; one whose keys have no value in this run, or never another one than `dull`, is left out."""


def state_of(run: RunFolder) -> dict[str, str]:
    """How the run stands: a kind (`finished`, `stopped`, `failed`, `open`) and words."""
    groups, summary = run.groups, run.summary
    if groups.failure is not None:
        return {"kind": "failed", "text": f"failed: {groups.failure}"}
    if summary is not None:
        return {"kind": "finished" if groups.end == "end" else "stopped", "text": summary["exit_reason"]}
    if groups.stop_reason is not None:
        return {"kind": "open", "text": f"asked to stop ({groups.stop_reason}), and did not finish"}
    if not groups.starts:
        return {"kind": "open", "text": "never came to its first lease, or is still starting"}
    return {"kind": "open", "text": "did not finish, or is still running"}


# ------------------------------------------------------------------------------------------ headline


def headline(run: RunFolder, times: Mapping[str, Any]) -> list[dict[str, str]]:
    """The figures at the top: label, value, and what to know about it."""
    summary, num_starts = run.summary or {}, len(run.groups.starts)
    version = run.groups.version if run.groups.starts else len(run.metrics)
    cards = [*_accuracies(run, summary)]
    for role in ("consumers", "producers"):
        share = times["bubble"][role]
        cards.append(
            {"label": f"bubble, {role}", "value": _percent(share), "note": "of their time between start and end"}
        )
    samples, tokens = _rates(run, summary)
    cards.append({"label": "samples/s", "value": _count(samples), "note": f"{_count(tokens)} response tokens/s"})
    total = run.config.ledger.max_steps
    of_total = f" of {total:,}" if total and total != version else ""
    cards.append(
        {"label": "steps", "value": f"{version:,}{of_total}", "note": f"of {run.config.groups_per_step} groups"}
    )
    seconds = summary.get("seconds") or (run.metrics[-1].get("wall_s") if run.metrics else None)
    starts = "in one start" if num_starts <= 1 else f"of the last of {num_starts} starts"
    cards.append({"label": "time", "value": "–" if seconds is None else human_duration(seconds), "note": starts})
    return cards


def _accuracies(run: RunFolder, summary: Mapping[str, Any]) -> list[dict[str, str]]:
    before, after = summary.get("accuracy_before_by_task"), summary.get("accuracy_after_by_task")
    cards = []
    for task in run.config.evaluation.datasets:
        measured = sorted((line["step"], line["accuracy"]) for line in run.evaluations if line["task"] == task)
        first = (before or {}).get(task, measured[0][1] if measured else None)
        last = (after or {}).get(task)
        note = "before and after"
        if last is None and len(measured) > 1:
            last, note = measured[-1][1], f"before and at step {measured[-1][0]}"
        cards.append(
            {
                "label": f"accuracy, {task}",
                "value": f"{_percent(first).removesuffix(' %')} → {_percent(last)}",
                "note": note,
            }
        )
    return cards


def _rates(run: RunFolder, summary: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Samples and response tokens per second: of the summary, else over the steps of the last start so far."""
    if summary:
        return summary.get("samples_per_s"), summary.get("completion_tokens_per_s")
    steps = last_start(run.metrics)
    if not steps or not (seconds := steps[-1].get("wall_s")):
        return None, None
    per_step = run.config.groups_per_step * run.config.inference.num_generations
    lengths = [line.get("rollout/response_length_mean") or 0.0 for line in steps]
    return len(steps) * per_step / seconds, sum(lengths) * per_step / seconds


def last_start(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of the last start of a run, whose clock began anew with it."""
    clock = [line.get("wall_s") or 0.0 for line in metrics]
    begin = max((n for n in range(1, len(clock)) if clock[n] < clock[n - 1]), default=0)
    return list(metrics[begin:])


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _count(number: float | None) -> str:
    if number is None:
        return "–"
    return f"{number:.3g}" if abs(number) < 999.5 else human_count(number)


# ------------------------------------------------------------------------------------------ curves


def curves(run: RunFolder) -> dict[str, Any]:
    """Steps, and the charts over them that have any value; evaluations are points of their own."""
    metrics = run.metrics
    size = -(-len(metrics) // MAX_STEPS) if metrics else 1
    parts = [metrics[n : n + size] for n in range(0, len(metrics), size)]
    charts = []
    for curve in CURVES:
        series: list[dict[str, Any]] = [
            {"name": name, "values": [_mean([line.get(key) for line in part]) for part in parts]}
            for key, name in curve["series"].items()
        ]
        kept = [each for each in series if not {*each["values"]} <= {None, curve.get("dull")}]
        points = _evaluation_points(run) if curve.get("evaluations") else []
        if kept or points:
            shown: dict[str, Any] = {key: curve[key] for key in ("title", "unit", "percent") if key in curve}
            charts.append({**shown, "series": kept, "points": points})
    return {"steps": [part[-1]["step"] for part in parts], "averaged": size, "charts": charts}


def _evaluation_points(run: RunFolder) -> list[dict[str, Any]]:
    points = []
    for task in dict.fromkeys(line["task"] for line in run.evaluations):
        measured = {line["step"]: line["accuracy"] for line in run.evaluations if line["task"] == task}
        values = [[step, value] for step, value in sorted(measured.items()) if value is not None]
        points.append({"name": f"evaluation {task}", "values": values})
    return points


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# ------------------------------------------------------------------------------------------ time


class _RankTime(NamedTuple):
    rank: int
    role: str
    times: Mapping[str, float]
    """Seconds or shares by account."""
    seconds: float | None
    """All of them together."""


def times(run: RunFolder) -> dict[str, Any]:
    """Shares of the time of each rank by account, and the bubble of both roles, from the best source there is."""
    rows, source = _rank_times(run)
    shown: dict[str, float | None] = {}
    for name, role in (("consumers", "consumer"), ("producers", "producer")):
        if run.summary is not None and "bubble" in run.summary:
            shown[name] = run.summary["bubble"][name]
        elif rows:
            shown[name] = role_bubble([row.times for row in rows if row.role == role])
        else:
            shown[name] = _mean([line.get(f"bubble/{name}") for line in last_start(run.metrics)])
    made = [
        {
            "rank": row.rank,
            "role": row.role,
            "shares": shares_of(row.times),
            "bubble": bubble(row.times),
            "seconds": row.seconds,
        }
        for row in rows
    ]
    return {"accounts": list(ACCOUNTS), "rows": made, "bubble": shown, "source": source}


def _rank_times(run: RunFolder) -> tuple[list[_RankTime], str]:
    if run.summary is not None and "time_shares" in run.summary:
        shares = run.summary["time_shares"].items()
        booked = [_RankTime(int(rank), entry["role"], entry["shares"], None) for rank, entry in shares]
        return booked, "of the last start, as its end has booked them"
    if run.trace:
        newest = max(run.trace, key=lambda life: life.header.wall).header.run
        lives = [life for life in run.trace if life.header.run == newest and life.header.rank >= 0]
        part = "the part of it that is in the trace" if any(life.num_lost for life in lives) else "the trace"
        traced = [_total(life.header.rank, life.header.role, account_seconds(life)) for life in lives]
        if written := [row for row in traced if row.seconds]:  # a run that was killed early has not got so far
            return written, f"of the last start, from {part}"
    roles = {rank: name.partition(":")[0] for name, rank in run.groups.ranks.items()}
    known = [(rank, seconds) for rank, seconds in sorted(run.rank_seconds.items()) if rank in roles]
    return [_total(rank, roles[rank], seconds) for rank, seconds in known], "of the last start, as far as it is logged"


def _total(rank: int, role: str, seconds: Mapping[str, float]) -> _RankTime:
    return _RankTime(rank, role, seconds, sum(seconds.values()))


# ------------------------------------------------------------------------------------------ groups


def group_table(run: RunFolder) -> dict[str, Any]:
    """What became of the groups, by producer and together, and how long they took."""
    book = run.groups
    live = book.live
    columns = ["leased", "arrived", "consumed", *ENDS[1:], "tokens"]
    rows: list[dict[str, Any]] = []
    for producer, counts in sorted(book.by_producer.items()):
        values = [counts["buffered"] if name == "arrived" else counts[name] for name in columns]
        rows.append({"name": f"producer {producer}", "values": values})
    sums = [sum(row["values"][n] for row in rows) for n in range(len(columns))]
    rows.append({"name": "together", "values": sums})
    durations = [
        {
            "name": name,
            "number": len(values),
            "median": quantile(values, 0.5),
            "p95": quantile(values, 0.95),
            "longest": max(values, default=None),
        }
        for name, values in book.seconds.items()
    ]
    return {
        "columns": columns,
        "rows": rows,
        "live": {state: live[state] for state in ("leased", "buffered", "planned")},
        "taken_back": book.num_taken_back,
        "dropped_by_reason": dict(book.drop_reasons),
        "durations": durations,
        "starts": [{"version": start.version, "taken_back": start.taken_back} for start in book.starts],
    }


def lag_histogram(run: RunFolder) -> dict[str, Any]:
    """Trained groups by the age, in versions, of their oldest and of their newest token."""
    oldest, newest = run.lags.oldest, run.lags.newest
    lags = range(min([*oldest, *newest], default=0), max([*oldest, *newest], default=-1) + 1)
    return {
        "lags": list(lags),
        "series": [
            {"name": "oldest token", "values": [oldest[lag] for lag in lags]},
            {"name": "newest token", "values": [newest[lag] for lag in lags]},
        ],
        "max_token_lag": run.config.ledger.max_token_lag,
        "max_staleness": run.config.ledger.max_staleness,
    }
