"""Which line of an input has a custom_id: 16 bytes for each, whatever its length."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 16


class CustomIds:
    """Add all, then `close`, then `find`. Ids are told apart by 128 bits of BLAKE2b."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._lines = array("q")
        self._high: NDArray[np.uint64] = np.empty(0, np.uint64)  # sorted, each with
        self._low: NDArray[np.uint64] = np.empty(0, np.uint64)  # its other half
        self._sorted_lines: NDArray[np.int64] = np.empty(0, np.int64)

    def add(self, custom_id: str, line: int) -> None:
        """Lines must come in rising order."""
        self._digests += _digest(custom_id)
        self._lines.append(line)

    def close(self) -> list[int]:
        """The lines whose id an earlier line has."""
        keys = np.frombuffer(self._digests, np.uint64).reshape(-1, 2)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: a first line stays before the others
        self._high, self._low = keys[order, 0], keys[order, 1]
        self._sorted_lines = np.frombuffer(self._lines, np.int64)[order]
        same = (self._high[1:] == self._high[:-1]) & (self._low[1:] == self._low[:-1])
        duplicates: list[int] = self._sorted_lines[1:][same].tolist()
        return duplicates

    def find(self, custom_id: str) -> int | None:
        """The first line with this id."""
        high, low = np.frombuffer(_digest(custom_id), np.uint64)
        place = int(np.searchsorted(self._high, high))
        while place < len(self._high) and self._high[place] == high:
            if self._low[place] == low:
                return int(self._sorted_lines[place])
            place += 1
        return None


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
