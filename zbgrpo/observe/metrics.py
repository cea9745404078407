"""metrics.jsonl, eval.jsonl and summary.json of a run, and their copies in TensorBoard and Weights & Biases."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from zbgrpo.observe.events import iter_events, void_later
from zbgrpo.observe.jsonl import LineFile, encode_line, replace_file
from zbgrpo.observe.tensorboard_sink import TensorBoardSink
from zbgrpo.observe.wandb_sink import WandbSink

logger = logging.getLogger(__name__)

METRIC_KEYS: dict[str, str] = {
    "step": "optimizer steps committed so far, this one included",
    "wall_s": "seconds since the run (or this resume of it) started",
    "reward/mean": "mean reward of the responses generated for this step, with length penalties, before the filter",
    "reward/format_acc": "share of those responses in a valid format",
    "reward/ans_acc": "share of those responses with a valid format and a right answer",
    "reward/zero_variance_groups": "share of groups whose rewards are all equal",
    "train/loss": "loss of the step, as the gradient sees it",
    "train/kl": "mean k3 KL to the reference model per token; null when KL is off",
    "train/entropy": "mean entropy per token at temperature 1, in nats",
    "train/grad_norm": "global gradient norm before clipping; null if it was not finite and the step was skipped",
    "train/lr": "learning rate of the step",
    "train/clip_ratio": "share of tokens whose ratio was clipped",
    "train/sample_utilization": "share of the responses of the step that took part in the loss",
    "train/overlong_ratio": "share of responses that were cut off at max_new_tokens",
    "rollout/response_length_mean": "mean length of a response, in tokens",
    "rollout/temperature": "mean sampling temperature of the responses of the step",
    "rollout/effective_groups": "share of the groups generated for this step that the filter kept; 1 without a filter",
    "rollout/logprob_gap": "mean |producer - trainer| log-prob of tokens sampled at the trained version; null if none",
    "rollout/ess": "effective sample size of the token ratios, as a share of the tokens",
    "staleness/mean": "mean lag of a trained token, in versions",
    "staleness/max": "largest lag of a trained token, in versions",
    "staleness/tokens_left_out": "tokens left out of the loss because they lag more than max_token_lag",
    "throughput/completion_tokens_per_s": "response tokens trained per second of wall time since the last step",
    "weights/version_applied_min": "lowest policy version that any producer generates with",
    "weights/broadcast_s": "seconds that the last broadcast of a version took",
    "weights/stall_s": "seconds that training stood still to copy weights in this step",
    "weights/producers_blocked": "share of the producers' time since the last step spent on new weights",
    "ledger/leased": "groups out with producers now",
    "ledger/buffered": "groups waiting in the hub now",
    "ledger/consumed": "groups trained so far",
    "ledger/filtered": "groups left out by the filter so far",
    "ledger/dropped": "groups dropped for good so far",
    "bubble/consumers": "share of the consumers' time since the last step that was bubble",
    "bubble/producers": "share of the producers' time since the last step that was bubble",
    "memory/rss_mb": "resident memory of consumer 0, in 2^20 bytes",
}
"""Every key that each line of metrics.jsonl has, with its meaning; more keys may follow."""


class Sink(Protocol):
    """Where metrics go besides the JSON Lines files."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes the metrics of a run; one process (consumer 0) has one.

    Guarantees: every line of metrics.jsonl has every key of METRIC_KEYS, strictly increasing steps, and null in place
    of a value that is not finite or was not given. A line is written at once and whole. Lines of step `first_step` and
    later that an earlier life of the run left in metrics.jsonl or eval.jsonl are moved aside on opening
    (`events.void_later`, suffix `void-<restored step>`), and TensorBoard is told to forget them.
    """

    def __init__(
        self,
        log_dir: str | Path,
        *,
        tensorboard: bool = False,
        wandb: bool = False,
        project: str = "GRPO",
        config_dict: Mapping[str, Any] | None = None,
        first_step: int = 1,
    ) -> None:
        """`first_step`: the first step that will be written, restored step + 1 after a resume.

        Raises ConfigError when wandb is asked for and not installed. Without tensorboard: one warning, and no more.
        """
        self._log_dir = Path(log_dir)
        self._last_step = first_step - 1
        self._reported_missing: set[str] = set()
        self._sinks: list[Sink] = []
        if wandb:
            self._sinks.append(WandbSink(self._log_dir, project, config_dict or {}))
        if tensorboard:
            try:
                self._sinks.append(TensorBoardSink(self._log_dir / "tensorboard", first_step))
            except ImportError as error:
                logger.warning("no TensorBoard files are written: %s (pip install tensorboard)", error)
        for name in ("metrics.jsonl", "eval.jsonl"):
            void_later(self._log_dir / name, lambda line: line["step"] < first_step, f"void-{first_step - 1}")
        self._metrics = LineFile(self._log_dir / "metrics.jsonl")
        self._evaluations = LineFile(self._log_dir / "eval.jsonl")
        self._evaluated = {(line["step"], line["task"]) for line in iter_events(self._log_dir / "eval.jsonl")}

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write one step and return the record as written. Raises ValueError for a step that is not a later one.

        A key of METRIC_KEYS that `values` lacks is written as null and reported once in the log of this rank.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}")
        self._last_step = step
        missing = METRIC_KEYS.keys() - values.keys() - {"step"} - self._reported_missing
        if missing:
            self._reported_missing |= missing
            logger.warning("no value for %s; written as null", ", ".join(sorted(missing)))
        record = {key: finite(values.get(key)) for key in METRIC_KEYS}
        record.update((key, finite(value)) for key, value in values.items() if key not in METRIC_KEYS)
        record["step"] = step
        _write_now(self._metrics, record)
        self._to_sinks(step, record)
        return record

    def write_eval(self, record: Mapping[str, Any]) -> None:
        """Write one evaluation to eval.jsonl. `record` has `step` and `task`; numbers go to the sinks as eval/<task>/.

        A step that a resumed run evaluates again keeps one line: the earlier one is moved aside.
        """
        line = {key: finite(value) for key, value in record.items()}
        name = line["step"], line["task"]
        if name in self._evaluated:
            self._evaluations.close()
            path = self._log_dir / "eval.jsonl"
            void_later(path, lambda old: (old["step"], old["task"]) != name, f"void-again-{line['step']}")
            self._evaluations = LineFile(path)
        self._evaluated.add(name)
        _write_now(self._evaluations, line)
        self._to_sinks(line["step"], {f"eval/{line['task']}/{key}": v for key, v in line.items() if key != "step"})

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Write summary.json atomically; returns its path."""
        path = self._log_dir / "summary.json"
        replace_file(path, msgspec.json.format(encode_line(summary), indent=2) + b"\n")
        return path

    def close(self) -> None:
        """Flush and close everything; may be called again."""
        self._metrics.close()
        self._evaluations.close()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def _to_sinks(self, step: int, record: Mapping[str, Any]) -> None:
        numbers = {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
        numbers.pop("step", None)
        for sink in self._sinks:
            sink.log(step, numbers)


def read_metrics(log_dir: str | Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl in a log folder, a torn last one left out; empty if there is none."""
    path = Path(log_dir) / "metrics.jsonl"
    return list(iter_events(path)) if path.exists() else []


def finite(value: Any) -> Any:
    """`value` as JSON can hold it: scalars of NumPy or torch as Python's, floats that are not finite as None."""
    if not isinstance(value, (bool, int, float, str)) and callable(item := getattr(value, "item", None)):
        value = item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_now(file: LineFile, record: Mapping[str, Any]) -> None:
    file.append(encode_line(record))
    file.flush()
