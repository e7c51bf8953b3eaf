"""An actor's channels on its event loop: one callback for what comes in, no blocking to send.

Inbound: one pump serves all receivers. Woken by any bell, it takes what has arrived, hands it to
`on_batch`, and then commits. A receiver is armed only when it was found empty, so a busy actor
makes no system calls for bells. Channels are read in the reverse of topology.py's order and handled
in that order: of two messages that reach an actor by a short way and by a long one through the
pipeline, the first cause is always heard first.

Outbound: what doesn't fit into a channel waits in its Outbox until the reader has made space. An
outbox isn't bounded here: what can be in it is bounded by the requests that were admitted (one
actor that stopped reading because another doesn't read would, on a cycle of the graph, be a
deadlock).

A dead peer is the supervisor's business: its channel is left alone here, and what is sent to it is
dropped. Who waits for an answer is told by the supervisor (PeerDied).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ..mq import codec, messages
from ..mq.channel import Receiver, Sender
from ..mq.endpoint import Endpoint, open_receiver, open_sender
from ..mq.errors import PeerDeadError

_BATCH = 256  # records taken from one channel before the others get their turn


class Outbox:
    """The sending end of one channel on an event loop."""

    def __init__(self, sender: Sender, loop: asyncio.AbstractEventLoop) -> None:
        self._sender = sender
        self._loop = loop
        self._waiting: deque[bytes] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def put(self, payload: bytes) -> None:
        if self._waiting or not self._try_send(payload):
            self._waiting.append(payload)
            if len(self._waiting) == 1:
                self._loop.add_reader(self._sender.fileno(), self._go_on)
                self._go_on()

    def _go_on(self) -> None:
        self._sender.disarm()
        while True:
            while self._waiting and self._try_send(self._waiting[0]):
                self._waiting.popleft()
            if not self._waiting:
                self._loop.remove_reader(self._sender.fileno())
                return
            if self._sender.arm():
                return
            self._sender.disarm()

    def _try_send(self, payload: bytes) -> bool:
        try:
            return self._sender.try_send(payload)
        except PeerDeadError:
            return True

    def close(self) -> None:
        if self._waiting:
            self._loop.remove_reader(self._sender.fileno())
            self._waiting.clear()
        self._sender.close()


class Links:
    """All channels of one actor.

    on_batch gets [(source instance, message), ...] in order of arrival per source. When it returns,
    the batch is committed.
    """

    def __init__(
        self, endpoints: list[Endpoint], on_batch: Callable[[list[tuple[str, Any]]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_batch = on_batch
        self._outboxes: dict[str, Outbox] = {}
        self._inbound: list[tuple[str, Receiver, codec.Decoder[Any]]] = []
        self._scheduled = False
        self._closed = False
        for endpoint in endpoints:
            if endpoint.role == "send":
                target = endpoint.edge.partition(">")[2]
                self._outboxes[target] = Outbox(open_sender(endpoint), self._loop)
            else:
                decoder: codec.Decoder[Any] = codec.Decoder(getattr(messages, endpoint.messages))
                self._inbound.append((endpoint.peers[0], open_receiver(endpoint), decoder))

    def start(self) -> None:
        for _, receiver, _ in self._inbound:
            self._loop.add_reader(receiver.fileno(), self._pump)
        self._pump()

    def send(self, to: str, message: messages.Message) -> None:
        """Send to an instance ("scheduler.0") or to all readers of a broadcast ("workers").

        Raises KeyError for a stranger.
        """
        self._outboxes[to].put(codec.encode(message))

    def num_waiting(self) -> int:
        """Messages that wait in outboxes."""
        return sum(outbox.num_waiting for outbox in self._outboxes.values())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for _, receiver, _ in self._inbound:
            self._loop.remove_reader(receiver.fileno())
            receiver.close()
        for outbox in self._outboxes.values():
            outbox.close()

    def _pump(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        batch: list[tuple[str, Any]] = []
        taken: list[Receiver] = []
        for source, receiver, decode in reversed(self._inbound):
            receiver.disarm()
            payloads = _take(receiver)
            if payloads is None:
                self._give_up(receiver)
            elif payloads:
                taken.append(receiver)
                batch[:0] = [(source, decode(payload)) for payload in payloads]
        if batch:
            self._on_batch(batch)
            if self._closed:
                return
            for receiver in taken:
                receiver.commit()
        if self._scheduled:
            return
        # A list, not a generator: every receiver is to be armed.
        if batch or not all([receiver.arm() for _, receiver, _ in self._inbound]):  # noqa: C419
            # Look again before sleeping, but let the loop's other work in between.
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _give_up(self, receiver: Receiver) -> None:
        self._loop.remove_reader(receiver.fileno())
        receiver.close()
        self._inbound = [entry for entry in self._inbound if entry[1] is not receiver]


def _take(receiver: Receiver) -> list[bytes] | None:
    """What has arrived, up to a batch; None if the writer is dead and nothing is left."""
    payloads: list[bytes] = []
    try:
        while len(payloads) < _BATCH and (payload := receiver.try_receive()) is not None:
            payloads.append(payload)
    except PeerDeadError:
        return payloads or None
    return payloads
