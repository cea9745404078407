"""These tests train with ColossalAI, in an environment of its own: `bash launch/test.sh --colossalai`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("colossalai") else ["test_*.py"]
