"""Who hangs: the readers whose channels hold something for them that they don't take.

The supervisor looks at every channel once per tick. A reader that had something unread at each of
so many ticks in a row, and whose place has not moved between them, hangs. Time is counted in ticks,
so that a suspended machine, or a Ctrl-Z that stopped all processes, counts for nothing.

A worker commits a plan when it has answered it, so a step that doesn't end shows here too. A reader
is named between one tick before `limit` and `limit`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Position(msgspec.Struct, frozen=True):
    """Where a reader of a channel is (its cursor), and up to where there is something to read."""

    channel: str
    reader: str
    cursor: int
    published: int


class Stall(msgspec.Struct, frozen=True):
    """A reader that hangs. `seconds`: for how long it has been seen not to move, by our ticks."""

    channel: str
    reader: str
    seconds: float


class StallWatch:
    """limit: seconds (--step-timeout)."""

    def __init__(self, limit: float) -> None:
        self.tick_seconds = min(1.0, limit / 4)
        self._most_ticks = max(1, int(limit / self.tick_seconds) - 1)
        self._still: dict[tuple[str, str], tuple[int, int]] = {}  # (cursor, ticks it hasn't moved)

    def tick(self, positions: Iterable[Position]) -> list[Stall]:
        """Who hangs, of these; who isn't among them (it is dead, or starting) is forgotten."""
        still: dict[tuple[str, str], tuple[int, int]] = {}
        stalls = []
        for at in positions:
            if at.cursor >= at.published:
                continue
            key = (at.channel, at.reader)
            cursor, ticks = self._still.get(key, (-1, 0))
            ticks = ticks + 1 if cursor == at.cursor else 0
            still[key] = (at.cursor, ticks)
            if ticks >= self._most_ticks:
                stalls.append(Stall(at.channel, at.reader, ticks * self.tick_seconds))
        self._still = still
        return stalls
