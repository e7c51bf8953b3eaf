"""How many tokens the steps computed, counted by size, for those who want to see the batching."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepSizes:
    """Steps of no tokens, which only update the batch, don't count."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)

    def add(self, num_tokens: int) -> None:
        if num_tokens:
            self._counts[bisect_left(BOUNDS, num_tokens)] += 1

    def statistics(self) -> dict[str, float]:
        """Steps of at most so many tokens and more than the bound before; "inf" for the rest."""
        names = (*map(str, BOUNDS), "inf")
        return {f"steps_le_{n}": count for n, count in zip(names, self._counts, strict=True)}
