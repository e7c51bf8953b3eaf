"""An actor's channels on its event loop: what comes in goes to one callback, what goes out never blocks.

Inbound: one pump serves all receivers. Woken by any bell, it takes what has arrived, hands it to `on_batch`, and then
commits. A receiver is armed only when it was found empty, so a busy actor makes no system calls for bells.

Outbound: what doesn't fit into a channel waits in its Outbox until the reader has made space. An outbox isn't bounded here:
what can be in it is bounded by the requests that were admitted (one actor that stopped reading because another
doesn't read would, on a cycle of the graph, be a deadlock).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ..mq import codec, messages
from ..mq.channel import Receiver, Sender
from ..mq.endpoint import Endpoint, open_receiver, open_sender

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
        if self._waiting or not self._sender.try_send(payload):
            self._waiting.append(payload)
            if len(self._waiting) == 1:
                self._loop.add_reader(self._sender.fileno(), self._go_on)
                self._go_on()

    def _go_on(self) -> None:
        self._sender.disarm()
        while True:
            while self._waiting:
                if not self._sender.try_send(self._waiting[0]):
                    break
                self._waiting.popleft()
            if not self._waiting:
                self._loop.remove_reader(self._sender.fileno())
                return
            if self._sender.arm():
                return
            self._sender.disarm()

    def close(self) -> None:
        if self._waiting:
            self._loop.remove_reader(self._sender.fileno())
            self._waiting.clear()
        self._sender.close()


class Links:
    """All channels of one actor.

    on_batch gets [(source instance, message), ...] in order of arrival per source. When it returns, the batch is committed.
    """

    def __init__(self, endpoints: list[Endpoint], on_batch: Callable[[list[tuple[str, Any]]], None]) -> None:
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
        """Send to an instance ("scheduler.0") or to all readers of a broadcast ("workers"). Raises KeyError for a stranger."""
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
        more = False
        for source, receiver, decode in self._inbound:
            receiver.disarm()
            for count in range(_BATCH + 1):
                if count == _BATCH:
                    more = True
                    break
                payload = receiver.try_receive()
                if payload is None:
                    break
                if count == 0:
                    taken.append(receiver)
                batch.append((source, decode(payload)))
        if batch:
            self._on_batch(batch)
            for receiver in taken:
                receiver.commit()
        if self._closed or self._scheduled:
            return
        if more or batch or not all([receiver.arm() for _, receiver, _ in self._inbound]):
            # Look again before sleeping, but let the loop's other work in between.
            self._scheduled = True
            self._loop.call_soon(self._pump)

