"""Which groups are worth training on."""

from __future__ import annotations

import math
from collections.abc import Iterable


def is_effective(ans_acc: Iterable[float], filter_range: tuple[float, float]) -> bool:
    """Whether the mean answer accuracy of one group lies strictly inside `filter_range` (Yu et al. 2025, "DAPO",
    section 3.2: dynamic sampling).

    `ans_acc` has one value per response, normally 0.0 or 1.0. A group with a mean on either end of the range is not
    effective. Raises ValueError for an empty group or a value that is not finite.
    """
    values = [float(value) for value in ans_acc]
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"ans_acc of a group must be finite and not empty: {values}")
    low, high = filter_range
    return low < math.fsum(values) / len(values) < high
