"""The local half of a gateway: the channels of an actor that it stands for, with records undecoded.

A gateway takes in what the channels bring, each with its edge's name, and puts what came from the
other host into the channel of that edge. It reads nothing and changes no order within an edge.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

from ..mq.endpoint import Endpoint, open_sender
from ..mq.link_core import Record
from .links import Inbound, Links, Outbox


class ForwardLinks(Links):
    """on_batch gets [(edge, payload), ...]. on_handed_on: a record that was put in has gone into
    its channel, or its reader is dead."""

    def __init__(
        self,
        endpoints: list[Endpoint],
        on_batch: Callable[[list[tuple[str, bytes]]], None],
        on_handed_on: Callable[[Record], None],
    ) -> None:
        self._on_handed_on = on_handed_on
        self._held: dict[str, deque[Record | None]] = {}
        super().__init__(endpoints, on_batch)

    def put(self, record: Record, own: bool = False) -> None:
        """Put a record into the channel of its edge. Raises KeyError if there is none.

        own: it hasn't come over the link, and its way isn't followed.
        """
        outbox = self._outboxes[record.edge]
        self._held[record.edge].append(None if own else record)
        outbox.put(record.payload)
        self._release(record.edge)

    def has(self, edge: str) -> bool:
        """Whether records of this edge can be put in here."""
        return edge in self._outboxes

    def _release(self, edge: str) -> None:
        held, outbox = self._held[edge], self._outboxes[edge]
        while len(held) > outbox.num_waiting:
            record = held.popleft()
            if record is not None:
                self._on_handed_on(record)

    def _add_outbox(self, endpoint: Endpoint) -> None:
        edge = endpoint.edge
        self._held[edge] = deque()
        on_progress = functools.partial(self._release, edge)
        self._outboxes[edge] = Outbox(open_sender(endpoint), self._loop, on_progress)
        self._readers[edge] = endpoint.peers

    def _make_inbound(self, endpoint: Endpoint) -> Inbound:
        inbound = Inbound(endpoint)
        inbound.source = endpoint.edge
        inbound.decode = bytes
        return inbound
