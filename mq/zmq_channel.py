"""The channel over ZeroMQ: PUSH sockets carry the records, the board says who may send and sleep.

For one host, over Unix sockets in a folder that nobody else may enter. The writer has a PUSH socket
for each reader's PULL socket. The readers bind, so a writer may send before they are there.

1. ZeroMQ carries the records, each after the position at which it ends; the board (board.py) counts
   them. What is sent and not committed is at most the capacity, so ZeroMQ's own limits are off and
   nothing is dropped. A record counts 16 bytes more than its size; one that is larger than the
   capacity is sent when everything before it is committed.
2. `commit` moves this reader's CURSOR, as in a ring. But ZeroMQ keeps nothing: what was on its way
   to a reader that died (or was sent before ZeroMQ noticed), or still in a writer that died, is
   lost, and counts as committed once there is a new incarnation. One incarnation's records arrive
   in order; the last of a dead writer may come between the first of the next.
3. A reader sleeps on an epoll descriptor over ZeroMQ's and its bell, which rings when the writer
   dies. ZeroMQ's becomes readable once per change and stays quiet until someone looks at EVENTS:
   `arm` does so last, `disarm` first.
4. A dead writer has been received out when all it published has come, or when nothing has come for
   QUIET seconds.
5. Closing a sender waits up to LINGER_MS for what the kernel has not taken, if its readers live.
"""

from __future__ import annotations

import select
import time

import zmq

from .board import DEAD_READERS, PUBLISHED, WRITER_DEAD, Board
from .doorbell import Doorbell
from .endpoint import Endpoint
from .ends import BoardReceiver, BoardSender
from .segment import Segment

QUIET = 0.1
LINGER_MS = 500
RECONNECT_MS = 20
_OVERHEAD = 16
_POSITION = 8  # bytes before each payload


class _SharedContext:
    """One ZeroMQ context, and so one thread, for all ends in this process; ended with the last."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users = 0

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        if self._context is None:
            self._context = zmq.Context()
        self._users += 1
        return self._context.socket(kind)

    def close(self, socket: zmq.Socket[bytes], linger: int) -> None:
        socket.close(linger=linger)
        self._users -= 1
        if not self._users and self._context is not None:
            self._context.term()  # waits for what lingers
            self._context = None


_shared = _SharedContext()


class ZmqSender(BoardSender):
    def __init__(self, endpoint: Endpoint) -> None:
        self._segment = Segment.attach(endpoint.fds[0])
        bells = [Doorbell.inherit(fd) for fd in endpoint.fds[1:]]
        super().__init__(endpoint.edge, endpoint.peers, Board(self._segment.memory), bells)
        # What an earlier incarnation had not got out will never be committed.
        self._floor = self._position
        self._sockets = [self._connect(endpoint.address, r) for r in range(endpoint.num_readers)]

    def _connect(self, address: str, reader: int) -> zmq.Socket[bytes]:
        socket = _shared.socket(zmq.PUSH)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, 10 * RECONNECT_MS)
        socket.connect(f"ipc://{address}.{reader}")
        return socket

    def _slowest(self) -> int:
        return max(self._floor, self._board.slowest())

    def try_send(self, payload: bytes) -> bool:
        if self._closed or self._words[DEAD_READERS]:
            self._check_peers()
        span = len(payload) + _OVERHEAD
        if not self._has_room(self._position + min(span, self._capacity)):
            return False
        end = self._position + span
        self._records += 1
        # Published first, so that no reader can receive, and commit, more than there is.
        self._publish(end)
        frame = end.to_bytes(_POSITION, "little") + payload
        for socket in self._sockets:
            socket.send(frame, zmq.NOBLOCK, copy=True)
        return True

    def close(self) -> None:
        if not self._closed:
            linger = 0 if self._words[DEAD_READERS] else LINGER_MS
            super().close()
            self._segment.close()
            for socket in self._sockets:
                _shared.close(socket, linger)


class ZmqReceiver(BoardReceiver):
    def __init__(self, endpoint: Endpoint) -> None:
        self._segment = Segment.attach(endpoint.fds[0])
        bells = [Doorbell.inherit(fd) for fd in endpoint.fds[1:]]
        board = Board(self._segment.memory)
        reopened = board.reader_pid(endpoint.reader) != 0
        super().__init__(endpoint.edge, endpoint.peers[0], endpoint.reader, board, bells)
        self._last = self._position  # where the record received last ends
        self._quiet_since = 0.0
        self._socket = _shared.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(f"ipc://{endpoint.address}.{endpoint.reader}")
        self._epoll = select.epoll()
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        self._epoll.register(self._bell.fileno(), select.EPOLLIN)
        if reopened:  # what the earlier incarnation had and did not commit will not come again
            self._position = self._words[PUBLISHED]
            self.commit()

    def try_receive(self) -> bytes | None:
        self._check()
        dead = self._words[WRITER_DEAD]
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            if dead:
                self._check_quiet()
            return None
        self._quiet_since = 0.0
        self._last = int.from_bytes(frame[:_POSITION], "little")
        self._position = max(self._position, self._last)
        self._records += 1
        return frame[_POSITION:]

    def _check_quiet(self) -> None:
        now = time.monotonic()
        self._quiet_since = self._quiet_since or now
        if self._last == self._words[PUBLISHED] or now - self._quiet_since > QUIET:
            self._quiet_since = 0.0
            raise self._dead()

    def _waiting(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def fileno(self) -> int:
        self._check()
        return self._epoll.fileno()

    def arm(self) -> bool:
        # No sleeper byte: the bell would ring before the record has come. ZeroMQ rings when it has.
        self._check()
        return not (self._waiting() or self._words[WRITER_DEAD])

    def disarm(self) -> None:
        super().disarm()
        self._socket.get(zmq.EVENTS)  # silences ZeroMQ's descriptor until the next change

    def close(self) -> None:
        if not self._closed:
            self._epoll.close()
            super().close()
            self._segment.close()
            _shared.close(self._socket, linger=0)
