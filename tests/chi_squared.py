"""Whether draws follow a distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_counts(counts: NDArray[Any], expected: NDArray[np.float64]) -> None:
    """Pearson's chi-squared, one false alarm in a million (Wilson and Hilferty's approximation)."""
    assert (counts[expected == 0] == 0).all(), "a token that was cut off was drawn"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    assert freedom > 0, "one outcome proves nothing"
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + 4.76 * spread**0.5) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < limit
