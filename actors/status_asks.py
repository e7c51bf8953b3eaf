"""A client's questions of how all actors are, which its supervisor answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..mq.errors import EngineDeadError
from ..mq.messages import Message
from ..mq.supervision import Status, StatusRequest


class StatusAsks:
    """send: to the supervisor."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._waiting: list[asyncio.Future[Status]] = []
        self._end: str | None = None

    async def ask(self) -> Status:
        """Raises EngineDeadError."""
        if self._end is not None:
            raise EngineDeadError(self._end)
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._send(StatusRequest())
        return await answer

    def answered(self, message: Status) -> None:
        """It is as good an answer to all who have asked."""
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            if not answer.done():
                answer.set_result(message)

    def fail(self, error: str) -> None:
        """Nobody answers any more."""
        self._end = error
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            if not answer.done():
                answer.set_exception(EngineDeadError(error))
