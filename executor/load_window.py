"""When experts are placed anew, and from which loads: every `interval` steps, from those of the
`window` steps before.

Counts only go up, so a window's loads are a difference of two, and the first of these is noted
`window` steps before it is needed. Nothing has to be kept for each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class LoadWindow:
    """steps: that have been counted."""

    def __init__(self, window: int, interval: int) -> None:
        self._window, self._interval = window, interval
        self._starts: deque[Any] = deque()
        self.steps = 0

    def step(self, note: Callable[[], Any]) -> tuple[Any, Any] | None:
        """To be called before each step. note: of all counts so far, whatever it gives. When a
        window is over: what was noted where it began, None if that was before the first step; and
        now.
        """
        now, self.steps = self.steps, self.steps + 1
        begins = (now + self._window) % self._interval == 0
        ends = now > 0 and now % self._interval == 0
        noted = note() if begins or ends else None
        if begins:
            self._starts.append(noted)
        if not ends:
            return None
        return (None if now < self._window else self._starts.popleft()), noted
