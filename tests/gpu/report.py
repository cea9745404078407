"""What a part of the check has found: checks that hold or not, figures, and why a figure could not be had."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Report:
    """Names are those of the JSON line; dots in them say where they belong."""

    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Of the figures that are null."""

    @property
    def ok(self) -> bool:
        return all(check["ok"] for check in self.checks.values())

    def check(self, name: str, ok: bool, **details: Any) -> None:
        self.checks[name] = {"ok": bool(ok), **details}

    def within(self, name: str, value: float, limit: float) -> None:
        """A check that an error is not above its limit; NaN is."""
        self.check(name, value <= limit, error=rounded(value), limit=limit)

    def figure(self, name: str, value: Optional[float], otherwise: str = "") -> None:
        """A figure, or null and `otherwise` for the reason."""
        if value is None:
            self.missing(name, otherwise)
        else:
            self.figures[name] = rounded(value)

    def missing(self, name: str, reason: str) -> None:
        self.figures[name] = None
        self.reasons[name] = reason

    def add(self, other: Report) -> None:
        self.checks |= other.checks
        self.figures |= other.figures
        self.reasons |= other.reasons

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Report:
        return cls(**json.loads(path.read_text()))


def rounded(value: float) -> Any:
    """Four significant digits, or all of an integer; what JSON has no number for, as text."""
    if isinstance(value, int):
        return value
    return float(f"{value:.4g}") if value - value == 0 else str(value)


def part_options(description: Optional[str]) -> argparse.ArgumentParser:
    """What every part is told."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["tiny", "135m"], default="135m")
    parser.add_argument("--folder", type=Path, required=True, help="for what the part writes")
    parser.add_argument("--report", type=Path, required=True, help="where its report goes")
    return parser
