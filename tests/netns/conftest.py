"""These tests make network namespaces, which takes root: `bash launch/test.sh --netns`.

They are collected only when this folder, or something in it, is what pytest is asked for. Then they fail where
namespaces cannot be made, and say why.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked_for = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return None if any(path.resolve().is_relative_to(HERE) for path in asked_for) else True
