"""What a process has freed and its C library keeps."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Give freed memory back to the system, after what has made much garbage once. Does nothing
    where the C library has no `malloc_trim` (glibc alone has it).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
