"""The order in which sequences are served: by priority, and of one priority as they came.

A sequence's key is its `place`, which never changes, so one that was preempted comes back to where
it was. With scheduling_policy "fcfs" all priorities are 0.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from .sequence import Sequence


def place_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.place


def priority_of(sequence: Sequence) -> int:
    return sequence.place[0]


class Ordered:
    """Sequences in order, for the few that hold blocks. Changes move what comes behind."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        i = bisect_left(self._sequences, sequence.place, key=place_of)
        return i < len(self._sequences) and self._sequences[i] is sequence

    @property
    def last(self) -> Sequence:
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=place_of)

    def remove(self, sequence: Sequence) -> None:
        """It must be here."""
        del self._sequences[bisect_left(self._sequences, sequence.place, key=place_of)]

    def clear(self) -> None:
        self._sequences.clear()


Heap = list[tuple[tuple[int, int], Sequence]]


class WaitingQueue:
    """Sequences that wait, in order. Every operation is O(log n), on the average.

    Long ones, of more than `threshold` tokens, have a heap of their own, so that the others can
    pass them. One that gets long while it waits (the tokens that were in flight when it was
    preempted come back) changes heaps when it is at the front. What is removed from the middle
    stays in its heap until it comes to the front, or until half of the heap is gone.
    """

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._short: Heap = []
        self._long: Heap = []
        self._places: dict[int, tuple[Sequence, Heap]] = {}  # by stream

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        """In no order."""
        return (sequence for sequence, _ in self._places.values())

    def is_long(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) > self._threshold

    def add(self, sequence: Sequence) -> None:
        heap = self._long if self.is_long(sequence) else self._short
        self._places[sequence.stream] = sequence, heap
        heappush(heap, (sequence.place, sequence))

    def first(self, long_too: bool = True) -> Sequence | None:
        """The first in order, or the first that isn't long."""
        while self._has_first(self._short) and self.is_long(grown := self._short[0][1]):
            self.take(grown)
            self.add(grown)
        heaps = (self._short, self._long) if long_too else (self._short,)
        firsts = [heap[0] for heap in heaps if self._has_first(heap)]
        return min(firsts)[1] if firsts else None

    def take(self, sequence: Sequence) -> None:
        """Remove what `first` has just returned; it may be added again."""
        _, heap = self._places.pop(sequence.stream)
        taken = heappop(heap)
        assert taken[1] is sequence

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence for ever, wherever it is. It need not be here."""
        _, heap = self._places.pop(sequence.stream, (None, None))
        if heap is not None and len(heap) > 2 * len(self._places) + 16:
            heap[:] = [entry for entry in heap if entry[1].stream in self._places]
            heapify(heap)

    def _has_first(self, heap: Heap) -> bool:
        while heap and heap[0][1].stream not in self._places:
            heappop(heap)
        return bool(heap)
