"""What has arrived for one waiting task. Several requests can share one: a batch has one reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..mq.errors import RingcastError
from ..mq.messages import Chunk


class Mailbox:
    """Chunks in order of arrival. It ends when each of its requests has.

    taker: if set, gets each chunk that comes while the task waits, which goes on waiting if the
    taker returns True. (Nothing else waits then, so the order stays.)
    """

    __slots__ = ("_error", "_items", "_waiter", "num_open", "taker")

    def __init__(self) -> None:
        self.num_open = 0
        self.taker: Callable[[Chunk], bool] | None = None
        self._items: list[Chunk] = []
        self._error: RingcastError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Chunk]:
        """All chunks that wait, or the next one; nothing at the end.

        Raises the first error of any of its requests, once what came before it has been taken.
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            if not self.num_open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = self._items
        self._items = []
        return items

    def put(self, chunk: Chunk) -> None:
        taker, waiter = self.taker, self._waiter
        if taker is None or waiter is None or waiter.done() or not taker(chunk):
            self._items.append(chunk)
            self._wake()

    def close_one(self, error: RingcastError | None = None) -> None:
        self.num_open -= 1
        if error is not None and self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
