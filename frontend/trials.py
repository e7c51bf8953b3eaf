"""Whose trial it is: of all API servers' suspects (takeover.py) one at a time.

Each server has its own suspects, and an innocent one of one server must not be out when a killer of
another is. A server that may not begin asks again a little later; the trial of a dead one is over,
as its row of the tallies is cleared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..mq.tallies import TRIALS, Tallies

AGAIN_SECONDS = 0.02


class Trials:
    """One server's part in it."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, again: Callable[[], None]) -> bool:
        """Whether this server's next trial begins, which is to `end`. If not, `again` is called."""
        with self._tallies.locked():
            if not self._tallies.total(TRIALS):
                self._tallies.add(TRIALS, 1)
                return True
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(AGAIN_SECONDS, again)
        return False

    def end(self) -> None:
        self._tallies.add(TRIALS, -1)

    def stop(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
