"""Resets of the prefix cache that were asked for and have not been answered.

A reset goes the way of a request, once to every replica that lives by every tokenizer that does (no
later request can overtake it then), and is done when each has been answered: a replica that dies
takes its cache along, so nobody waits for it while others live. It changes nothing when it is done
twice, so whatever else dies on its way, it is sent again when requests can be served.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable

import msgspec

from ..mq.errors import EngineDeadError

Way = tuple[int, int]  # a replica, and the tokenizer by which it is reached


class _Reset(msgspec.Struct):
    """missing: the ways that it was sent and that have not been answered."""

    answer: asyncio.Future[None]
    missing: set[Way]


class CacheResets:
    """send: `send(name, way)` to a replica, which answers by that name."""

    def __init__(self, send: Callable[[str, Way], None]) -> None:
        self._send = send
        self._open: dict[str, _Reset] = {}

    async def ask(self, name: str, ways: Iterable[Way]) -> None:
        """Until it is done these ways. Where there are none, `send_again` sends it."""
        reset = _Reset(asyncio.get_running_loop().create_future(), set())
        self._open[name] = reset
        self._send_to(name, reset, ways)
        try:
            await reset.answer
        finally:
            self._open.pop(name, None)

    def answered(self, name: str, way: Way) -> bool:
        """Whether somebody still waits for it."""
        reset = self._open.get(name)
        if reset is None or way not in reset.missing:
            return False
        self._forget(reset, {way})
        return True

    def lost(self, ways: Iterable[Way]) -> None:
        """Only these are left."""
        left = set(ways)
        for reset in self._open.values():
            self._forget(reset, reset.missing - left)

    def send_again(self, ways: Iterable[Way]) -> None:
        left = list(ways)
        for name, reset in self._open.items():
            if not reset.answer.done():
                self._send_to(name, reset, left)

    def fail(self, error: EngineDeadError) -> None:
        for reset in self._open.values():
            if not reset.answer.done():
                reset.answer.set_exception(copy.copy(error))

    def _send_to(self, name: str, reset: _Reset, ways: Iterable[Way]) -> None:
        reset.missing = set(ways)
        for way in sorted(reset.missing):
            self._send(name, way)

    def _forget(self, reset: _Reset, ways: set[Way]) -> None:
        reset.missing -= ways
        if ways and not reset.missing and not reset.answer.done():
            reset.answer.set_result(None)
