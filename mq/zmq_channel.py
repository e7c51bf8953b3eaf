"""The channel over ZeroMQ: PUSH sockets carry the records, the board says who may send and sleep.

For one host, over Unix sockets in a folder that nobody else may enter. The writer has a PUSH socket
for each reader's PULL socket. The readers bind, so a writer may send before they are there.

1. ZeroMQ carries the records, each after the position at which it ends; the board (board.py) counts
   them. What is sent and not committed is at most the capacity, so ZeroMQ's own limits are off and
   nothing is dropped. A record counts 16 bytes more than its size; one that is larger than the
   capacity is sent when everything before it is committed.
2. `commit` moves this reader's CURSOR, as in a ring. But ZeroMQ keeps nothing: what was on its way
   to a reader that died, or still in a writer that died, is lost. Positions show it: what doesn't
   begin where the record before ended is received after one CorruptRecordError, and what begins
   before that (the last of a dead writer, after the first of the next) is dropped.
3. The owner's reset is what makes a dead reader's losses good: it counts as committed what was
   lost, which otherwise bounds the writer until something arrives. Each reset gives the reader a
   new address. The writer sees it before its next record and connects anew, so what it has queued
   for the dead is dropped, and what comes after can't meet a socket that is about to die.
4. A reader sleeps on an epoll descriptor over ZeroMQ's and its bell, which rings when the writer
   dies. ZeroMQ's becomes readable once per change and stays quiet until someone looks at EVENTS:
   `arm` does so last, `disarm` first.
5. A dead writer has been received out when all it published has come, or when nothing has come for
   QUIET seconds. What is missing then counts as received.
6. Closing a sender waits up to LINGER_MS for what the kernel has not taken, if its readers live.
"""

from __future__ import annotations

import select
import time

import zmq

from .board import DEAD_READERS, PUBLISHED, WRITER_DEAD, Board
from .doorbell import Doorbell
from .endpoint import Endpoint
from .ends import BoardReceiver, BoardSender
from .errors import CorruptRecordError
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
        self._address = endpoint.address
        self._resets = self._board.resets()
        self._sockets = [self._connect(*which) for which in enumerate(self._resets)]

    def _connect(self, reader: int, resets: int) -> zmq.Socket[bytes]:
        socket = _shared.socket(zmq.PUSH)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, 10 * RECONNECT_MS)
        socket.connect(f"ipc://{self._address}.{reader}.{resets}")
        return socket

    def _follow(self, resets: list[int]) -> None:
        """Leave the sockets of readers that were reset."""
        for reader, (before, now) in enumerate(zip(self._resets, resets, strict=True)):
            if before != now:
                _shared.close(self._sockets[reader], linger=0)
                self._sockets[reader] = self._connect(reader, now)
        self._resets = resets

    def _slowest(self) -> int:
        return max(self._floor, self._board.slowest())

    def try_send(self, payload: bytes) -> bool:
        if self._closed or self._words[DEAD_READERS]:
            self._check_peers()
        resets = self._board.resets()
        if resets != self._resets:
            self._follow(resets)
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
        resets = board.resets()[endpoint.reader]
        super().__init__(endpoint.edge, endpoint.peers[0], endpoint.reader, board, bells)
        self._quiet_since = 0.0
        self._ahead: bytes | None = None  # a record that came, but not the one before it
        self._socket = _shared.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(f"ipc://{endpoint.address}.{endpoint.reader}.{resets}")
        self._epoll = select.epoll()
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        self._epoll.register(self._bell.fileno(), select.EPOLLIN)

    def try_receive(self) -> bytes | None:
        self._check()
        dead = self._words[WRITER_DEAD]
        frame, self._ahead = self._ahead or self._pull(), None
        if frame is None:
            if dead:
                self._check_quiet()
            return None
        self._quiet_since = 0.0
        begin = _begin(frame)
        if begin > self._position:
            raise self._lost(frame, begin)
        self._position = int.from_bytes(frame[:_POSITION], "little")
        self._records += 1
        return frame[_POSITION:]

    def _pull(self) -> bytes | None:
        """The next frame, if there is one, that begins where we are or beyond."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if _begin(frame) >= self._position:
                return frame

    def _lost(self, frame: bytes, begin: int) -> CorruptRecordError:
        lost, self._position, self._ahead = begin - self._position, begin, frame
        return CorruptRecordError(
            f"{self.edge}: {lost} bytes are lost that were on their way when a writer died, or "
            f"reader {self._reader} did and was not reset"
        )

    def _check_quiet(self) -> None:
        now, published = time.monotonic(), self._words[PUBLISHED]
        self._quiet_since = self._quiet_since or now
        if self._position == published or now - self._quiet_since > QUIET:
            self._quiet_since = 0.0
            self._give_up(published)
            raise self._dead()

    def _give_up(self, published: int) -> None:
        alone = self._position == self._committed  # nothing received waits for its commit
        self._position = published
        if alone:
            self.commit()

    def _waiting(self) -> bool:
        if self._ahead is not None:
            return True
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


def _begin(frame: bytes) -> int:
    """The position at which a frame's record begins."""
    end = int.from_bytes(frame[:_POSITION], "little")
    return end - (len(frame) - _POSITION) - _OVERHEAD
