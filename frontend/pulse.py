"""Whether the engine is alive: when it was last heard, and a ping where that was too long ago.

A Ping goes the way of a request through every actor, and a step of the workers besides. Many may
ask at once, and may ask a silent engine again and again: they share one ping, until it has had all
the time that one of them waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

RECENT_SECONDS = 1.0


class Pulse:
    """ping: `ping(number)` sends one."""

    def __init__(self, ping: Callable[[int], None]) -> None:
        self._ping = ping
        self._num_pings = 0
        self._pinged = -math.inf
        self._heard = -math.inf
        self._answer: asyncio.Future[bool] | None = None

    def beat(self) -> None:
        """The engine has said something."""
        self._heard = time.monotonic()
        if self._answer is not None:
            self._end_wait(True)

    def stop(self) -> None:
        """The engine has died: what was asked is not answered, and what was heard is history."""
        self._heard = self._pinged = -math.inf
        self._end_wait(False)

    def ask_again(self) -> None:
        """Somebody by whom a ping may have gone has died, and others live."""
        if self._answer is not None:
            self._ping(self._num_pings)

    async def check(self, seconds: float) -> bool:
        """Whether the engine has spoken in the last second, or does so within `seconds`."""
        now = time.monotonic()
        if now - self._heard <= RECENT_SECONDS:
            return True
        if now - self._pinged >= seconds:
            self._pinged = now
            self._num_pings += 1
            self._ping(self._num_pings)
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        # Unlike wait_for, this leaves alone what others wait for too.
        done, _ = await asyncio.wait([self._answer], timeout=seconds)
        return any(answer.result() for answer in done)

    def _end_wait(self, alive: bool) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.set_result(alive)
