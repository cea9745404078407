"""A rank of the real run, which writes down beside it how much memory of the GPU it has used at most."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from zbgrpo import launch

if __name__ == "__main__":
    status = launch.main(sys.argv[2:])
    import torch

    found = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    Path(sys.argv[1], f"memory-{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as `zbgrpo.launch` itself
