"""Lists of ints as the arrays of mq/messages.py."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def packed(values: Sequence[int], kind: str = "i") -> bytes:
    """int32 array as bytes: `codec.pack` for lists, at a third of its price or less. kind: "q" for
    int64."""
    return struct.pack(f"<{len(values)}{kind}", *values)


class Repacker:
    """`packed` for lists of which one is often like the one before: its bytes are kept."""

    def __init__(self, kind: str = "i") -> None:
        self._kind = kind
        self._values: list[int] = []
        self._bytes = b""

    def __call__(self, values: list[int]) -> bytes:
        """The list must not change after this."""
        if values != self._values:
            self._values, self._bytes = values, packed(values, self._kind)
        return self._bytes
