"""How the ends of a channel sleep, wake and learn of a death: the same for every transport.

Both directions are the same handshake, with a full fence where the arrows cross:

    writer publishes a record            reader sets its sleeper byte
    ---- fence ----                      ---- fence ----
    writer reads the sleeper bytes       reader reads PUBLISHED
    not 0: rings that reader's bell      nothing new: sleeps on its bell

    reader commits its CURSOR            writer sets WANTED
    ---- fence ----                      ---- fence ----
    reader reads WANTED                  writer reads every CURSOR
    reached: rings the writer's bell     still no space: sleeps on its bell

Whichever side comes second sees what the other has stored. Without the fences both loads may pass
both stores, and then each side misses the other: the writer rings nobody, and the reader sleeps
beside a record.

A sleeper clears its own mark after waking; whoever rings leaves it alone. So a word has one writer,
a late ring is a spurious wake-up and no more, and somebody who is killed between any two lines has
taken nothing away.

Death is the owner's to declare: it writes the mark and then rings everyone, asleep or not, so this
needs no fence. It also wakes whoever the dead would have rung: a writer that is killed after its
record is published and before it has rung, or a reader after its commit, owes a wake-up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from .board import (
    DEAD_READERS,
    FULL_SINCE,
    PUBLISHED,
    RECORDS,
    WANTED,
    WRITER_DEAD,
    WRITER_PID,
    Board,
)
from .channel import ChannelStats, Receiver, Sender
from .doorbell import Doorbell
from .errors import ChannelClosed, PeerDeadError
from .fence import FENCE, WEAK, order


class BoardSender(Sender):
    """The writing end's side of the board. A transport adds `try_send`.

    bells: the writer's own, then one for each reader. They and the board are this end's to close.
    """

    def __init__(
        self, edge: str, readers: Sequence[str], board: Board, bells: Sequence[Doorbell]
    ) -> None:
        self.edge = edge
        self._readers = readers
        self._board = board
        self._words = board.words
        self._sleepers = board.sleeper_words
        self._capacity = board.capacity
        self._bell, *self._reader_bells = bells
        self._closed = False
        # What an earlier incarnation wrote and had not published is overwritten.
        self._position = self._words[PUBLISHED]
        self._records = self._words[RECORDS]
        self._limit = 0  # how far the readers let us write; looked up when it is reached
        self._wanted = 0  # the cursor that the record refused last waits for
        self._words[WANTED] = self._words[FULL_SINCE] = 0
        self._words[WRITER_PID] = os.getpid()

    def _check(self) -> None:
        if self._closed:
            raise ChannelClosed(f"{self.edge}: this sender is closed")

    def _check_peers(self) -> None:
        """Raise if this end is closed or a reader is dead: then what was refused is forgotten."""
        self._check()
        if self._words[DEAD_READERS]:  # marked by the owner
            self._wanted = self._words[FULL_SINCE] = 0
            names = self._board.dead_readers(self._readers)
            raise PeerDeadError(f"{self.edge}: {names} is dead")

    def _slowest(self) -> int:
        return self._board.slowest()  # each CURSOR is published in BoardReceiver.commit

    def _has_room(self, end: int) -> bool:
        """Whether the channel may hold what ends at `end`. Remembers what is waited for if not."""
        self._limit = self._slowest() + self._capacity
        if WEAK:
            order()  # the looking before the overwriting
        if end <= self._limit:
            return True
        if not self._wanted:
            self._words[FULL_SINCE] = time.monotonic_ns()
        self._wanted = end - self._capacity
        return False

    def _publish(self, end: int) -> None:
        words = self._words
        words[RECORDS] = self._records  # read by the owner
        if WEAK:
            order()  # the record before its publication
        words[PUBLISHED] = end  # loaded in the receiver's try_receive and arm
        self._position = end
        if self._wanted:
            self._wanted = words[FULL_SINCE] = 0
        with FENCE:  # pairs with the one in BoardReceiver.arm
            pass
        if WEAK or any(self._sleepers):  # each byte is stored in BoardReceiver.arm and disarm
            self._ring()

    def _ring(self) -> None:
        for asleep, bell in zip(self._board.sleepers, self._reader_bells, strict=True):
            if asleep or WEAK:
                bell.ring()

    def fileno(self) -> int:
        self._check()
        return self._bell.fileno()

    def arm(self) -> bool:
        self._check()
        words = self._words
        if not self._wanted:
            return False
        words[WANTED] = self._wanted  # loaded in BoardReceiver.commit
        with FENCE:  # pairs with the one in BoardReceiver.commit
            pass
        if self._slowest() >= self._wanted or words[DEAD_READERS]:
            words[WANTED] = 0
            return False
        return True

    def disarm(self) -> None:
        self._check()
        self._words[WANTED] = 0
        self._bell.drain()

    def laggards(self) -> str:
        self._check()
        return self._board.laggards(self._readers, self._wanted)

    def stats(self) -> ChannelStats:
        self._check()
        return self._board.stats()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._board.close()
            for bell in (self._bell, *self._reader_bells):
                bell.close()


class BoardReceiver(Receiver):
    """A reading end's side of the board. A transport adds `try_receive`.

    bells: the reader's own, then the writer's. They and the board are this end's to close.
    """

    def __init__(
        self, edge: str, writer: str, reader: int, board: Board, bells: Sequence[Doorbell]
    ) -> None:
        self.edge = edge
        self._writer = writer
        self._reader = reader
        self._board = board
        self._words = board.words
        self._capacity = board.capacity
        self._bell, self._writer_bell = bells
        self._closed = False
        self._cursor = board.cursors[reader]
        # What an earlier incarnation received and did not commit comes again.
        self._position = self._committed = self._words[self._cursor]
        self._records = 0
        board.sleepers[reader] = 0
        self._words[self._cursor + 1] = os.getpid()

    def _check(self) -> None:
        if self._closed:
            raise ChannelClosed(f"{self.edge}: this receiver is closed")

    def _dead(self) -> PeerDeadError:
        pid = self._words[WRITER_PID]
        return PeerDeadError(
            f"{self.edge}: {self._writer} (pid {pid}) is dead, and all it sent has been received"
        )

    def _waiting(self) -> bool:
        """Whether there may be a record to receive."""
        return self._words[PUBLISHED] != self._position  # stored in BoardSender._publish

    def commit(self) -> None:
        if self._closed:
            self._check()
        position = self._position
        if position == self._committed:
            return
        self._committed = position
        words = self._words
        if WEAK:
            order()  # the reading before the giving up
        words[self._cursor] = position  # loaded in BoardSender._slowest
        with FENCE:  # pairs with the one in BoardSender.arm
            pass
        wanted = words[WANTED]  # stored in BoardSender.arm and disarm
        if WEAK or (wanted and position >= wanted):
            self._writer_bell.ring()

    def fileno(self) -> int:
        self._check()
        return self._bell.fileno()

    def arm(self) -> bool:
        self._check()
        sleepers = self._board.sleepers
        sleepers[self._reader] = 1  # loaded in BoardSender._publish
        with FENCE:  # pairs with the one in BoardSender._publish
            pass
        if self._waiting() or self._words[WRITER_DEAD]:
            sleepers[self._reader] = 0
            return False
        return True

    def disarm(self) -> None:
        self._check()
        self._board.sleepers[self._reader] = 0
        self._bell.drain()

    def stats(self) -> ChannelStats:
        self._check()
        used = max(0, self._words[PUBLISHED] - self._committed)
        return ChannelStats(capacity=self._capacity, used=used, records=self._records)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._board.close()
            self._bell.close()
            self._writer_bell.close()
