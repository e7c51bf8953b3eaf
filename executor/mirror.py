"""Ranks on several hosts: each host has a copy of the memory in which ranks tell each other things,
and mirrors keep the copies alike. For its own ranks nothing changes; a rank elsewhere is one whose
counts and slots a mirror writes. Without torch: an actor that is no worker runs it.

A mirror has one link, with the mirror at its other end. `theirs` are the ranks beyond that link, on
whichever host. What others have written it reads and sends; what theirs have written comes, and it
writes that. With hosts in a star, the one in the middle has a mirror for each link, and what one
writes another reads. A part of the memory (kernels/cpu/memory.py) whose ranks are all on one side
doesn't travel.

    region          | its word             | its slots                   | written by
    ----------------|----------------------|-----------------------------|--------------------
    exchange, lane  | pieces of a rank     | 2: piece n in slot n % 2    | the rank
    pipe            | items sent           | S: item n in (n - 1) % S    | the writer
    pipe, reader    | items taken          | none                        | the reader
    barriers, ...   | what the rank says   | none                        | the rank
    left            | 1: somebody has left | none                        | anybody, for good

Why this is right. "r" is a rank, "q" one that reads what r writes, on the other side of a link.

1. A word has one writer in every copy: its rank, or the one mirror that its changes come by.
2. A piece is read after the count that says that it is there, sent in one record with that count,
   and written before it (release and acquire, as between ranks; mq/fence.py). Links keep order. So
   in every copy, whoever has seen r's count at n finds r's piece n.
3. r writes piece n + 2 of an exchange into the slot of piece n after it has seen all counts at
   n + 1 in its own copy. q raises its own to n + 1 after it has read piece n in its own copy. So
   by then piece n has been sent, over every link between the two, has come, and been read by q.
   Therefore
   a. what a mirror is still to send lies whole in its slots: never more than the two newest
      pieces, and none of them is being overwritten;
   b. what a mirror writes overwrites nothing unread: before piece n + 2 can come to a copy, all
      ranks there have read piece n. (q is any of them.)
4. The same of a pipe with S slots: item n + S is written after all readers have said that they have
   taken item n, and they say so after they have read it.
5. Words without slots say everything by their last value, so it doesn't matter if some are skipped.

Where a link breaks off, nobody here is told: the supervisor kills the ranks with their gateway or
mirror.

How it begins. The memory's head (HEAD_BYTES) is not mirrored. A worker writes there what is where
(`describe`), then waits until all mirrors of its host are `open`, however long that takes: from
then on all ranks are there, and time counts. A mirror opens when it has heard from the other side
that the same is where.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from ..kernels.cpu import memory as layout
from ..mq.errors import CorruptRecordError
from ..mq.fence import WEAK, order

HEAD_BYTES = 1 << 16
MOST_BYTES = 1 << 20  # of a record, but for one piece that is larger
MOST_LINKS = 64
# Words of the head: the description's size; of each link: 1 when it is there, and 1 when it is
# open. Then the description.
_DESCRIBED, _HERE, _OPEN = 0, 8, 8 + MOST_LINKS
_TEXT = 8 * (8 + 2 * MOST_LINKS)
_LOOK_SECONDS = 0.005
_PIECE = struct.Struct("<IIq")  # the region, the bytes that follow, what its word is then


class Exchange(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """ranks: their numbers among all workers, in the order in which they are its ranks. offset: in
    the memory, in bytes."""

    ranks: tuple[int, ...]
    offset: int = 0


class Pipe(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Workers' numbers among all. words: of four bytes, in each slot."""

    writer: int
    readers: tuple[int, ...]
    slots: int
    words: int
    offset: int = 0


Part = Exchange | Pipe


class Region(NamedTuple):
    """word: where it is. owner: who writes it; None is anybody. members: who writes or reads it.

    Piece n is in slot (n - shift) % num_slots.
    """

    word: int
    owner: int | None
    members: frozenset[int]
    num_slots: int = 0
    first_slot: int = 0
    stride: int = 0
    most_bytes: int = 0
    shift: int = 0

    def slot(self, piece: int) -> int:
        return self.first_slot + (piece - self.shift) % self.num_slots * self.stride


def num_bytes(part: Part) -> int:
    if isinstance(part, Exchange):
        return layout.memory_bytes(len(part.ranks))
    return layout.pipe_bytes(len(part.readers), part.slots, part.words)


def lay_out(parts: Sequence[Part]) -> tuple[list[Part], int]:
    """The parts one after another, behind the head, and how many bytes that takes."""
    ends = list(accumulate(map(num_bytes, parts), initial=HEAD_BYTES))
    placed = zip(parts, ends[:-1], strict=True)
    return [msgspec.structs.replace(part, offset=start) for part, start in placed], ends[-1]


def regions(parts: Sequence[Part]) -> list[Region]:
    """All that is in these parts of a memory, in an order that is the same on every host."""
    return [region for part in parts for region in _regions(part)]


def _regions(part: Part) -> Iterator[Region]:
    line = layout.LINE
    if isinstance(part, Pipe):
        everyone = frozenset((part.writer, *part.readers))
        slots = part.offset + line * (1 + len(part.readers))
        size = layout.slot_bytes(part.words)
        capacity = size - line
        yield Region(part.offset, part.writer, everyone, part.slots, slots, size, capacity, 1)
        for i, reader in enumerate(part.readers):
            two = frozenset((part.writer, reader))
            yield Region(part.offset + line * (1 + i), reader, two)
        return
    num, members = len(part.ranks), frozenset(part.ranks)
    yield Region(part.offset, None, members)
    for i, rank in enumerate(part.ranks):
        for word in (0, 8):  # its threads, and its barriers
            yield Region(part.offset + line * (1 + i) + word, rank, members)
    counts = part.offset + line * (1 + num)
    slots = part.offset + layout.first_slot(num)
    size = layout.EXCHANGE_SLOT_BYTES
    for lane in range(layout.LANES):
        for i, rank in enumerate(part.ranks):
            word = counts + line * (lane * num + i)
            first = slots + size * (2 * lane * num + i)
            yield Region(word, rank, members, 2, first, size * num, size - line)


# The head, as workers and mirrors see it


def describe(memory: np.ndarray, parts: Sequence[Part]) -> None:
    """Say in a memory's head what is in it. Offsets count from the memory's beginning. All workers
    of a host say the same."""
    text = msgspec.msgpack.encode(list(parts))
    assert _TEXT + len(text) <= HEAD_BYTES, "too many parts"
    memory.view(np.uint8)[_TEXT : _TEXT + len(text)] = np.frombuffer(text, np.uint8)
    if WEAK:
        order()
    memory[_DESCRIBED] = len(text)


def read_description(memory_fd: int) -> bytes | None:
    """What `describe` has written, or None if nobody has yet."""
    size = int.from_bytes(os.pread(memory_fd, 8, 8 * _DESCRIBED), "little")
    return os.pread(memory_fd, size, _TEXT) if size else None


def wait_until_open(memory: np.ndarray, num_links: int) -> None:
    """Wait for all mirrors of this host, for any time."""
    while not memory[_OPEN : _OPEN + num_links].all():
        time.sleep(_LOOK_SECONDS)


class Mirror:
    """One end of a link. memory: int64, all of a described memory. description: of it. link: this
    one's number on this host. Takes and gives payloads of records.

    Raises CorruptRecordError for what the other end can't have said.
    """

    def __init__(
        self, memory: np.ndarray, description: bytes, theirs: Collection[int], link: int
    ) -> None:
        assert link < MOST_LINKS
        self._words, self._link = memory, link
        memory[_HERE + link] = 1
        self._bytes = memoryview(memory).cast("B")
        self._description = description
        every = regions(msgspec.msgpack.decode(description, type=list[Part]))
        beyond = frozenset(theirs)
        between = [region for region in every if region.members & beyond != frozenset()]
        between = [region for region in between if region.members - beyond]
        self._ours = [(i, r) for i, r in enumerate(between) if r.owner not in beyond]
        theirs = ((i, r) for i, r in enumerate(between) if r.owner is None or r.owner in beyond)
        self._theirs = dict(theirs)
        self._watched = np.array([r.word // 8 for _, r in self._ours], np.int64)
        self._told = np.zeros(len(self._ours), np.int64)
        self._is_open = False

    @property
    def is_open(self) -> bool:
        return self._is_open

    def all_here(self, num_links: int) -> bool:
        """Whether all mirrors of this host are there: only then may any greet, or the hosts that
        are there already would begin to count time."""
        return bool(self._words[_HERE : _HERE + num_links].all())

    def greeting(self) -> bytes:
        """What the other end has to be sent first."""
        return hashlib.blake2b(self._description, digest_size=16).digest()

    def changes(self) -> bytes:
        """What has been written here and not been sent yet, or as much of it as a record takes;
        empty if there is nothing. Only while it is open."""
        now = self._words[self._watched]
        changed = np.flatnonzero(now != self._told)
        if not len(changed):
            return b""
        if WEAK:
            order()  # the counts before what they count
        said: list[bytes | memoryview] = []
        size = 0
        for place in changed.tolist():
            number, region = self._ours[place]
            last, count = int(self._told[place]), int(now[place])
            if not region.num_slots:
                said.append(_PIECE.pack(number, 0, count))
                self._told[place] = count
                continue
            assert 0 < count - last <= region.num_slots, "a rank has not waited for the others"
            for piece in range(last + 1, count + 1):
                slot = region.slot(piece)
                used = int(self._words[slot // 8])
                assert 0 <= used <= region.most_bytes
                said.append(_PIECE.pack(number, used, piece))
                said.append(self._bytes[slot + layout.LINE : slot + layout.LINE + used])
                size += used
            self._told[place] = count
            if size >= MOST_BYTES:
                break
        return b"".join(said)

    def take(self, payload: bytes) -> None:
        """Write what has come."""
        if not self._is_open:
            if payload != self.greeting():
                raise CorruptRecordError("the other host's ranks share memory of another layout")
            self._is_open = True
            self._words[_OPEN + self._link] = 1
            return
        view, at = memoryview(payload), 0
        while at < len(payload):
            if len(payload) - at < _PIECE.size:
                raise CorruptRecordError("a piece of a rank's memory is torn")
            number, used, count = _PIECE.unpack_from(payload, at)
            at += _PIECE.size
            region = self._theirs.get(number)
            if region is None:
                raise CorruptRecordError(f"region {number} isn't theirs to write")
            self._write(region, count, view[at : at + used], used)
            at += used

    def _write(self, region: Region, count: int, piece: memoryview, used: int) -> None:
        word = region.word // 8
        if region.num_slots:
            last = int(self._words[word])
            if count != last + 1 or len(piece) != used or used > region.most_bytes:
                raise CorruptRecordError(
                    f"piece {count} of {used} bytes came after piece {last} of a rank's memory"
                )
            slot = region.slot(count)
            self._bytes[slot + layout.LINE : slot + layout.LINE + used] = piece
            self._words[slot // 8] = used
        elif used:
            raise CorruptRecordError("a word of a rank's memory came with a piece")
        if WEAK:
            order()  # the piece before its count
        self._words[word] = count
