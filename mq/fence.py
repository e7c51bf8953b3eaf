"""Memory order: what keeps the loads and stores of two processes from passing each other.

Python has no atomics. An aligned 8-byte item of a memoryview is loaded and stored by one
instruction; what lies between two of them is up to the processor.

x86, tested: loads stay in order, and so do stores; only a load may overtake an earlier store. Where
that matters (both sides store something and then look at what the other stored), `with FENCE: pass`
stands between: a lock taken and given back without contention is one locked instruction, which is a
full fence.

Elsewhere, argued: anything may pass anything, and a lock keeps only what is inside it inside. Of
two locked sections one after the other, though, the second's beginning can't pass the first's end,
so nothing before the first can pass anything after the second: that is `order()`. It goes between a
record and its publication, and between seeing a publication and reading the record. Whether it is
also a full fence has not been tested there, so bells are rung for every record: the system call
that rings makes what was stored before it visible to whoever it wakes.
"""

from __future__ import annotations

import platform
import threading

FENCE = threading.Lock()
WEAK = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")


def order() -> None:
    with FENCE:
        pass
    with FENCE:
        pass
