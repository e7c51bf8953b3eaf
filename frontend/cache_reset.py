"""Resets of the prefix cache that were asked for and have not been answered.

A reset goes the way of a request, once to every replica that lives, and is done when each of them
has answered: a replica that dies takes its cache along, so nobody waits for it while others live.
It changes nothing when it is done twice, so whatever else dies on its way, it is sent again when
requests can be served again.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable

import msgspec

from ..mq.errors import EngineDeadError


class _Reset(msgspec.Struct):
    """missing: the replicas that it was sent to and that have not answered."""

    answer: asyncio.Future[None]
    missing: set[int]


class CacheResets:
    """send: `send(name, engine)` to a replica, which answers by that name."""

    def __init__(self, send: Callable[[str, int], None]) -> None:
        self._send = send
        self._open: dict[str, _Reset] = {}

    async def ask(self, name: str, engines: Iterable[int]) -> None:
        """Until it is done by these replicas. Where there are none, `send_again` sends it."""
        reset = _Reset(asyncio.get_running_loop().create_future(), set())
        self._open[name] = reset
        self._send_to(name, reset, engines)
        try:
            await reset.answer
        finally:
            self._open.pop(name, None)

    def answered(self, name: str, engine: int) -> bool:
        """Whether somebody still waits for it."""
        reset = self._open.get(name)
        if reset is None or engine not in reset.missing:
            return False
        self._forget(reset, engine)
        return True

    def lost(self, engine: int) -> None:
        """This replica has died, and others live."""
        for reset in self._open.values():
            if engine in reset.missing:
                self._forget(reset, engine)

    def send_again(self, engines: Iterable[int]) -> None:
        live = list(engines)
        for name, reset in self._open.items():
            if not reset.answer.done():
                self._send_to(name, reset, live)

    def fail(self, error: EngineDeadError) -> None:
        for reset in self._open.values():
            if not reset.answer.done():
                reset.answer.set_exception(copy.copy(error))

    def _send_to(self, name: str, reset: _Reset, engines: Iterable[int]) -> None:
        reset.missing = set(engines)
        for engine in sorted(reset.missing):
            self._send(name, engine)

    def _forget(self, reset: _Reset, engine: int) -> None:
        reset.missing.discard(engine)
        if not reset.missing and not reset.answer.done():
            reset.answer.set_result(None)
