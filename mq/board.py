"""The board: what the ends of a channel tell each other beside the records, in shared memory.

It is an array of 8-byte words, each with one writer. Words written by different processes while
messages flow lie on cache lines of their own.

    line   word           written by              read by
    0      MAGIC          owner, once             everyone, when opening
           VERSION        owner, once             everyone, when opening
           CAPACITY       owner, once             everyone, when opening
           NUM_READERS    owner, once             everyone, when opening
    1      PUBLISHED      writer, per record      readers: records up to here may be read
           RECORDS        writer, per record      owner: how many there have been
    2      WANTED         writer, to sleep        readers, after a commit: ring when it reaches this
           FULL_SINCE     writer, when refusing   owner: since when (monotonic ns); 0: it doesn't
           WRITER_PID     writer, when opening    readers and owner, for messages
    3      WRITER_DEAD    owner                   readers, when there is nothing to read
           DEAD_READERS   owner, a bit for each   writer, before every record
    4      64 bytes       reader i writes byte i  writer, after publishing: which readers sleep
    5 + i  CURSOR         reader i, per commit    writer: everything before this may be overwritten
           READER_PID     reader i, when opening  writer and owner, for messages
           RESETS         owner, at a reset       writer: reader i begins anew, so do its records

Positions (PUBLISHED, WANTED, CURSOR) count bytes since the channel was made and only grow; they
never wrap (2**64 bytes take 58 years at 10 GB/s). CURSOR has a second writer: the owner moves it at
a reset, when reader i is dead and the writer at rest.

RECORDS is for people: a writer that is killed between storing it and PUBLISHED leaves it one too
high.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from mmap import mmap

from .channel import ChannelStats
from .errors import ConfigError, CorruptRecordError

MAX_READERS = 64

MAGIC, VERSION, CAPACITY, NUM_READERS = 0, 1, 2, 3
PUBLISHED, RECORDS = 8, 9
WANTED, FULL_SINCE, WRITER_PID = 16, 17, 18
WRITER_DEAD, DEAD_READERS = 24, 25
SLEEPERS, CURSORS, LINE = 32, 40, 8

_MAGIC = int.from_bytes(b"ringcast", "little")
_VERSION = 1


def board_bytes(num_readers: int) -> int:
    return 8 * (CURSORS + LINE * num_readers)


class Board:
    """One process's view of the board at the start of `memory`."""

    def __init__(self, memory: mmap | bytearray) -> None:
        words = memoryview(memory).cast("Q")
        if (words[MAGIC], words[VERSION]) != (_MAGIC, _VERSION):
            words.release()
            raise CorruptRecordError("this memory is no channel's, or that of another version")
        self.words = words
        self.capacity = words[CAPACITY]
        self.num_readers = words[NUM_READERS]
        self.sleepers = memoryview(memory)[8 * SLEEPERS : 8 * SLEEPERS + self.num_readers]
        self.sleeper_words = words[SLEEPERS : SLEEPERS + -(-self.num_readers // 8)]
        self.cursors = tuple(CURSORS + LINE * reader for reader in range(self.num_readers))

    @classmethod
    def format(
        cls, memory: mmap | bytearray, capacity: int, num_readers: int, start: int = 0
    ) -> Board:
        """Make a board in memory that is all 0. `start` is the position of the first record."""
        if not 1 <= num_readers <= MAX_READERS:
            raise ConfigError(f"a channel has 1 to {MAX_READERS} readers, not {num_readers}")
        with memoryview(memory).cast("Q") as words:
            words[VERSION], words[CAPACITY], words[NUM_READERS] = _VERSION, capacity, num_readers
            words[PUBLISHED] = start
            for reader in range(num_readers):
                words[CURSORS + LINE * reader] = start
            words[MAGIC] = _MAGIC
        return cls(memory)

    def slowest(self) -> int:
        """The position before which every reader has committed."""
        words = self.words
        return min([words[cursor] for cursor in self.cursors])

    def reader_pid(self, reader: int) -> int:
        """The process that opened this reader last; 0 if none has."""
        return self.words[self.cursors[reader] + 1]

    def resets(self) -> list[int]:
        """How often each reader has been reset."""
        return [self.words[cursor + 2] for cursor in self.cursors]

    def reset(self, reader: int) -> None:
        """Let this reader's next incarnation begin at what is published from now on."""
        cursor = self.cursors[reader]
        self.words[cursor] = self.words[PUBLISHED]
        self.words[cursor + 2] += 1

    def progress(self) -> list[tuple[int, int]]:
        """Each reader's (CURSOR, PUBLISHED)."""
        # In this order, or the cursor could be beyond.
        return [(self.words[cursor], self.words[PUBLISHED]) for cursor in self.cursors]

    def stats(self) -> ChannelStats:
        cursor = self.slowest()  # before PUBLISHED, or the difference could be negative
        used = self.words[PUBLISHED] - cursor
        return ChannelStats(capacity=self.capacity, used=used, records=self.words[RECORDS])

    def laggards(self, readers: Sequence[str], wanted: int = 0) -> str:
        """Who has not reached `wanted`, or else the end, and by how much."""
        published = self.words[PUBLISHED]
        late = []
        for index, name in enumerate(readers):
            cursor, pid = self.words[self.cursors[index]], self.reader_pid(index)
            if cursor < (wanted or published):
                who = f"pid {pid}" if pid else "not opened yet"
                late.append(f"reader {index} {name} ({who}) is {published - cursor} bytes behind")
        return ", ".join(late) or "every reader has read everything"

    def full_seconds(self) -> float:
        """For how long the writer has had something that doesn't fit; 0.0 if it hasn't."""
        since = self.words[FULL_SINCE]
        return (time.monotonic_ns() - since) / 1e9 if since else 0.0

    def mark_writer(self, dead: bool) -> None:
        self.words[WRITER_DEAD] = int(dead)

    def mark_reader(self, reader: int, dead: bool) -> None:
        others = self.words[DEAD_READERS] & ~(1 << reader)
        self.words[DEAD_READERS] = others | int(dead) << reader

    def dead_readers(self, readers: Sequence[str]) -> str:
        dead = self.words[DEAD_READERS]
        return ", ".join(
            f"{name} (pid {self.reader_pid(index)})"
            for index, name in enumerate(readers)
            if dead >> index & 1
        )

    def close(self) -> None:
        for view in (self.sleepers, self.sleeper_words, self.words):
            view.release()
