"""Resets of the prefix cache that were asked for and have not been answered.

A reset goes the way of a request. It changes nothing when it is done twice, so whatever dies on its
way, it is sent again when all is up.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

from ..mq.errors import EngineDeadError


class CacheResets:
    """send: `send(name)` to the engine, which answers by that name."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._answers: dict[str, asyncio.Future[None]] = {}

    async def ask(self, name: str, is_up: bool) -> None:
        """Until it is done. Sent now if the engine is up, else by `send_again`."""
        self._answers[name] = asyncio.get_running_loop().create_future()
        if is_up:
            self._send(name)
        try:
            await self._answers[name]
        finally:
            self._answers.pop(name, None)

    def answered(self, name: str) -> bool:
        """Whether somebody still waits for it."""
        answer = self._answers.pop(name, None)
        if answer is not None and not answer.done():
            answer.set_result(None)
        return answer is not None

    def send_again(self) -> None:
        for name in self._answers:
            self._send(name)

    def fail(self, error: EngineDeadError) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(copy.copy(error))
