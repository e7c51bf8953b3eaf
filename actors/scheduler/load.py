"""What a scheduler says of its load to the coordinator, and when.

When it has changed, and at most every REPORT_SECONDS while there is work: then another flush comes
soon. That all work has ended is said at once, for nothing may follow.
"""

from __future__ import annotations

import math
from collections import Counter

from ...mq.messages import Load

REPORT_SECONDS = 0.01


class LoadReports:
    """clients: how many choices of each client are open. The core counts them here."""

    def __init__(self) -> None:
        self.clients: Counter[int] = Counter()
        self._last: Load | None = None
        self._sent_at = -math.inf

    def count(self, client: int, choices: int) -> None:
        self.clients[client] += choices
        if not self.clients[client]:
            del self.clients[client]

    def forget(self) -> None:
        """Who was told has died."""
        self._last = None

    def take(self, waiting: int, running: int, kv_usage: float, now: float) -> Load | None:
        """The report that is due, if one is."""
        idle = not waiting and not running
        if not idle and now - self._sent_at < REPORT_SECONDS:
            return None
        load = Load(waiting, running, kv_usage, sorted(self.clients.items()))
        if load == self._last:
            return None
        self._last, self._sent_at = load, now
        return load
