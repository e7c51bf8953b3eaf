"""The pure half of an actor: messages in, messages out, and nothing else.

A core has no clock, socket, await or randomness of its own, so it runs the same in its process, in
a test and under a simulated clock. The shell (actors/base.py) calls it so:

1. For each message that has arrived: `handle(source, message, now)`.
2. Once no more are waiting (or after a bounded number): `flush(now)`, where whatever is better done
   once per batch is done.
3. What either returned is sent in order, and only then are the received messages committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Send(NamedTuple):
    """An effect: `message` goes to the instance `to` ("scheduler.0"), or to all ("workers")."""

    to: str
    message: Any


class PeerLost(NamedTuple):
    """An event: the `source` that it comes with is dead, and all that it sent has been handled.

    Drop what its memory was needed for. A new incarnation may come, which knows nothing.
    """


class PeerAdded(NamedTuple):
    """An event: the `source` that it comes with is part of the topology from now on, and is going
    to start. Nothing is to be sent there before it has said something, or somebody has named it.
    """


class Core(Protocol):
    def handle(self, source: str, message: Any, now: float) -> Sequence[Send]:
        """React to one message from the instance `source`, or to its PeerLost or PeerAdded.

        Never raises for anything a user can cause.
        """

    def flush(self, now: float) -> Sequence[Send]:
        """React to the batch as a whole."""

    def statistics(self) -> dict[str, float]:
        """A few named numbers for people to look at."""
