"""Virtual time: events by their time, then by the order in which they were asked for."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from ringcast.mq import codec


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, call: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._count), call, args))

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._events:
            return False
        self.now, _, call, args = heapq.heappop(self._events)
        self.num_events += 1
        call(*args)
        return True


class Trace:
    """All that happened in a run, as a hash, and in words while `show` is set."""

    def __init__(self, clock: Clock, show: Callable[[str], None] | None = None) -> None:
        self.show = show
        self._clock = clock
        self._hash = hashlib.blake2b(digest_size=8)

    def note(self, what: str, payload: bytes = b"", message: Any = None) -> None:
        self._hash.update(f"{self._clock.now!r} {what} ".encode())
        self._hash.update(payload)
        if self.show is not None:
            said = "" if message is None else f" {_readable(message)}"
            self.show(f"{self._clock.now:12.6f}  {what}{said}")

    def digest(self) -> str:
        return self._hash.hexdigest()


def _readable(message: Any) -> str:
    """The message with its arrays as numbers, and without what is as always."""
    if isinstance(message, msgspec.Struct):
        fields = [
            f"{field.name}={_readable(value)}"
            for field in msgspec.structs.fields(message)
            if (value := getattr(message, field.name)) not in (field.default, b"", [], "", ())
        ]
        return f"{type(message).__name__}({', '.join(fields)})"
    if isinstance(message, bytes) and len(message) % 4 == 0:
        return str(codec.ints(message).tolist())
    if isinstance(message, list):
        return f"[{', '.join(map(_readable, message))}]"
    return repr(message)
