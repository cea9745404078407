"""What consumer 0 writes down: a metrics line per step, evaluations, sampled rollouts, the summary."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zbgrpo.algorithms.advantages import group_advantages
from zbgrpo.config.schema import RunConfig
from zbgrpo.evaluation.report import summarise, write_rows
from zbgrpo.ledger.evaluation import EvaluationResult
from zbgrpo.observe.events import iter_events
from zbgrpo.observe.metrics import MetricsWriter
from zbgrpo.observe.progress import Progress
from zbgrpo.observe.rolloutlog import RolloutLog, rollout_group
from zbgrpo.observe.summary import RankTime, RunSummary, build_summary, role_bubble
from zbgrpo.observe.timeledger import BLOCKED_ON_WEIGHTS
from zbgrpo.trainer.base import StepResult
from zbgrpo.transport import messages as m
from zbgrpo.transport.plan_stream import TrainGroup
from zbgrpo.types import Role, Uid


class Recorder:
    """A step's line is written when its `StepReport` has come from the hub, without making training wait."""

    def __init__(self, config: RunConfig, writer: MetricsWriter, progress: Progress, log_dir: Path) -> None:
        self._config, self._writer, self._progress = config, writer, progress
        self._log_dir = log_dir
        self._rollouts = RolloutLog(Path(config.observe.rollout_save_dir) / config.project)
        self._pending: dict[int, dict[str, Any]] = {}
        self._sums: dict[int, dict[str, float]] = {}
        self._last_times: dict[str, dict[str, float]] = {}
        self._started = self._last_step_at = time.monotonic()
        self.num_tokens = self.num_samples = 0
        self._num_steps = 0
        self._noted_zero = False

    @property
    def num_waiting(self) -> int:
        """Steps whose report has not come yet."""
        return len(self._pending)

    def step(self, version: int, result: StepResult, broadcast_seconds: float | None, stall_seconds: float) -> None:
        """A step has committed and made `version`."""
        now, sums = time.monotonic(), result.sums
        tokens, responses = sums["tokens"], sums["responses"]
        self._num_steps += 1
        self.num_tokens += int(tokens)
        self.num_samples += int(responses)
        counted = max(sums["num_tokens"], 1.0)
        gap_tokens = sums["gap_tokens"]
        self._sums[version] = sums
        self._pending[version] = {
            "wall_s": now - self._started,
            "train/loss": result.loss,
            "train/kl": sums["kl"] / counted if self._config.algorithm.kl_coeff else None,
            "train/entropy": sums["entropy"] / tokens if tokens else None,
            "train/grad_norm": result.grad_norm,
            "train/lr": result.learning_rate,
            "train/skipped": float(result.skipped),
            "train/clip_ratio": sums["clipped"] / counted,
            "train/sample_utilization": sums["num_responses"] / responses if responses else None,
            "train/responses_skipped": sums["responses_skipped"],
            "train/overlong_ratio": sums["truncated"] / responses if responses else None,
            "rollout/response_length_mean": tokens / responses if responses else None,
            "rollout/temperature": sums["temperature"] / responses if responses else None,
            "rollout/logprob_gap": sums["gap"] / gap_tokens if gap_tokens else None,
            "rollout/ess": sums["ratio"] ** 2 / (sums["ratio_sq"] * counted) if sums["ratio_sq"] else None,
            "staleness/mean": sums["lag"] / tokens if tokens else None,
            "staleness/max": sums["lag_max"],
            "staleness/tokens_left_out": sums["lag_left_out"],
            "throughput/completion_tokens_per_s": tokens / max(now - self._last_step_at, 1e-9),
            "weights/broadcast_s": broadcast_seconds,
            "weights/stall_s": stall_seconds,
            "memory/rss_mb": _resident_megabytes(),
        }
        self._last_step_at = now

    def report(self, report: m.StepReport) -> None:
        """The hub's side of a step: complete the line and show it."""
        values, sums, filtered = self._pending.pop(report.version), self._sums.pop(report.version), report.filtered
        responses = sums["responses"] + filtered.get("responses", 0.0)
        groups = sums["groups"] + filtered.get("groups", 0.0)

        def mean(key: str) -> float | None:
            return (sums[key] + filtered.get(key, 0.0)) / responses if responses else None

        producers = self._times_since("producer:", report.times)
        seconds = sum(sum(phases.values()) for phases in producers)
        blocked = sum(phases.get(BLOCKED_ON_WEIGHTS, 0.0) for phases in producers)
        values |= {
            "weights/producers_blocked": blocked / seconds if seconds else None,
            "reward/mean": mean("reward"),
            "reward/format_acc": mean("format_acc"),
            "reward/ans_acc": mean("ans_acc"),
            "reward/zero_variance_groups": (sums["zero_variance"] + filtered.get("zero_variance", 0.0)) / groups
            if groups
            else None,
            "rollout/effective_groups": sums["groups"] / groups if groups else None,
            "weights/version_applied_min": report.applied_min,
            "ledger/leased": report.counts["live_leased"],
            "ledger/buffered": report.counts["buffered"],
            "ledger/consumed": report.counts["consumed"],
            "ledger/filtered": report.counts["filtered"],
            "ledger/dropped": report.counts["dropped"],
            "bubble/consumers": role_bubble(self._times_since("consumer:", report.times)),
            "bubble/producers": role_bubble(producers),
        }
        record = self._writer.write(report.version, values)
        self._progress.update(report.version, record)
        if record["reward/mean"] == 0 and record["reward/zero_variance_groups"] == 1 and not self._noted_zero:
            self._noted_zero = True
            self._progress.note(
                "zbgrpo: every reward of this step is 0, so it has taught nothing: the task may be too hard for the "
                "model, or its answers do not have the form that the reward expects (zbgrpo rollouts shows them)"
            )

    def _times_since(self, prefix: str, times: dict[str, m.TimeReport]) -> list[dict[str, float]]:
        """Seconds by phase since the last call, of each rank of a role that has reported since."""
        deltas = []
        for name, report in times.items():
            if name.startswith(prefix):
                before = self._last_times.get(name, {})
                deltas.append({k: v - before.get(k, 0.0) for k, v in report.seconds.items()})
                self._last_times[name] = dict(report.seconds)
        return deltas

    def rollouts(self, version: int, groups: list[TrainGroup], decode: Callable[[list[int]], str]) -> None:
        """Write a few of the groups of the step that trained `version`."""
        import torch

        lines = []
        for header, payload in groups[:4]:
            ends = payload.lengths.cumsum()
            texts = [
                decode(payload.response_ids[end - n : end].tolist())
                for n, end in zip(payload.lengths, ends, strict=True)
            ]
            advantages = group_advantages(torch.from_numpy(payload.rewards.copy())).tolist()
            uid = Uid(header.episode, header.row)
            prompt, with_tokens = decode(payload.prompt_ids.tolist()), self._config.observe.rollout_tokens
            lines.append(rollout_group(uid, prompt, texts, payload, advantages, with_tokens))
        self._rollouts.write(version, lines)

    def evaluation(self, version: int, rows: list[EvaluationResult]) -> None:
        """Write an evaluation's rows and figures, and show the accuracy."""
        folder = Path(self._config.evaluation.save_dir) / self._config.project
        for task in self._config.evaluation.datasets:
            results = [row for row in rows if row.task == task]
            write_rows(folder, task, version, results)
            figures = summarise(results)
            self._writer.write_eval({"step": version, "task": task, **figures})
            shown = "-" if figures["accuracy"] is None else f"{figures['accuracy']:.1%}"
            self._progress.note(f"evaluation at step {version}: {task} {shown} of {len(results)} rows")

    def _measured(self) -> dict[int, dict[str, float | None]]:
        """Accuracies by step and task, of earlier starts of the run too."""
        measured: dict[int, dict[str, float | None]] = {}
        for line in iter_events(self._log_dir / "eval.jsonl"):
            measured.setdefault(line["step"], {})[line["task"]] = line["accuracy"]
        return measured

    def summary(
        self,
        run_id: str,
        final: m.FinalReport,
        steps: int,
        exit_reason: str,
        topology_ranks: dict[str, int],
        paths: dict[str, Path],
    ) -> RunSummary:
        """Write summary.json and return it. `topology_ranks`: peer name to rank."""
        ranks = [
            RankTime(topology_ranks[name], Role(name.partition(":")[0]), report.seconds)
            for name, report in sorted(final.times.items())
            if name in topology_ranks
        ]
        measured = self._measured()
        before = min(measured, default=None)
        summary = build_summary(
            run=run_id,
            steps=steps,
            steps_of_this_start=self._num_steps,
            seconds=time.monotonic() - self._started,
            exit_reason=exit_reason,
            tasks=list(self._config.evaluation.datasets),
            accuracy_before={} if before is None else measured[before],
            accuracy_after=measured.get(steps, {}) if before != steps else {},
            ledger=_totals(final.counts),
            dropped_by_reason=final.dropped_by_reason,
            ranks=ranks,
            num_completion_tokens=self.num_tokens,
            num_samples=self.num_samples,
            paths=paths,
        )
        self._writer.write_summary(summary)
        return summary


def _totals(counts: dict[str, int]) -> dict[str, int]:
    """leased = consumed + filtered + dropped + returned + live."""
    live = counts["live_leased"] + counts["buffered"] + counts["planned"]
    return {**{k: counts[k] for k in ("leased", "consumed", "filtered", "dropped", "returned")}, "live": live}


def _resident_megabytes() -> float | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
