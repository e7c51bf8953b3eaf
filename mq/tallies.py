"""What the API servers of one topology count together, in memory that all of them have mapped.

    part      what                                       written by
    rows      of each server, what it has under way:     that server; the supervisor, when it's dead
              requests, questions, trials, requests by key
    begun     of each key, when its next places among    whoever holds the lock
              the requests of a minute are free
    metrics   of each server, what it has counted of     that server
              its requests (frontend/metrics/records.py)

Every server reads all of it.

1. What is limited is taken under the lock: all rows are added up, and one's own is made one more.
   So of all servers that want the last place exactly one gets it. Giving back needs no lock.
2. The lock is the kernel's, of a record of the file. It belongs to a process, and ends with it.
   Nothing is done under it that waits for anything.
3. A dead server has nothing under way: the supervisor clears its row once its process is reaped.
   What it had begun within the minute stays begun, and what it had counted stays counted, so that
   no counter of /metrics ever falls.

The memory is an anonymous file: no kind of death leaves anything behind. It is as large as the
limits allow for, and pages that nobody has written take no room.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from .server_config import ServerConfig

# Words of a row; from KEYS on, each key's requests.
REQUESTS, QUESTIONS, TRIALS, KEYS = 0, 1, 2, 3
METRIC_WORDS = 1024
_WORD = 8
_LINE = 8  # words: rows lie on cache lines of their own


class Shape(msgspec.Struct, frozen=True):
    """num_keys: whose requests are counted. max_per_minute: of each key's; 0: no limit."""

    num_servers: int = 1
    num_keys: int = 0
    max_per_minute: int = 0

    @classmethod
    def of(cls, server: ServerConfig) -> Shape:
        return cls(
            server.api_server_count,
            len(server.api_key),
            server.max_requests_per_minute_per_key or 0,
        )

    @property
    def row_words(self) -> int:
        return -(-(KEYS + self.num_keys) // _LINE) * _LINE

    @property
    def words(self) -> int:
        """Of 8 bytes, in all."""
        of_servers = self.num_servers * (self.row_words + METRIC_WORDS)
        return of_servers + self.num_keys * (1 + self.max_per_minute)


class Tallies:
    """One process's view. server: whose row is its own; the supervisor has none, and only clears.

    fd: of the shared file, for passing on; -1 where nobody shares it. metrics: f64[METRIC_WORDS],
    the server's own.
    """

    def __init__(self, shape: Shape, memory: mmap.mmap, fd: int, server: int) -> None:
        counts = shape.num_servers * shape.row_words
        begun = counts + shape.num_keys
        metrics = begun + shape.num_keys * shape.max_per_minute
        self.fd = fd
        self._shape = shape
        words = np.frombuffer(memory, dtype=np.float64)
        self._counts = memoryview(memory)[: begun * _WORD].cast("q")
        self._rows = [server * shape.row_words for server in range(shape.num_servers)]
        self._own = self._rows[server]
        self._turns = counts
        self._free_at = words[begun:metrics]
        self._metrics = words[metrics:].reshape(shape.num_servers, METRIC_WORDS)
        self.metrics = self._metrics[server]

    @classmethod
    def create(cls, shape: Shape) -> Tallies:
        """The supervisor's, which lives as long as the topology."""
        fd = os.memfd_create("ringcast-tallies")
        os.ftruncate(fd, shape.words * _WORD)
        return cls.attach(fd, shape, 0)

    @classmethod
    def attach(cls, fd: int, shape: Shape, server: int) -> Tallies:
        """A server's, of the file behind an inherited descriptor."""
        return cls(shape, mmap.mmap(fd, shape.words * _WORD), fd, server)

    @classmethod
    def local(cls, shape: Shape | None = None) -> Tallies:
        """Those of a single client, in memory of its own."""
        shape = shape or Shape()
        return cls(shape, mmap.mmap(-1, shape.words * _WORD), -1, 0)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else takes anything meanwhile."""
        if self._shape.num_servers == 1:
            yield
            return
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def total(self, *words: int) -> int:
        """What all servers have under way of these words of their rows."""
        counts = self._counts  # written in `add` by each row's server, and in `clear`
        return sum([counts[row + word] for row in self._rows for word in words])

    def add(self, word: int, number: int) -> None:
        """To the server's own; under the lock, if it is more than 0 and limited."""
        self._counts[self._own + word] += number

    def free_at(self, key: int) -> float:
        """When a key's next place in the minute is free; not after now, if it is. Under the
        lock."""
        return float(self._free_at[self._place(key)])

    def begin(self, key: int, free_at: float) -> None:
        """Take that place, until `free_at`. Under the lock."""
        self._free_at[self._place(key)] = free_at
        self._counts[self._turns + key] += 1

    def metrics_of_all(self) -> NDArray[np.float64]:
        """f64[METRIC_WORDS], the sums over all servers."""
        # Written by each server's histograms, which may be in the middle of it: their buckets are
        # whole numbers all the same, and a scrape that is one behind is what scrapes are.
        sums: NDArray[np.float64] = self._metrics.sum(axis=0)
        return sums

    def clear(self, server: int) -> None:
        """This server is dead, and has nothing under way."""
        row = self._rows[server]
        for word in range(row, row + self._shape.row_words):
            self._counts[word] = 0

    def close(self) -> None:
        """The supervisor's end. Those who have it mapped go on working."""
        os.close(self.fd)

    def _place(self, key: int) -> int:
        most = self._shape.max_per_minute
        return key * most + self._counts[self._turns + key] % most
