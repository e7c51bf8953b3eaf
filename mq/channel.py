"""The channel: one writer, one or more readers, whole records of bytes in order. The contract.

1. A record arrives whole, once, in order, at every reader, or an error says why not. Any size from
   0 bytes up.
2. `try_send` and `try_receive` never block. `send` and `receive` block the thread for at most
   `timeout` seconds and raise ChannelTimeout, whose text names the edge, how long was waited, and
   for a full channel who has not read. Nothing else here blocks. No call may be made from two
   threads at once.
3. A record that `try_send` refused (False) is not sent. Offer the same payload again to go on with
   it, or another one, and the refused one is never received. (A record larger than a ring is on its
   way in parts by then: the same payload goes on where it stopped, another makes readers forget
   it, and so does a reader's death, after which it begins anew.)
4. A reader's place advances only at `commit()`: what was received and not committed is received
   again by the reader's next incarnation, or an error says that it is lost (of a transport that
   doesn't keep it; see each file), *unless the owner reset it*: then the next incarnation gets what
   was sent after the reset, all of it, and nothing from before. Commit after acting on what was
   received, and before waiting for more: only a commit or a reset makes space for the writer, and
   the next record may need all of it.
5. The slowest reader bounds the writer: nothing is ever dropped.
6. Sleeping: `fileno()` is a descriptor that becomes readable when there may be something to do (a
   record for a receiver, space for a sender). It is only rung for an end that said it will sleep:
   `arm()` announces it, and returns False when there is something to do already, in which case
   don't sleep. After waking, call `disarm()`, which empties the bell, and then look. Spurious
   wake-ups are allowed; lost ones are not. A sender has something to do unless `try_send` has just
   refused a record.
7. Death: when the other side is known to be dead, a sender raises PeerDeadError at once (with
   several readers: when any is dead), and a receiver raises it once everything sent has been
   received. A record that met PeerDeadError is not sent, to no reader. Both go on when the
   supervisor says that the other side is alive again.
8. `close()` may be called any number of times; anything else after it raises ChannelClosed. Closing
   an end tells the other side nothing: the supervisor decides who is dead.

Sends from an event loop go through `Outbox` (actors/links.py), which keeps what doesn't fit and
goes on when there is space.
"""

from __future__ import annotations

import abc
import select
import time

import msgspec

from .errors import ChannelTimeout


class ChannelStats(msgspec.Struct, frozen=True):
    """capacity and used are bytes; records: sent or received in all."""

    capacity: int
    used: int
    records: int


class _End(abc.ABC):
    edge: str

    # How long to look again and again before sleeping: about what going to sleep and waking costs.
    spin_seconds = 20e-6

    _poller: select.poll | None = None

    @abc.abstractmethod
    def fileno(self) -> int: ...

    @abc.abstractmethod
    def arm(self) -> bool: ...

    @abc.abstractmethod
    def disarm(self) -> None: ...

    @abc.abstractmethod
    def stats(self) -> ChannelStats: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def _sleep(self, deadline: float) -> None:
        """Wait on the bell until it rings (which a peer's death does too) or the deadline
        passes."""
        if self.arm():
            left = deadline - time.monotonic()
            if left > 0:
                if self._poller is None:
                    self._poller = select.poll()
                    self._poller.register(self.fileno(), select.POLLIN)
                self._poller.poll(min(left, 60.0) * 1000)
        self.disarm()


class Sender(_End):
    """The writing end."""

    @abc.abstractmethod
    def try_send(self, payload: bytes) -> bool:
        """Send one record; False if there is no space now. Raises PeerDeadError, ChannelClosed."""

    @abc.abstractmethod
    def laggards(self) -> str:
        """Who holds the writer up, for messages: "reader 1 worker.1 (pid 17) is 4096 bytes
        behind"."""

    def send(self, payload: bytes, timeout: float) -> None:
        """Send one record, waiting for space. Raises ChannelTimeout, PeerDeadError,
        ChannelClosed."""
        if self.try_send(payload):
            return
        start = time.monotonic()
        while not self.try_send(payload):
            waited = time.monotonic() - start
            if waited >= timeout:
                raise ChannelTimeout(f"{self.edge}: full for {waited:.3f} s; {self.laggards()}")
            if waited > self.spin_seconds:
                self._sleep(start + timeout)


class Receiver(_End):
    """A reading end."""

    @abc.abstractmethod
    def try_receive(self) -> bytes | None:
        """The next record, or None if there is none now.

        Raises PeerDeadError, ChannelClosed, CorruptRecordError.
        """

    @abc.abstractmethod
    def commit(self) -> None:
        """Give up everything received so far: its space is free for the writer."""

    def receive(self, timeout: float) -> bytes:
        """The next record, waiting for it.

        Raises ChannelTimeout, PeerDeadError, ChannelClosed, CorruptRecordError.
        """
        payload = self.try_receive()
        if payload is not None:
            return payload
        start = time.monotonic()
        while (payload := self.try_receive()) is None:
            waited = time.monotonic() - start
            if waited >= timeout:
                raise ChannelTimeout(f"{self.edge}: nothing received for {waited:.3f} s")
            if waited > self.spin_seconds:
                self._sleep(start + timeout)
        return payload
