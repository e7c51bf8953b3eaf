"""The ring: records of any size in shared memory, from one writer to one or more readers.

The segment is a board (board.py), and after it `capacity` bytes in which records follow one
another. The record at position p begins at byte p % capacity; it may run over the end and go on at
the beginning, its header never does.

    8 bytes   p, mixed with a constant: what was not written here and now is recognised
    8 bytes   size * 4 + flags (FIRST, LAST)
    size bytes, and up to 15 more so that the next record begins at a multiple of 16

1. The writer fills a record in beyond PUBLISHED, where no reader looks, and then moves PUBLISHED
   behind it. A writer that is killed in between has written nothing; its next incarnation goes on
   at PUBLISHED.
2. It never writes beyond the slowest CURSOR plus the capacity. A reader copies a record out and
   moves its CURSOR only at commit; one that is killed in between gets the same records again in its
   next incarnation.
3. A record that does not fit into an empty ring travels in parts of a quarter of the ring, the
   first marked FIRST and the last LAST (an ordinary record is both). `try_send` publishes as many
   as there is space for and returns False until the last is out. Readers put parts together in
   memory of their own and commit each as it comes, unless records received before it wait for a
   commit.
4. A FIRST part in place of a next one says that the rest will never come (the sender turned to
   another record, or died): readers forget what they had. A next part without a FIRST says that an
   earlier incarnation of this reader died with the beginning: the record is skipped, and
   CorruptRecordError says so, once. (After a reset that can't be: the sender begins anew.)

Order: the record's stores come before PUBLISHED's, and the loads of PUBLISHED before the record's;
likewise the copying out before the store of CURSOR, and its load before overwriting. On x86 the
processor keeps these orders, and it is tested; elsewhere `order()` does, and it is argued. fence.py
has the whole table.
"""

from __future__ import annotations

from .board import DEAD_READERS, PUBLISHED, WRITER_DEAD, Board, board_bytes
from .doorbell import Doorbell
from .endpoint import Endpoint
from .ends import BoardReceiver, BoardSender
from .errors import CorruptRecordError
from .fence import WEAK, order
from .segment import Segment

FIRST, LAST = 1, 2
WHOLE = FIRST | LAST
HEADER = 16
MIN_CAPACITY = 128  # so that a part has room for more than its header
_TAG = int.from_bytes(b"record\0\0", "little")


def span(size: int) -> int:
    """The bytes that a record of `size` takes in the ring."""
    return (size + HEADER + 15) & -16


class RingSender(BoardSender):
    def __init__(self, endpoint: Endpoint) -> None:
        self._segment = Segment.attach(endpoint.fds[0])
        board = Board(self._segment.memory)
        super().__init__(
            endpoint.edge, endpoint.peers, board, [Doorbell.inherit(fd) for fd in endpoint.fds[1:]]
        )
        assert board.capacity >= MIN_CAPACITY, board.capacity
        assert board.capacity % HEADER == 0, board.capacity
        self._memory = self._segment.memory
        self._begin = board_bytes(board.num_readers)
        self._end = self._begin + board.capacity
        self._largest = board.capacity - HEADER
        self._part = (board.capacity // 4 & -16) - HEADER
        self._unfinished: bytes | None = None  # a record that is on its way in parts
        self._sent = 0  # how much of it
        self._resets: list[int] = []  # how often readers had been reset when it began

    def try_send(self, payload: bytes) -> bool:
        if self._closed or self._words[DEAD_READERS]:
            self._check_peers()
        size = len(payload)
        if size > self._largest:
            return self._send_parts(payload)
        self._unfinished = None
        end = self._position + ((size + 31) & -16)  # span(size)
        if end > self._limit and not self._has_room(end):
            return False
        self._write(payload, size, WHOLE)
        self._records += 1
        self._publish(end)
        return True

    def _send_parts(self, payload: bytes) -> bool:
        resets = self._board.resets()  # who was reset meanwhile has not got the parts before
        if payload != self._unfinished or resets != self._resets:
            self._unfinished, self._sent, self._resets = payload, 0, resets
        view, total = memoryview(payload), len(payload)
        while self._sent < total:
            size = min(self._part, total - self._sent)
            end = self._position + span(size)
            if end > self._limit and not self._has_room(end):
                return False
            last = self._sent + size == total
            flags = (FIRST if self._sent == 0 else 0) | (LAST if last else 0)
            self._write(view[self._sent : self._sent + size], size, flags)
            self._sent += size
            self._records += last
            self._publish(end)
        self._unfinished = None
        return True

    def _write(self, payload: bytes | memoryview, size: int, flags: int) -> None:
        """Fill in the record at our position. Read in RingReceiver.try_receive, once published."""
        position = self._position
        begin = self._begin + position % self._capacity
        word = begin >> 3
        self._words[word] = position ^ _TAG
        self._words[word + 1] = size << 2 | flags
        begin += HEADER
        fits = self._end - begin
        if size <= fits:
            self._memory[begin : begin + size] = payload
        else:
            self._memory[begin : self._end] = payload[:fits]
            self._memory[self._begin : self._begin + size - fits] = payload[fits:]

    def _check_peers(self) -> None:
        self._unfinished = None
        super()._check_peers()

    def close(self) -> None:
        super().close()
        self._segment.close()


class RingReceiver(BoardReceiver):
    def __init__(self, endpoint: Endpoint) -> None:
        self._segment = Segment.attach(endpoint.fds[0])
        board = Board(self._segment.memory)
        bells = [Doorbell.inherit(fd) for fd in endpoint.fds[1:]]
        super().__init__(endpoint.edge, endpoint.peers[0], endpoint.reader, board, bells)
        self._memory = self._segment.memory
        self._begin = board_bytes(board.num_readers)
        self._end = self._begin + board.capacity
        self._published = self._position  # PUBLISHED when we last looked
        self._parts: list[bytes] = []

    def try_receive(self) -> bytes | None:
        if self._closed:
            self._check()
        while True:
            position = self._position
            if position == self._published and not self._look():
                return None
            begin = self._begin + position % self._capacity
            word = begin >> 3
            control = self._words[word + 1]  # written in RingSender._write
            size = control >> 2
            end = position + ((size + 31) & -16)  # span(size)
            if self._words[word] != position ^ _TAG or end > self._published:
                raise self._corrupt(position)
            begin += HEADER
            if begin + size <= self._end:
                payload = self._memory[begin : begin + size]
            else:
                rest = self._begin + size - (self._end - begin)
                payload = self._memory[begin : self._end] + self._memory[self._begin : rest]
            self._position = end
            if control & WHOLE == WHOLE:
                if self._parts:
                    self._parts = []
                self._records += 1
                return payload
            record = self._join(control & WHOLE, payload, alone=position == self._committed)
            if record is not None:
                return record

    def _look(self) -> bool:
        """Whether there is something new to read."""
        words = self._words
        published = words[PUBLISHED]  # stored in BoardSender._publish
        if published == self._position:
            if not words[WRITER_DEAD]:  # stored by the owner
                return False
            if WEAK:
                order()  # the death before what was published until then
            published = words[PUBLISHED]
            if published == self._position:
                raise self._dead()
        if WEAK:
            order()  # the publication before the record
        self._published = published
        return True

    def _join(self, flags: int, part: bytes, alone: bool) -> bytes | None:
        """One part more: the record if it was the last. `alone`: nothing before it is
        uncommitted."""
        if flags == FIRST:
            self._parts = [part]
        elif self._parts:
            self._parts.append(part)
        elif flags == LAST:
            raise CorruptRecordError(
                f"{self.edge}: a large record is lost, because reader {self._reader} died after "
                "it had received a part of it"
            )
        if flags == LAST:
            record = b"".join(self._parts)
            self._parts = []
            self._records += 1
            return record
        if alone:
            self.commit()
        return None

    def _corrupt(self, position: int) -> CorruptRecordError:
        return CorruptRecordError(f"{self.edge}: what is at position {position} is no record")

    def close(self) -> None:
        super().close()
        self._segment.close()
