from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import make_workplace


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, data and rewards; runs use projects of their own in it."""
    return make_workplace(tmp_path_factory.mktemp("workplace"))
