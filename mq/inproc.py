"""The channel inside one process: a queue for each reader, under the rules of every board.

For tests, simulations and engines that live in one process. The ends may be used from different
threads. The capacity is in bytes, and each record counts 16 more than its size; one that is larger
than the capacity is taken when everything before it is committed. What a reader has not committed
stays in its queue, so its next incarnation gets it, unless the owner's reset emptied it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .board import DEAD_READERS, PUBLISHED, WRITER_DEAD, Board, board_bytes
from .doorbell import Doorbell
from .ends import BoardReceiver, BoardSender
from .owner import BoardOwner

_OVERHEAD = 16


class InprocChannel(BoardOwner):
    """A channel from the instance `writer` to the instances `readers`, all in this process."""

    def __init__(
        self, name: str, writer: str, readers: Sequence[str], capacity: int = 1 << 20
    ) -> None:
        self._memory = bytearray(board_bytes(len(readers)))
        super().__init__(name, writer, readers, Board.format(self._memory, capacity, len(readers)))
        self._queues: list[deque[bytes]] = [deque() for _ in readers]

    def reset(self, instance: str) -> None:
        self._queues[self.readers.index(instance)].clear()
        super().reset(instance)

    def sender(self) -> InprocSender:
        return InprocSender(self)

    def receiver(self, reader: int = 0) -> InprocReceiver:
        return InprocReceiver(self, reader)


class InprocSender(BoardSender):
    def __init__(self, channel: InprocChannel) -> None:
        self._queues = channel._queues
        bells = [Doorbell.inherit(bell.fileno()) for bell in channel.bells]
        super().__init__(channel.name, channel.readers, Board(channel._memory), bells)

    def try_send(self, payload: bytes) -> bool:
        if self._closed or self._words[DEAD_READERS]:
            self._check_peers()
        span = len(payload) + _OVERHEAD
        if not self._has_room(self._position + min(span, self._capacity)):
            return False
        for queue in self._queues:
            queue.append(payload)
        self._records += 1
        self._publish(self._position + span)
        return True


class InprocReceiver(BoardReceiver):
    def __init__(self, channel: InprocChannel, reader: int) -> None:
        self._queue = channel._queues[reader]
        self._received = 0  # how many at the queue's front are not committed
        writer_bell, *reader_bells = channel.bells
        bells = [Doorbell.inherit(bell.fileno()) for bell in (reader_bells[reader], writer_bell)]
        super().__init__(channel.name, channel.writer, reader, Board(channel._memory), bells)

    def try_receive(self) -> bytes | None:
        self._check()
        dead = self._words[WRITER_DEAD]  # before PUBLISHED: what it sent before dying is there
        if self._words[PUBLISHED] == self._position:
            if dead:
                raise self._dead()
            return None
        payload = self._queue[self._received]
        self._received += 1
        self._records += 1
        self._position += len(payload) + _OVERHEAD
        return payload

    def commit(self) -> None:
        self._check()
        for _ in range(self._received):
            self._queue.popleft()
        self._received = 0
        super().commit()
