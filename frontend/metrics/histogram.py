"""A histogram that takes an observation in the time of a list's append.

prometheus_client's own takes some microseconds, which is too much for every token. Here they gather
in a list, and are sorted into buckets when it is long or when somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MOST_WAITING = 8192


class Histogram:
    """bounds: the upper ends of all buckets but the last one, ascending. words: where what is
    sorted in is kept, f64[len(bounds) + 2]: the buckets' counts, and the sum.
    """

    def __init__(self, bounds: Sequence[float], words: NDArray[np.float64] | None = None) -> None:
        words = np.zeros(len(bounds) + 2) if words is None else words
        assert len(words) == len(bounds) + 2
        self.bounds = tuple(bounds)
        self._edges = np.array(bounds, dtype=np.float64)
        self._counts, self._sum = words[:-1], words[-1:]
        self._waiting: list[float] = []

    def observe(self, value: float) -> None:
        self._waiting.append(value)
        if len(self._waiting) >= _MOST_WAITING:
            self.flush()

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """((upper end, how many were at most that), ...) and the sum, as Prometheus has them."""
        self.flush()
        ends = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        counts = np.cumsum(self._counts).tolist()
        return list(zip(ends, counts, strict=True)), float(self._sum[0])

    def flush(self) -> None:
        """Sort in what has gathered."""
        if self._waiting:
            values = np.array(self._waiting)
            self._waiting.clear()
            places = np.searchsorted(self._edges, values)
            self._counts += np.bincount(places, minlength=len(self._counts))
            self._sum += values.sum()
