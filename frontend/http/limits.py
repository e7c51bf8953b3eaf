"""How much one key may ask for: at a time, and in a minute. No clock of its own."""

from __future__ import annotations

from typing import NamedTuple

from ...mq.tallies import KEYS, Tallies

WINDOW_SECONDS = 60.0
_A_MOMENT = 1.0  # nobody knows when a request under way will end


class Refusal(NamedTuple):
    reason: str
    retry_after: float  # seconds, above 0


class KeyLimits:
    """Counts the requests let in, by key. Those refused here don't count.

    The window slides: in no 60 s does a key begin more than `max_per_minute` requests. tallies:
    where they are counted, for all API servers together.
    """

    def __init__(
        self, tallies: Tallies, max_concurrency: int | None, max_per_minute: int | None
    ) -> None:
        self._tallies = tallies
        self._max_concurrency = max_concurrency
        self._max_per_minute = max_per_minute

    def enter(self, key: int, now: float) -> Refusal | None:
        """Let a request in, which is to `leave`; or say why not."""
        tallies, most, often = self._tallies, self._max_concurrency, self._max_per_minute
        with tallies.locked():
            if most is not None and tallies.total(KEYS + key) >= most:
                return Refusal(
                    f"{most} requests with this key are under way, as many as it may have",
                    _A_MOMENT,
                )
            if often is not None:
                free_at = tallies.free_at(key)
                if free_at > now:
                    return Refusal(
                        f"{often} requests with this key have begun in the last minute, as many "
                        "as it may have",
                        free_at - now,
                    )
                tallies.begin(key, now + WINDOW_SECONDS)
            tallies.add(KEYS + key, 1)
        return None

    def leave(self, key: int) -> None:
        self._tallies.add(KEYS + key, -1)
