"""One mirror of the ranks' memory (executor/mirror.py) on a gateway's event loop.

There is no bell for what ranks write: it has to be looked for. Ranks that compute write again soon
after they have written or heard something; so after each such thing this looks again and again for
some microseconds, and then with naps between that are a small part of how long nothing has come.
`wake` says that a plan is on its way, after which ranks have something to say again.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable, Collection

import numpy as np

from ..executor.mirror import Mirror, read_description
from .linux import sleep_precisely

SPIN_SECONDS = 200e-6
NAP_SHARE = 1 / 32  # of the time in which nothing has come
SHORTEST_NAP, LONGEST_NAP = 20e-6, 50e-3
_BLOCKING_NAP = 1e-3  # up to here the loop stands still meanwhile: its timers are no finer
_LOOK_SECONDS = 5e-3  # while ranks are still to say what is where


class Mirroring:
    """memory_fd: of the ranks, who may not be there yet. theirs, link: as of a Mirror; num_links:
    how many this host has. send: puts a record into the link to the other end's `take`; is_full:
    whether it takes no more for now. longest_nap: less where nobody says `wake`.
    """

    def __init__(
        self,
        memory_fd: int,
        theirs: Collection[int],
        link: int,
        num_links: int,
        send: Callable[[bytes], None],
        is_full: Callable[[], bool],
        longest_nap: float = LONGEST_NAP,
    ) -> None:
        self._memory_fd, self._theirs, self._link = memory_fd, theirs, link
        self._num_links = num_links
        self._send, self._is_full = send, is_full
        self._longest_nap = longest_nap
        self._mirror: Mirror | None = None
        self._has_greeted = False
        self._early: list[bytes] = []  # what has come before our ranks have said what is where
        self._moved_at = 0.0
        self._awake = asyncio.Event()
        self.sent_bytes = self.taken_bytes = 0

    async def run(self) -> None:
        """From when the link is made. Raises CorruptRecordError as Mirror.take."""
        sleep_precisely()
        while True:
            if self._has_begun():
                await self._look()
            else:
                await asyncio.sleep(_LOOK_SECONDS)

    def take(self, payload: bytes) -> None:
        """What the other end has sent. Raises CorruptRecordError."""
        self.taken_bytes += len(payload)
        if self._mirror is None:
            self._early.append(payload)
        else:
            self._mirror.take(payload)
            self.wake()

    def wake(self) -> None:
        self._moved_at = time.perf_counter()
        self._awake.set()

    def _has_begun(self) -> bool:
        """Whether the other end has been greeted. It is as soon as it may be."""
        if self._mirror is None:
            description = read_description(self._memory_fd)
            if description is None:
                return False
            size = os.fstat(self._memory_fd).st_size
            memory = np.frombuffer(mmap.mmap(self._memory_fd, size), np.int64)
            self._mirror = Mirror(memory, description, self._theirs, self._link)
            for payload in self._early:
                self._mirror.take(payload)
            self._early.clear()
        if not self._has_greeted and self._mirror.all_here(self._num_links):
            self._send(self._mirror.greeting())
            self._has_greeted = True
            self.wake()
        return self._has_greeted

    async def _look(self) -> None:
        mirror = self._mirror
        assert mirror is not None
        self._awake.clear()
        if mirror.is_open and not self._is_full() and (payload := mirror.changes()):
            self.sent_bytes += len(payload)
            self._send(payload)
            self._moved_at = time.perf_counter()
        quiet = time.perf_counter() - self._moved_at
        nap = min(max(quiet * NAP_SHARE, SHORTEST_NAP), self._longest_nap)
        if nap > _BLOCKING_NAP:
            timer = asyncio.get_running_loop().call_later(nap, self._awake.set)
            await self._awake.wait()
            timer.cancel()
            return
        _pause(0.0 if quiet < SPIN_SECONDS else nap)
        await asyncio.sleep(0)


def _pause(seconds: float) -> None:
    """For so short a time that the loop may stand still."""
    if seconds:
        time.sleep(seconds)
    else:
        os.sched_yield()
