"""An actor's channels on its event loop: one callback for what comes in, no blocking to send.

Inbound: one pump serves all receivers. Woken by any bell, it takes what has arrived, hands it to
`on_batch`, and then commits. A receiver is armed only when it was found empty, so a busy actor
makes no system calls for bells; and it stays armed until its bell rings or something is found in
it, so of an actor's channels only the one that woke it costs any. (It may ring once more for what
has been found already: that is a spurious wake-up.) Channels are read in the reverse of
topology.py's order and handled
in that order: of two messages that reach an actor by a short way and by a long one through the
pipeline, the first cause is always heard first.

Outbound: what doesn't fit into a channel waits in its Outbox until the reader has made space. An
outbox isn't bounded here: what can be in it is bounded by the requests that were admitted (one
actor that stopped reading because another doesn't read would, on a cycle of the graph, be a
deadlock).

A dead peer is the supervisor's business, which marks it in its channels. What is sent to it is
dropped. A receiver whose writer is dead and has been heard to the end is suspended: neither armed
nor watched, so it costs nothing. `lose` sees to both at once, when the actor is told; `regain`
takes the suspension back. Of who doesn't come again `remove` closes the channels, and what is sent
there still (by somebody who doesn't know yet) is dropped likewise. An actor that starts while a
peer is dead meets the mark first and is told later, which is as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from ..mq import codec, messages
from ..mq.channel import Receiver, Sender
from ..mq.endpoint import Endpoint, open_receiver, open_sender
from ..mq.errors import PeerDeadError

_BATCH = 256  # records taken from one channel before the others get their turn
_GLANCE_SECONDS = 1e-3  # between two looks at a dead writer's channel that is not heard out yet


class Outbox:
    """The sending end of one channel on an event loop.

    on_progress: called when some of what waits has left.
    """

    def __init__(
        self,
        sender: Sender,
        loop: asyncio.AbstractEventLoop,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._sender = sender
        self._loop = loop
        self._on_progress = on_progress
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
                break
            if self._sender.arm():
                break
            self._sender.disarm()
        self._on_progress()

    def _try_send(self, payload: bytes) -> bool:
        try:
            return self._sender.try_send(payload)
        except PeerDeadError:
            return True

    def forget(self) -> None:
        """Drop what waits."""
        if self._waiting:
            self._loop.remove_reader(self._sender.fileno())
            self._waiting.clear()
            self._on_progress()

    def close(self) -> None:
        self.forget()
        self._sender.close()


class Inbound:
    """The receiving end of one channel. writer: whose death is its end."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.writer = endpoint.peers[0]
        self.source = endpoint.edge.partition(">")[0]
        self.receiver = open_receiver(endpoint)
        self.decode: Callable[[bytes], Any] = codec.Decoder(getattr(messages, endpoint.messages))
        self.suspended = False
        self._armed = False

    def arm(self) -> bool:
        """Whether it can be slept on."""
        if not self._armed:
            self._armed = self.receiver.arm()
        return self._armed

    def disarm(self) -> None:
        self._armed = False
        self.receiver.disarm()

    def take(self) -> list[tuple[str, Any]]:
        """What has arrived, up to a batch."""
        batch: list[tuple[str, Any]] = []
        receive = self.receiver.try_receive
        try:
            while len(batch) < _BATCH and (payload := receive()) is not None:
                batch.append((self.source, self.decode(payload)))
        except PeerDeadError:
            self.suspended = not batch  # who has just been heard may be looked at again
        if self._armed and (batch or self.suspended):
            self.disarm()
        return batch


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
        self._readers: dict[str, tuple[str, ...]] = {}
        self._removed: set[str] = set()  # targets that are no more
        self._inbound: list[Inbound] = []
        self._scheduled = False
        self._paused = False
        self._closed = False
        for endpoint in endpoints:
            self._open(endpoint)

    def _open(self, endpoint: Endpoint) -> Inbound | None:
        if endpoint.role == "send":
            self._add_outbox(endpoint)
            return None
        inbound = self._make_inbound(endpoint)
        self._inbound.append(inbound)
        return inbound

    def _add_outbox(self, endpoint: Endpoint) -> None:
        target = endpoint.edge.partition(">")[2]
        self._outboxes[target] = Outbox(open_sender(endpoint), self._loop)
        self._readers[target] = endpoint.peers

    def _make_inbound(self, endpoint: Endpoint) -> Inbound:
        return Inbound(endpoint)

    def start(self) -> None:
        self._watch_all()
        self._pump()

    def add(self, endpoints: list[Endpoint]) -> None:
        """Open the ends of more channels, once started. They are read last, in this order."""
        for endpoint in endpoints:
            inbound = self._open(endpoint)
            if inbound is None:
                self._removed.discard(endpoint.edge.partition(">")[2])
            else:
                self._watch(inbound)
        self._schedule()

    def remove(self, names: Collection[str]) -> None:
        """Close the channels with these, which were lost and heard out."""
        for inbound in [inbound for inbound in self._inbound if inbound.writer in names]:
            self._inbound.remove(inbound)
            self._loop.remove_reader(inbound.receiver.fileno())
            inbound.receiver.close()
        for target in [target for target in self._outboxes if target in names]:
            self._outboxes.pop(target).close()
            del self._readers[target]
            self._removed.add(target)

    def pause(self) -> None:
        """Take nothing more in, until `resume`. What the dead had sent is taken in all the same."""
        if not self._paused:
            self._paused = True
            for inbound in self._inbound:
                self._loop.remove_reader(inbound.receiver.fileno())

    def resume(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self._watch_all()
            self._schedule()

    def send(self, to: str, message: messages.Message) -> None:
        """Send to an instance ("scheduler.0") or to all readers of a broadcast ("workers").

        Raises KeyError for a stranger.
        """
        outbox = self._outboxes.get(to)
        if outbox is not None:
            outbox.put(codec.encode(message))
        elif to not in self._removed:
            raise KeyError(to)

    def num_waiting(self) -> int:
        """Messages that wait in outboxes."""
        return sum(outbox.num_waiting for outbox in self._outboxes.values())

    def lose(self, names: Collection[str]) -> None:
        """These are dead: hand everything that they ever sent to `on_batch` (in its place among
        what others sent), and drop what waits for them.

        May block the loop for a moment, where a transport can't know at once what is still to come.
        """
        lost = [inbound for inbound in self._inbound if inbound.writer in names]
        for inbound in lost:
            self._listen(inbound)  # an incarnation may have come and died without being announced
            inbound.disarm()  # to arm it again says whether the mark is there
        while unheard := [inbound for inbound in lost if not inbound.suspended]:
            if not self._take_round():
                if self._closed:
                    return
                if all([inbound.arm() for inbound in unheard]):  # noqa: C419
                    break  # they live again already
                time.sleep(_GLANCE_SECONDS)
        gone = set(names)
        for target, readers in self._readers.items():
            if not gone.isdisjoint(readers):
                self._outboxes[target].forget()
        self._schedule()

    def regain(self, names: Collection[str]) -> None:
        """New incarnations of these are there: listen to them."""
        for inbound in self._inbound:
            if inbound.writer in names:
                self._listen(inbound)
        self._schedule()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for inbound in self._inbound:
            self._loop.remove_reader(inbound.receiver.fileno())
            inbound.receiver.close()
        for outbox in self._outboxes.values():
            outbox.close()

    def _listen(self, inbound: Inbound) -> None:
        if inbound.suspended:
            inbound.suspended = False
            self._watch(inbound)

    def _watch_all(self) -> None:
        for inbound in self._inbound:
            if not inbound.suspended:
                self._watch(inbound)

    def _watch(self, inbound: Inbound) -> None:
        if not self._paused:
            self._loop.add_reader(inbound.receiver.fileno(), self._wake, inbound)

    def _wake(self, inbound: Inbound) -> None:
        if not self._closed:
            inbound.disarm()
            self._pump()

    def _pump(self) -> None:
        self._scheduled = False
        if self._closed or self._paused:
            return
        taken = self._take_round()
        if self._closed or self._scheduled or self._paused:
            return
        # A list, not a generator: every receiver is to be armed.
        if taken or not all([i.arm() for i in self._inbound if not i.suspended]):  # noqa: C419
            # Look again before sleeping, but let the loop's other work in between.
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _take_round(self) -> bool:
        """Hand on one batch, of what each channel holds. Says whether there was anything."""
        batch: list[tuple[str, Any]] = []
        taken: list[Receiver] = []
        for inbound in reversed(self._inbound):
            if inbound.suspended:
                continue
            if arrived := inbound.take():
                taken.append(inbound.receiver)
                batch[:0] = arrived
            elif inbound.suspended:
                self._loop.remove_reader(inbound.receiver.fileno())
        if batch:
            self._on_batch(batch)
            if not self._closed:
                for receiver in taken:
                    receiver.commit()
        return bool(batch)
