"""How much one key may ask for: at a time, and in a minute. No clock of its own."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_SECONDS = 60.0
_A_MOMENT = 1.0  # nobody knows when a request under way will end


class Refusal(NamedTuple):
    reason: str
    retry_after: float  # seconds, above 0


class KeyLimits:
    """Counts the requests let in, by key. Those refused here don't count.

    The window slides: in no 60 s does a key begin more than `max_per_minute` requests.
    """

    def __init__(self, max_concurrency: int | None, max_per_minute: int | None) -> None:
        self._max_concurrency = max_concurrency
        self._max_per_minute = max_per_minute
        self._num_running: dict[int, int] = {}
        self._begun: dict[int, deque[float]] = {}

    def enter(self, key: int, now: float) -> Refusal | None:
        """Let a request in, which is to `leave`; or say why not."""
        running = self._num_running.get(key, 0)
        if self._max_concurrency is not None and running >= self._max_concurrency:
            return Refusal(
                f"{running} requests with this key are under way, as many as it may have", _A_MOMENT
            )
        if self._max_per_minute is not None:
            begun = self._begun.setdefault(key, deque())
            while begun and begun[0] <= now - WINDOW_SECONDS:
                begun.popleft()
            if len(begun) >= self._max_per_minute:
                return Refusal(
                    f"{len(begun)} requests with this key have begun in the last minute, as many "
                    "as it may have",
                    begun[0] + WINDOW_SECONDS - now,
                )
            begun.append(now)
        self._num_running[key] = running + 1
        return None

    def leave(self, key: int) -> None:
        self._num_running[key] -= 1
