"""How long the parts of a start take."""

from __future__ import annotations

import time


class Stopwatch:
    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What has passed since the lap before was `name`."""
        now = time.perf_counter()
        self.seconds[f"{name}_seconds"] = round(now - self._last, 3)
        self._last = now
