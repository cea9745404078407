"""Prints two lines for the flags of a run: the folder of its models and states, and that of its logs."""

from __future__ import annotations

import sys
from pathlib import Path

from zbgrpo.config.load import load_config
from zbgrpo.errors import EXIT_USER_ERROR, UserError

if __name__ == "__main__":
    try:
        config = load_config(sys.argv[1:]).config
    except UserError as error:
        print(f"zbgrpo: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    for folder in (config.checkpoint.save_dir, config.observe.log_dir):
        print(Path(folder) / config.project)
