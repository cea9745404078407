"""Metrics to Weights & Biases, where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbgrpo.errors import ConfigError


class WandbSink:
    """One Weights & Biases run per log folder: a resumed run goes on in the same one.

    Raises ConfigError where wandb is not installed.
    """

    def __init__(self, log_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "observe.wandb is on, but wandb is not installed: pip install wandb, or set observe.wandb=false"
            ) from None
        id_file = log_dir / "wandb_run_id"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        log_dir.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=project, config=dict(config), dir=str(log_dir), id=run_id, resume="allow" if run_id else None
        )
        id_file.write_text(f"{self._run.id}\n")
        # Our own step as the axis: the built-in one only grows, so that steps repeated after a resume would be lost.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
