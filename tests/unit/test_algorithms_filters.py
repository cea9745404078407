import math

import numpy as np
import pytest

from zbgrpo.algorithms.filters import is_effective

RANGE = (0.01, 0.99)


@pytest.mark.parametrize(
    ("ans_acc", "expected"),
    [
        ([0.0] * 8, False),
        ([1.0] * 8, False),
        ([1.0] + [0.0] * 7, True),
        ([1.0] * 7 + [0.0], True),
        ([0.5] * 8, True),
    ],
)
def test_groups_that_teach_something_are_kept(ans_acc: list[float], expected: bool) -> None:
    assert is_effective(ans_acc, RANGE) is expected
    assert is_effective(np.asarray(ans_acc, dtype=np.float32), RANGE) is expected


def test_both_ends_of_the_range_are_outside() -> None:
    one_in_a_hundred = [1.0] + [0.0] * 99
    assert not is_effective(one_in_a_hundred, RANGE)
    assert not is_effective([1.0 - value for value in one_in_a_hundred], RANGE)
    assert is_effective([1.0, *one_in_a_hundred], RANGE)
    assert not is_effective([1.0] * 7 + [0.0] * 3, (0.01, 0.7))
    assert is_effective([1.0] * 6 + [0.0] * 4, (0.01, 0.7))


@pytest.mark.parametrize("ans_acc", [[], [math.nan, 1.0], [math.inf]])
def test_no_verdict_without_usable_values(ans_acc: list[float]) -> None:
    with pytest.raises(ValueError, match="ans_acc"):
        is_effective(ans_acc, RANGE)
