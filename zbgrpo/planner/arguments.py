"""The arguments of the verb `zbgrpo plan`; loads nothing, so that the help of all verbs is quick."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Finds the split of a cluster into training and generation, batch sizes and staleness that leave the least bubble, by
simulating the ledger. How fast the parts are comes from a short run (--from logs/PROJECT), from a YAML file (--rates),
from KEY=VALUE arguments such as decode.step_seconds=0.02, or all three: later ones win. zbgrpo/planner/rates.py has the
keys. Prints the best plans, and the flags of the first one as the last line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="rates, such as decode.step_seconds=0.02")
    parser.add_argument("--ranks", required=True, type=_count, metavar="N", help="ranks of the cluster, of both roles")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="YAML file of rates")
    parser.add_argument(
        "--from", dest="log_dir", type=Path, metavar="LOG_DIR", help="measure rates in the logs of a run: logs/PROJECT"
    )
    parser.add_argument(
        "--groups-per-step", type=_count, metavar="S", help="prompts of an optimizer step, over all ranks (-tbs x dp)"
    )
    sizes = (
        ("-g", "generations", "responses per prompt"),
        ("-tmbs", "train_microbatch", "responses per forward and backward pass"),
        ("--max-slots", "max_slots", "most responses that a producer can decode at once (-imbs x -g)"),
        ("-tp", "tp", "tensor parallel size of the trainer"),
        ("-pp", "pp", "pipeline parallel size of the trainer"),
        ("-ptp", "ptp", "ranks of a producer"),
    )
    for flag, name, text in sizes:
        parser.add_argument(flag, dest=name, type=_count, metavar="N", help=f"{text} (default: as the run of --from)")
    parser.add_argument(
        "--max-staleness", type=int, default=4, metavar="N", help="largest one to consider (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the simulated lengths (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)
