"""`zbgrpo VERB ...`: what can be done beside a run. The run itself is started by torchrun (`zbgrpo.launch`).

A verb loads what it needs when it runs; the help loads next to nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zbgrpo.errors import EXIT_USER_ERROR, ConfigError, UserError, ZbgrpoError
from zbgrpo.planner.arguments import DESCRIPTION, add_arguments

if TYPE_CHECKING:
    from zbgrpo.engine.check_ledger import LedgerReport

_EXIT_BROKEN_PIPE = 128 + 13  # what a shell reports for a program that SIGPIPE ended
_EXIT_INTERRUPTED = 128 + 2

_BENCHMARKS = {
    "transport": "groups per second from a producer to a consumer, against an actor with a queue",
    "overlap": "generation and training at the same time, against turns",
    "tails": "idle time when a few responses are much longer than the rest",
    "weights": "new weights to the producers, against a bare broadcast and a copy in memory",
    "logprob": "log-probs from hidden states, against whole logits: memory and time",
    "train": "a whole run, against TRL's GRPOTrainer",
    "hub": "groups per second through the process that owns order and accounting",
    "plan": "what the planner predicts, against real runs",
    "evaluation": "training while an evaluation runs",
}
"""Name of each module of `zbgrpo.bench` that is one, and what it measures."""

_STATES = {"end": "finished", "stop": "stopped", "open": "did not finish, or is still running"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status: 0 done, 1 violations or a failure, 2 the user's error."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.verb(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`). What is still buffered must not fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except UserError as error:
        return _fail(str(error), EXIT_USER_ERROR)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}", EXIT_USER_ERROR)
    except ZbgrpoError as error:
        return _fail(f"{type(error).__name__}: {error}", 1)
    return status


def _fail(message: str, status: int) -> int:
    print(f"zbgrpo: {message}", file=sys.stderr, flush=True)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zbgrpo",
        description="Tools beside a run. A run is started with: torchrun --nproc-per-node N -m zbgrpo.launch --help",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    score = verbs.add_parser(
        "score",
        help="score a file of responses",
        description="Score responses as a run would. Prints one JSON line per row, in the order of the file: reward, "
        "format_acc, ans_acc. A row that cannot be scored has null in their place, and `error`.",
    )
    score.add_argument("file", metavar="FILE.jsonl", help="rows with `response` and `gt_answer` or `test_cases`")
    score.add_argument(
        "--reward-type",
        required=True,
        metavar="KIND",
        help="think_answer_tags, boxed, code, module:function or file.py:function",
    )
    score.add_argument(
        "--time-limit",
        type=_positive_seconds,
        default=10.0,
        metavar="S",
        help="seconds for one response; one that takes longer scores 0 (default: %(default)s)",
    )
    score.add_argument(
        "--workers", type=_positive_count, default=2, metavar="N", help="scoring processes (default: %(default)s)"
    )
    score.add_argument(
        "--code-sandbox-url", metavar="URL", help="code: run programs in a remote sandbox, at its run_code endpoint"
    )
    score.add_argument(
        "--min-isolation",
        type=int,
        choices=(0, 1, 2),
        default=1,
        help="code: run nothing on a machine that keeps programs in less well (default: %(default)s)",
    )
    score.add_argument(
        "--allow-unsafe-code", action="store_true", help="code: run programs below that isolation all the same"
    )
    score.set_defaults(verb=_score)

    rollouts = verbs.add_parser(
        "rollouts",
        help="show sampled responses for reading",
        description="Print a file of sampled groups (rollouts/<project>/step-N.jsonl): prompt, responses, rewards, "
        "and the versions of the policy that wrote them.",
    )
    rollouts.add_argument("file", metavar="FILE", help="a file of rollouts/<project>")
    rollouts.set_defaults(verb=_rollouts)

    check = verbs.add_parser(
        "check-ledger",
        help="check what became of every group of a run",
        description="Join the event logs of the hub, the producers and the consumers of a run, and check that every "
        "group was used as promised. Prints a line per invariant; the exit status is 1 if one is violated. Works on "
        "finished, stopped, killed and resumed runs.",
    )
    check.add_argument("log_dir", metavar="LOG_DIR", type=Path, help="log folder of the run: logs/<project>")
    check.set_defaults(verb=_check_ledger)

    _add_replay(verbs)
    _add_report(verbs)

    plan = verbs.add_parser("plan", help="find the split of a cluster with the least bubble", description=DESCRIPTION)
    add_arguments(plan)
    plan.set_defaults(verb=_plan)
    _add_bench(verbs)
    return parser


def _add_replay(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = verbs.add_parser(
        "replay",
        help="train the recorded steps of a run again, and compare",
        description="Train again, bit by bit on a CPU, what the optimizer steps of a run were made of "
        "(observe.record_steps=true), with as many processes as the run had consumers, and compare the weights of each "
        "version that was sent. To be started in the folder that the run was started in.",
    )
    replay.add_argument("log_dir", metavar="LOG_DIR", type=Path, help="log folder of the run: logs/<project>")
    replay.add_argument(
        "--from", dest="version", type=int, metavar="N", help="the start that went on from step N (default: the last)"
    )
    replay.set_defaults(verb=_replay)


def _add_report(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = verbs.add_parser(
        "report",
        help="make one HTML page of a run",
        description="Make one HTML page of what a run has left behind: figures, curves, a timeline of all ranks, what "
        "became of the groups, sampled responses, settings. It needs no network and nothing beside it. Also merges the "
        "traces of the processes into trace/trace.json, for ui.perfetto.dev. Works on finished, stopped, killed, "
        "resumed and running runs.",
    )
    report.add_argument("log_dir", metavar="LOG_DIR", type=Path, help="log folder of the run: logs/<project>")
    report.add_argument(
        "-o", "--output", metavar="FILE.html", type=Path, help="where to write it (default: LOG_DIR/report.html)"
    )
    report.set_defaults(verb=_report)


def _add_bench(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    width = max(map(len, _BENCHMARKS))
    bench = verbs.add_parser(
        "bench",
        help="measure one of the figures that are promised",
        description="Measure one of the promised figures against its baseline. Prepares what it needs, takes a few "
        "minutes, and prints one JSON object last.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["benchmarks:", *(f"  {name:<{width}}  {text}" for name, text in _BENCHMARKS.items())]),
    )
    bench.add_argument("name", metavar="NAME", help="one of those below; `zbgrpo bench NAME --help` has its arguments")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the benchmark")
    bench.set_defaults(verb=_bench)


def _positive_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value


def _score(arguments: argparse.Namespace) -> int:
    from zbgrpo.rewards.score import RewardSpec, score_file

    spec = RewardSpec(
        arguments.reward_type,
        arguments.time_limit,
        code_sandbox_url=arguments.code_sandbox_url,
        min_isolation=arguments.min_isolation,
        allow_unsafe_code=arguments.allow_unsafe_code,
    )
    score_file(arguments.file, spec, sys.stdout, arguments.workers)
    return 0


def _rollouts(arguments: argparse.Namespace) -> int:
    from zbgrpo.observe.rolloutlog import render_rollouts

    render_rollouts(arguments.file, sys.stdout)
    return 0


def _check_ledger(arguments: argparse.Namespace) -> int:
    from zbgrpo.engine.check_ledger import check_logs

    report = check_logs(arguments.log_dir)
    print("\n".join(_report_lines(arguments.log_dir, report)))
    return 0 if report.ok else 1


def _replay(arguments: argparse.Namespace) -> int:
    from zbgrpo.engine.replay import command

    program = command(arguments.log_dir, arguments.version)
    sys.stdout.flush()
    os.execv(program[0], program)


def _report(arguments: argparse.Namespace) -> int:
    from zbgrpo.observe.report.page import write_report

    page, trace = write_report(arguments.log_dir, arguments.output)
    print(f"{page}: open it in a browser")
    if trace is not None:
        print(f"{trace}: open it in ui.perfetto.dev or chrome://tracing")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from zbgrpo.planner.command import run

    return run(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    name = arguments.name
    if name not in _BENCHMARKS:
        from difflib import get_close_matches

        near = get_close_matches(name, _BENCHMARKS) or _BENCHMARKS
        raise ConfigError(f"bench {name}: no such benchmark; the nearest: {', '.join(near)}")
    sys.stdout.flush()
    # As a program of its own: it measures, so it starts with nothing loaded and gets the signals itself.
    os.execv(sys.executable, [sys.executable, "-m", f"zbgrpo.bench.{name}", *arguments.arguments])


def _report_lines(log_dir: Path, report: LedgerReport) -> list[str]:
    totals = dict(report.totals)
    leased = totals.pop("leased")
    sum_of = " + ".join(f"{count} {kind}" for kind, count in totals.items())
    starts = "1 start" if report.num_starts == 1 else f"{report.num_starts} starts"
    lines = [f"{log_dir}: {_STATES[report.state]}, step {report.version}, {starts}", f"{leased} leased = {sum_of}"]
    if report.num_unconfirmed:
        lines.append(f"{report.num_unconfirmed} facts behind the last saved state are in one of two logs only")
    width = max(len(invariant.name) for invariant in report.invariants)
    for invariant in report.invariants:
        if invariant.num_violations:
            verdict, count = "violated", f"{invariant.num_violations} of {invariant.num_checked} checks"
        else:
            verdict, count = "ok", f"{invariant.num_checked} checks"
        lines.append(f"{verdict:<8}  {invariant.name:<{width}}  {count:>14}  {invariant.statement}")
        lines += [f"          - {violation}" for violation in invariant.violations]
        if (hidden := invariant.num_violations - len(invariant.violations)) > 0:
            lines.append(f"          - and {hidden} more")
    return lines


if __name__ == "__main__":
    sys.exit(main())
