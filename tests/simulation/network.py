"""The channels of a simulated topology: the shipped in-process ones, and who is woken when.

A record is published at once and noticed later: what is delayed is the reader's waking, as on one
host. Capacities are as small as a seed likes, so writers wait for space. `Outbox` mirrors the class
of that name in actors/links.py, with the network's wake-ups in place of bells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

from ringcast.actors import topology
from ringcast.mq import codec, messages
from ringcast.mq.errors import PeerDeadError
from ringcast.mq.inproc import InprocChannel


class Outbox:
    """The sending end of one channel. `sent` is told of each record that got in."""

    def __init__(self, edge: topology.Channel, channel: InprocChannel, network: Network) -> None:
        self.edge = edge
        self.waiting: deque[bytes] = deque()
        self._sender = channel.sender()
        self._network = network

    def put(self, payload: bytes) -> None:
        if self.waiting or not self.try_send(payload):
            self.waiting.append(payload)

    def go_on(self) -> bool:
        """Send the first of those that wait, if there is space."""
        if self.waiting and self.try_send(self.waiting[0]):
            self.waiting.popleft()
            return True
        return False

    def try_send(self, payload: bytes) -> bool:
        try:
            sent = self._sender.try_send(payload)
        except PeerDeadError:
            return True
        if sent:
            self._network.wake(self.edge.readers)
        return sent

    def close(self) -> None:
        self._sender.close()


class Inbound:
    """A reading end, with the decoder of its messages.

    suspended: its writer is dead and has been heard out.
    """

    def __init__(self, edge: topology.Channel, channel: InprocChannel, name: str) -> None:
        self.edge = edge
        self.source = edge.writer
        self.suspended = False
        self._decode: codec.Decoder[messages.Message] = codec.Decoder(
            getattr(messages, edge.messages)
        )
        self._receiver = channel.receiver(edge.readers.index(name))

    def take(self, most: int) -> list[tuple[str, messages.Message]]:
        """What has arrived, up to so many records: `_Inbound.take` of actors/links.py."""
        batch: list[tuple[str, messages.Message]] = []
        try:
            while len(batch) < most:
                payload = self._receiver.try_receive()
                if payload is None:
                    break
                batch.append((self.source, self._decode(payload)))
        except PeerDeadError:
            self.suspended = not batch
        return batch

    def commit(self) -> None:
        self._receiver.commit()

    def close(self) -> None:
        self._receiver.close()


Ends = list[tuple[topology.Channel, InprocChannel]]


class Network:
    """wake: called with the names of those for whom there is something to do."""

    def __init__(
        self, counts: dict[str, int], capacity: int, wake: Callable[[Iterable[str]], None]
    ) -> None:
        self.wake = wake
        self._capacity = capacity
        self._channels: Ends = []
        self.connect(counts)

    def connect(self, counts: dict[str, int]) -> None:
        """Make the channels of this topology that there aren't yet."""
        names = {edge.name for edge, _ in self._channels}
        self._channels += [
            (edge, InprocChannel(edge.name, edge.writer, edge.readers, self._capacity))
            for edge in topology.channels(counts)
            if edge.name not in names
        ]

    def disconnect(self, names: Collection[str]) -> None:
        """Close the channels with these."""
        kept = []
        for edge, channel in self._channels:
            if {edge.writer, *edge.readers}.isdisjoint(names):
                kept.append((edge, channel))
            else:
                channel.close()
        self._channels = kept

    def ends(self, name: str, others: Collection[str] | None = None) -> Ends:
        """The channels that this actor has an end of; others: with these alone."""
        return [
            (edge, channel)
            for edge, channel in self._channels
            if name in (ends := {edge.writer, *edge.readers})
            and (others is None or not ends.isdisjoint(others))
        ]

    def open(self, name: str, ends: Ends) -> tuple[dict[str, Outbox], list[Inbound]]:
        """Outboxes, by what the cores call their target ("scheduler.0", "workers"), and inbounds of
        these channels."""
        outboxes = {
            edge.name.partition(">")[2]: Outbox(edge, channel, self)
            for edge, channel in ends
            if edge.writer == name
        }
        inbounds = [Inbound(edge, channel, name) for edge, channel in ends if name in edge.readers]
        return outboxes, inbounds

    def mark_dead(self, name: str) -> None:
        for edge, channel in self._channels:
            if name in (edge.writer, *edge.readers):
                channel.mark_dead(name)
                self.wake((edge.writer, *edge.readers))

    def revive(self, names: Iterable[str]) -> None:
        """Before new incarnations start: nothing waits for them, and nobody takes them for dead."""
        for name in names:
            for edge, channel in self._channels:
                if name in edge.readers:
                    channel.reset(name)
                if name in (edge.writer, *edge.readers):
                    channel.mark_alive(name)

    def progress(self) -> Iterator[tuple[str, str, str, int, int]]:
        """(channel, writer, reader, its cursor, what is published)."""
        for edge, channel in self._channels:
            for at in channel.progress():
                yield (edge.name, edge.writer, *at)

    def unread(self, but: Collection[str] = ()) -> dict[str, int]:
        """Bytes that wait in each channel where any do, but for those that only these read."""
        used = {
            edge.name: channel.stats().used
            for edge, channel in self._channels
            if not set(edge.readers) <= set(but)
        }
        return {name: num for name, num in used.items() if num}

    def close(self) -> None:
        for _, channel in self._channels:
            channel.close()
