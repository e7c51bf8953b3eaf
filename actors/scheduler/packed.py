"""Lists of ints as the i32 arrays of mq/messages.py."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def packed(values: Sequence[int]) -> bytes:
    """int32 array as bytes: `codec.pack` for lists, at a third of its price or less."""
    return struct.pack(f"<{len(values)}i", *values)
