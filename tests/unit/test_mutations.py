"""The named mutations of `tests/mutations.py` fit the code as it is; running them is left to that script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, REPOSITORY


def test_there_are_ten() -> None:
    assert len(MUTATIONS) == 10


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_fits_the_code(name: str) -> None:
    mutation = MUTATIONS[name]
    text = (REPOSITORY / mutation.file).read_text()
    assert text.count(mutation.old) == 1 and mutation.old != mutation.new
    assert all(Path(REPOSITORY / test).is_file() for test in mutation.tests.split())
