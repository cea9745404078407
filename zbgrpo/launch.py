"""`torchrun ... -m zbgrpo.launch`: one process of a run.

The configuration is read, checked and, with --dry-run, shown without loading torch; a rank knows its role and its
share of the cores before torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

from zbgrpo.config.dryrun import count_rows, describe_plan
from zbgrpo.config.flags import label
from zbgrpo.config.load import LoadedConfig, load_config
from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import EXIT_USER_ERROR, ConfigError, UserError
from zbgrpo.topology.env import TorchrunEnv, available_cores, read_torchrun_env, set_thread_env
from zbgrpo.topology.roles import threads_per_rank

_PATIENCE_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run this process; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = True
    try:
        env = read_torchrun_env()
        first = env is None or env.rank == 0
        loaded = load_config(arguments, None if env is None else env.world_size)
        if loaded.dry_run:
            if first:
                _show_plan(loaded)
            return 0
        if env is None:
            raise ConfigError(
                "not started by torchrun; use: torchrun --nproc-per-node "
                f"{' '.join([str(loaded.config.world_size), '-m zbgrpo.launch', *arguments])}"
            )
        python = _other_interpreter(loaded.config, env)
    except UserError as error:
        return _user_error(error, first)
    if first:
        for line in (*loaded.notes, *loaded.warnings):
            print(f"zbgrpo: {line}", file=sys.stderr, flush=True)
    if python is not None:
        os.execv(python, [python, "-u", "-m", "zbgrpo.launch", *arguments])  # before anything heavy is loaded
    return _start(loaded.config, env)


def _other_interpreter(config: RunConfig, env: TorchrunEnv) -> str | None:
    """The interpreter that this rank is to run under (--consumer-python), unless it does. Raises ConfigError."""
    python = config.cluster.consumer_python
    if python is None or env.rank >= (config.cluster.num_trainers or 0):
        return None
    path = os.path.abspath(os.path.expanduser(python))  # not resolved: the python of an environment is a link
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"{label('cluster.consumer_python')}: {python} is no interpreter that can be started; give the path of one "
            "(.venv-colossalai/bin/python after `bash launch/install.sh colossalai`)"
        )
    return path if path != os.path.abspath(sys.executable) else None


def _user_error(error: UserError, first: bool) -> int:
    """Every rank has found the same mistake, and one says so. The others give it time: the launcher ends all ranks as
    soon as one of them has failed, this sleep included."""
    if first:
        print(f"zbgrpo: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_PATIENCE_SECONDS)
    return EXIT_USER_ERROR


def _start(config: RunConfig, env: TorchrunEnv) -> int:
    # Until there is something to save, Ctrl-C ends a rank at once, wherever it is and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from zbgrpo.engine.finished import finished_at

    try:
        version = finished_at(config)
    except UserError as error:
        return _user_error(error, env.rank == 0)
    if version is not None:
        if env.rank == 0:
            print(
                f"zbgrpo: the run {config.project!r} has finished with step {version}; nothing to do. Raise "
                "--max-steps to go on, use another -p/--project, or --resume never to start over"
            )
        return 0
    threads = threads_per_rank(available_cores(), env.local_world_size, config.cluster.threads_per_rank)
    set_thread_env(threads)
    import torch

    from zbgrpo.engine.lifecycle import run_rank

    torch.set_num_threads(threads)
    if env.rank == 0:
        print(
            f"zbgrpo: {env.world_size} ranks, {threads} CPU thread{'s' * (threads > 1)} each (replaces torchrun's own "
            "setting of one thread per rank)",
            flush=True,
        )
    return run_rank(config, env)


def _show_plan(loaded: LoadedConfig) -> None:
    num_rows = count_rows(loaded.config.data.path)
    lines = [f"note: {line}" for line in (*loaded.notes, *loaded.warnings)]
    with contextlib.suppress(BrokenPipeError):  # a reader such as head may have seen enough
        print("\n".join([*lines, describe_plan(loaded.config, num_rows)]), flush=True)


def entry() -> None:
    """Run and leave at once: background threads of a failed collective must not keep the process alive."""
    status = main()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    entry()
