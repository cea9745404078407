"""These tests start a Slurm cluster of their own, as root: `bash launch/test.sh --slurm`, which sets this variable."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("ZBGRPO_TEST_SLURM") else ["test_*.py"]
