"""How sampled tokens get from the output rank's process to those of the stages before, through
memory that they share: what sampled_tokens.py needs of a link.

The slots are used in turn. A word, eight bytes that are stored at once, has a token and the number
of its item: so a reader that finds one number in a whole slot has that item, in whatever order the
words came.

    slots    written by the output rank, read by all readers
    taken    written by a reader, read by the output rank: items that it is done with
    left     written by who leaves, read by who waits

There is a slot for each step in flight, which is why the writer never waits (executor/pipeline.py):
what is in its next slot was read before the plan of the step was made.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import numpy as np
import torch

from ...mq.errors import PeerDeadError
from ...mq.fence import WEAK, order

_NAP_SECONDS = 20e-6
_NUMBERS = 1 << 31  # of items, then they begin again
_LINE = 8  # words that one process writes


def mail_bytes(readers: int, slots: int, tokens: int) -> int:
    return 8 * (_LINE * (1 + readers) + slots * tokens)


class TokenMail:
    """One process's end: the writer's, or that of reader number `reader`."""

    def __init__(
        self,
        memory_fd: int,
        shape: tuple[int, int, int],
        reader: int | None,
        timeout: float,
        offset: int = 0,
    ) -> None:
        """memory_fd: of a file that has `mail_bytes` of zeros from `offset` on. shape: readers,
        slots, and tokens of a slot. timeout: seconds that `wait` may take.
        """
        readers, slots, tokens = shape
        size = offset + mail_bytes(*shape)
        words = np.frombuffer(mmap.mmap(memory_fd, size), np.int64, offset=offset)
        lines, self._slots = words[: _LINE * (1 + readers)], words[_LINE * (1 + readers) :]
        self._left, self._taken = lines[:1], lines[_LINE::_LINE]
        self._slots = self._slots.reshape(slots, tokens)
        self._reader, self._timeout = reader, timeout
        self._item = 0

    @property
    def is_ready(self) -> bool:
        if self._reader is None:
            return bool(self._item < self._taken.min() + len(self._slots))
        return bool((self._slot >> 32 == self._number).all())

    def wait(self) -> None:
        start = time.monotonic()
        while not self.is_ready:
            if self._left[0] and not self.is_ready:  # it may have said something before
                raise PeerDeadError("another stage of the pipeline has left")
            if time.monotonic() - start > self._timeout:
                what = "room for" if self._reader is None else "the last stage's"
                raise TimeoutError(f"a stage has waited {self._timeout:g} s for {what} tokens")
            time.sleep(_NAP_SECONDS)

    def bind(self, rows: np.ndarray, x: torch.Tensor) -> Callable[[], None]:
        """x: of one row, of a slot's size."""
        values = x.numpy().view(np.int32)[0]
        assert (rows[0], len(values)) == (1, self._slots.shape[1])

        def send() -> None:
            np.bitwise_or(values.astype(np.int64) & 0xFFFFFFFF, self._number << 32, out=self._slot)
            self._item += 1

        def receive() -> None:
            values[:] = self._slot & 0xFFFFFFFF
            self._item += 1
            if WEAK:
                order()  # the slot has been read before that is said
            self._taken[self._reader] = self._item

        return send if self._reader is None else receive

    def leave(self) -> None:
        self._left[0] = 1

    @property
    def _slot(self) -> np.ndarray:
        slot: np.ndarray = self._slots[self._item % len(self._slots)]
        return slot

    @property
    def _number(self) -> int:
        return (self._item + 1) % _NUMBERS
