"""Memory order: what keeps the loads and stores of two processes from passing each other.

Python has no atomics. An aligned 8-byte item of a memoryview, or a single byte, is loaded and
stored by one instruction; what lies between two of them is up to the processor.

Every publication, what must be visible with it, and who relies on that:

    publication         after                        partner: loads it, and only then
    PUBLISHED           the record's stores          RingReceiver._look: copies the record
    CURSOR              the copying out              BoardSender._has_room: overwrites
    WRITER_DEAD         the writer's last store      RingReceiver._look: PUBLISHED once more
    DEAD_READERS        a ring of every bell         BoardSender.try_send: raises
    a reset             the deaths and answers       whoever is started, or marked alive, after it
    MAGIC and the like  everything else              whoever is started after it

    two that cross      stores, fence, looks at      partner: stores, fence, looks at
    a record            PUBLISHED; sleeper bytes     BoardReceiver.arm: its byte; PUBLISHED
    a commit            CURSOR; WANTED               BoardSender.arm: WANTED; every CURSOR

The first three need loads and stores to stay in order, the two that cross more than that (ends.py
says what they are for), and the other three are ordered by the system calls that lie between: a
ring, a message, the start of a process.

x86, tested (tests/mq, and torture.py there): loads stay in order, and so do stores, and no store
passes an earlier load; only a load may overtake an earlier store. So `order()` is left out, and
only the crossings have `with FENCE: pass`: a lock taken and given back without contention is a
locked instruction, which is a full fence. (`with`, and not acquire() and release(): a signal
handler that raises between these two would leave the lock taken.)

Elsewhere, argued: anything may pass anything, and a lock keeps only what is inside it inside. Of
two locked sections one after the other, though, the second's beginning can't pass the first's end,
so nothing before the first can pass anything after the second: that is `order()`. It goes where the
first three are stored, and where they are loaded. Whether it is also a full fence has not been
tested there, so bells are rung for every record and every commit: the system call that rings makes
what was stored before it visible to whoever it wakes.
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
