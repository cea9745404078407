"""Metrics to Weights & Biases, where it is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbgrpo.errors import ConfigError

_NOT_IN_A_PROJECT = re.compile(r"[/\\#?%:]")
_MAX_PROJECT = 128
_FINISH_SECONDS = 120.0
"""How long the end of a run waits for data to be sent; what is left stays in its file, for `wandb sync`."""


def require_wandb() -> Any:
    """The module wandb. Raises ConfigError, which says what to install, where there is none."""
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            "observe.wandb is on, but wandb is not installed: pip install wandb, or set observe.wandb=false"
        ) from None
    return wandb


class WandbSink:
    """One Weights & Biases run per log folder: a resumed run goes on in the same one.

    Its project is the run's; name, entity, tags and mode are wandb's own to choose (WANDB_NAME, WANDB_ENTITY,
    WANDB_TAGS, WANDB_MODE). Everything is kept below `log_dir/wandb`; with WANDB_MODE=offline nothing else happens, and
    `wandb sync` sends it later. What the process prints is left alone.
    """

    def __init__(self, log_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        """Raises ConfigError where wandb is not installed or does not start (no key, no network, no such entity)."""
        self._wandb = wandb = require_wandb()
        # Output is not captured: the progress bar writes to the same terminal, and rank-N.log has the rest.
        settings = wandb.Settings(console="off")
        if hasattr(settings, "finish_timeout"):  # not in older releases, which wait without end
            settings.finish_timeout = _FINISH_SECONDS
        log_dir.mkdir(parents=True, exist_ok=True)
        id_file = log_dir / "wandb_run_id"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        try:
            self._run: Any = wandb.init(
                project=project_name(project),
                config=dict(config),
                dir=str(log_dir),
                id=run_id,
                resume="allow" if run_id else None,
                settings=settings,
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"observe.wandb is on, but wandb does not start: {' '.join(str(error).split())} (`wandb login` once, "
                "WANDB_MODE=offline on a machine without a network, or observe.wandb=false)"
            ) from None
        id_file.write_text(f"{self._run.id}\n")
        # Our own step as the axis: the built-in one only grows, so that steps repeated after a resume would be lost.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Returns when everything is in the file of the run and, unless offline, sent."""
        self._run.finish()
        # The file is only complete once wandb's own process has ended, and a rank leaves without exit handlers.
        self._wandb.teardown()


def project_name(project: str) -> str:
    """`project` as Weights & Biases takes it: without the characters that it refuses, at most 128."""
    return _NOT_IN_A_PROJECT.sub("-", project)[:_MAX_PROJECT]
