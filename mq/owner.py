"""The owner of a channel: keeps its board and its bells while writers and readers come and go.

Who is dead is the owner's to say. It writes the mark and rings everyone's bell, so that whoever
sleeps looks. What becomes of what the dead have not read is the owner's to say, too: `reset` before
a new incarnation, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from .board import Board
from .channel import ChannelStats
from .doorbell import Doorbell


class BoardOwner:
    """writer, readers: the names of the instances at the two ends."""

    def __init__(self, name: str, writer: str, readers: Sequence[str], board: Board) -> None:
        self.name = name
        self.writer = writer
        self.readers = tuple(readers)
        self._board = board
        self.bells: list[Doorbell] = []  # the writer's first
        try:
            for _ in (writer, *readers):
                self.bells.append(Doorbell.create())
        except OSError:
            for bell in self.bells:
                bell.close()
            raise
        self._closed = False

    def mark_dead(self, instance: str) -> None:
        """From now on the other side of this channel is told that this end is gone."""
        self._mark(instance, dead=True)

    def mark_alive(self, instance: str) -> None:
        """Take it back, before a new incarnation of this end starts."""
        self._mark(instance, dead=False)

    def _mark(self, instance: str, dead: bool) -> None:
        if instance == self.writer:
            self._board.mark_writer(dead)
        else:
            self._board.mark_reader(self.readers.index(instance), dead)
        for bell in self.bells:
            bell.ring()

    def reset(self, instance: str) -> None:
        """Let the next incarnation of a reader begin with what is sent from now on.

        Only while that reader is dead, and the writer is dead too or has said that it knows: it has
        met PeerDeadError and sends nothing until the mark is taken back.
        """
        self._board.reset(self.readers.index(instance))
        self.bells[0].ring()  # a writer that waits for space has some now

    def progress(self) -> list[tuple[str, int, int]]:
        """(reader, its cursor, what is published): of whoever doesn't read, the cursor stands still
        before what is published."""
        cursors = self._board.progress()
        return [(name, *at) for name, at in zip(self.readers, cursors, strict=True)]

    def stats(self) -> ChannelStats:
        return self._board.stats()

    def full(self) -> tuple[float, str]:
        """For how many seconds nothing more has fitted, and who has not read what; (0.0, "") if
        what is to be sent fits."""
        seconds = self._board.full_seconds()
        return (seconds, self._board.laggards(self.readers)) if seconds else (0.0, "")

    def describe(self) -> str:
        """One line for people: how full, for how long nothing has fitted, who has not read how
        much."""
        stats, full = self._board.stats(), self._board.full_seconds()
        waits = f"full for {full:.1f} s; " if full else ""
        return (
            f"{self.name}: {stats.used} of {stats.capacity} bytes, {stats.records} records; "
            f"{waits}{self._board.laggards(self.readers)}"
        )

    def close(self) -> None:
        """The ends that others have open go on working. May be called any number of times."""
        if not self._closed:
            self._closed = True
            self._board.close()
            for bell in self.bells:
                bell.close()
