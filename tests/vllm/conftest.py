"""Tests of the real vLLM, none of which is collected where it is not installed. They share engines, see `POOL`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") is not None else ["test_*.py"]
