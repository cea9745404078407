"""What the benchmarks share: ratios of interleaved pairs, programs that leave nothing behind, cores, baselines, output.

As a program it is one rank of a pinned run: `python -m zbgrpo.bench.common CORE,CORE,... MODULE ARGUMENT ...` keeps the
rank on its core and goes on as the module.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any, Optional, Union

from zbgrpo.errors import EXIT_USER_ERROR, ConfigError, ResourceError, UserError, ZbgrpoError
from zbgrpo.rewards.sandbox.processes import descendants
from zbgrpo.topology.env import read_torchrun_env

DEFAULT_CACHE = ".bench"
_STOP_SECONDS = 45.0  # torchrun gives its ranks 30 to end
_INSTALL_SECONDS = 1200.0


# ------------------------------------------------------------------------------------------------ figures


def pairs_summary(ratios: Sequence[float], name: str = "ratio") -> dict[str, float]:
    """Median and spread of the ratios of interleaved pairs: {name, name_min, name_max}.

    Example: `pairs_summary([2.0, 1.0, 4.0])` is {"ratio": 2.0, "ratio_min": 1.0, "ratio_max": 4.0}.
    """
    if not ratios:
        raise ValueError("no pairs were measured")
    return {name: rounded(median(ratios)), f"{name}_min": rounded(min(ratios)), f"{name}_max": rounded(max(ratios))}


def rounded(value: float) -> float:
    """Four significant digits, which is more than any of these figures has."""
    return float(f"{value:.4g}")


def load_average() -> float:
    """Processes that want to run, over the last minute: what else the machine was doing."""
    return round(os.getloadavg()[0], 2)


def print_result(result: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own, as the last thing on standard output."""
    print(json.dumps(result), flush=True)


def finish(measure: Callable[[], Mapping[str, Any]]) -> int:
    """Measure, print the result, and return the exit status; an error of ours is one line and its status."""
    try:
        result = measure()
    except ZbgrpoError as error:
        print(f"zbgrpo: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR if isinstance(error, UserError) else 1
    print_result(result)
    return 0


def new_parser(name: str, documentation: Optional[str]) -> argparse.ArgumentParser:
    """Parser of a benchmark, with the first line of its module's text."""
    return argparse.ArgumentParser(
        prog=f"zbgrpo bench {name}", description=(documentation or "").split("\n", maxsplit=1)[0]
    )


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    """`--cache FOLDER`: where baselines and models are kept from one call to the next."""
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(DEFAULT_CACHE),
        metavar="FOLDER",
        help="keeps what baselines need from one call to the next (default: %(default)s)",
    )


# ------------------------------------------------------------------------------------------------ programs


def run_program(
    command: Sequence[Union[str, Path]],
    timeout_seconds: float,
    *,
    what: str = "the measured run",
    environment: Optional[Mapping[str, str]] = None,
    stdout: Union[int, IO[Any], None] = None,
    stderr: Union[int, IO[Any], None] = None,
) -> None:
    """Wait for a program. Raises `ZbgrpoError` if it fails or takes too long.

    One that takes too long, or is interrupted, is asked to stop and then killed with everything beneath it.
    `environment`: variables changed for it, beside this process's own.
    """
    words = [str(word) for word in command]
    if environment:
        words = ["env", *(f"{name}={value}" for name, value in environment.items()), *words]
    before = set(descendants())
    with subprocess.Popen(words, stdout=stdout, stderr=stderr) as process:
        try:
            status = process.wait(timeout_seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
            stop_program(process, set(descendants()) - before)
            if isinstance(reason, subprocess.TimeoutExpired):
                raise ZbgrpoError(f"{what} did not end within {timeout_seconds:.0f} s") from None
            raise
    if status != 0:
        raise ZbgrpoError(f"{what} ended with status {status}")


def stop_program(process: subprocess.Popen[Any], tree: set[int], patience_seconds: float = _STOP_SECONDS) -> None:
    """Ask a program to end; after that time kill it, and at last whatever is left of `tree`, processes beneath it."""
    process.terminate()
    try:
        process.wait(patience_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        for pid in tree - {process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pinned_torchrun(cores: Sequence[int], module: str, arguments: Sequence[str]) -> list[str]:
    """Command that runs a module as one rank per given core, each kept there with its threads and child processes.

    Several ranks may share a core. No rank sees a GPU.
    """
    if not cores:
        raise ConfigError("a run needs at least one rank")
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(cores)),
        "-m", "zbgrpo.bench.common", ",".join(map(str, cores)), module, *arguments,
    ]  # fmt: skip


def become_rank(cores: str, module: str, arguments: Sequence[str]) -> None:
    """Keep this process on the core of its rank, and go on as the module; never on a GPU."""
    env = read_torchrun_env()
    assert env is not None, "started by torchrun"
    # Before torch is loaded: its threads, and all child processes, take it over.
    os.sched_setaffinity(0, {int(cores.split(",")[env.rank])})
    os.execvp("env", ["env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", module, *arguments])


# ------------------------------------------------------------------------------------------------ baselines


def baseline_python(name: str, packages: Sequence[str], folder: Union[str, Path]) -> Path:
    """Interpreter of a virtual environment with these packages, made by pip below `folder` at the first call.

    It sees the packages of this interpreter behind its own, and torch is held at the version found there, so that
    none is installed a second time and both sides of a comparison compute with the same one. Raises `ResourceError`
    with what pip says when it cannot be made; half of one is never used.
    """
    import torch

    wanted = [f"torch=={torch.__version__}", *packages]
    key = hashlib.sha256("\n".join([sys.version, sys.prefix, *wanted]).encode()).hexdigest()[:8]
    home = Path(folder).resolve() / f"{name}-{key}"
    python, complete = home / "bin" / "python", home / "complete"
    if complete.is_file():
        return python
    print(f"bench: making an environment for the baseline {name} in {home}", file=sys.stderr, flush=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    _prepare([sys.executable, "-m", "venv", "--clear", str(home)], name)
    _see_packages_of_this_interpreter(home)
    constraint = home / "constraints.txt"
    constraint.write_text(wanted[0] + "\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _prepare([*pip, "--constraint", str(constraint), *packages], name)
    complete.touch()
    return python


def _see_packages_of_this_interpreter(home: Path) -> None:
    # `--system-site-packages` would show those of the interpreter that this one's own environment was made from.
    (site,) = home.glob("lib/python*/site-packages")
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    lines = [f"import site; site.addsitedir({path!r})" for path in seen]
    (site / "behind.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _prepare(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise ResourceError(f"cannot prepare the baseline {name}: {said[-1]}")


if __name__ == "__main__":
    become_rank(sys.argv[1], sys.argv[2], sys.argv[3:])
