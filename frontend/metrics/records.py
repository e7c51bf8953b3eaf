"""What is counted of requests, as one vector of numbers, so that those of several add up.

words   reason by reason, how many choices have ended so; then histogram by histogram, the counts
        of its buckets and its sum
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ...mq.messages import FinishReason
from .histogram import Histogram

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(d * 10**e for e in range(6) for d in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20, 50, 100)


class Records:
    """A view of such a vector; f64, and longer than needed."""

    def __init__(self, words: NDArray[np.float64]) -> None:
        self._words = words
        self._end = len(REASONS)
        self._histograms: list[Histogram] = []
        self.first_token = self._next(FIRST_TOKEN_SECONDS)
        self.between_tokens = self._next(TOKEN_SECONDS)
        self.per_token = self._next(TOKEN_SECONDS)
        self.end_to_end = self._next(REQUEST_SECONDS)
        self.queue = self._next(REQUEST_SECONDS)
        self.prefill = self._next(REQUEST_SECONDS)
        self.decode = self._next(REQUEST_SECONDS)
        self.inference = self._next(REQUEST_SECONDS)
        self.prompt_tokens = self._next(TOKENS)
        self.generation_tokens = self._next(TOKENS)
        self.n = self._next(CHOICES)
        self.max_tokens = self._next(TOKENS)

    @property
    def finished(self) -> Counter[str]:
        """Choices that have ended, by finish_reason. "error" has those of requests that the engine
        had accepted and did not bring to their end, too."""
        return Counter({reason: int(self._words[i]) for i, reason in enumerate(REASONS)})

    def finish(self, reason: FinishReason, number: int = 1) -> None:
        """So many choices more have ended."""
        self._words[REASONS.index(reason)] += number

    def flush(self) -> None:
        """Put all that was observed into the vector."""
        for histogram in self._histograms:
            histogram.flush()

    def _next(self, bounds: Sequence[float]) -> Histogram:
        begin = self._end
        self._end += len(bounds) + 2
        histogram = Histogram(bounds, self._words[begin : self._end])
        self._histograms.append(histogram)
        return histogram
