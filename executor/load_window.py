"""When experts are placed anew, and from which loads: every `interval` steps, from those of the
`window` steps before.

Counts only go up, so a window's loads are a difference of two, and the first of these is noted
`window` steps before it is needed. Nothing has to be kept for each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np


class LoadWindow:
    def __init__(self, window: int, interval: int) -> None:
        self._window, self._interval = window, interval
        self._starts: deque[np.ndarray] = deque()
        self.steps = 0

    def step(self, totals: Callable[[], np.ndarray]) -> np.ndarray | None:
        """To be called before each step; totals: a copy of all counts so far. The window's loads
        when they are due: of all steps where there were fewer.
        """
        now, self.steps = self.steps, self.steps + 1
        if (now + self._window) % self._interval == 0:
            self._starts.append(totals())
        if not now or now % self._interval:
            return None
        if now < self._window:
            return totals()
        return totals() - self._starts.popleft()
