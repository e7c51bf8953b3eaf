"""The doorbell: wakes a process that sleeps in poll, select or an event loop.

It is an eventfd, which has no name and so can't be left behind. A bell that has been rung stays
readable until it is drained, however often it was rung. Whoever sleeps drains it; whoever wakes
someone rings it; it does not say why. When to ring and when to sleep is told in ends.py.
"""

from __future__ import annotations

import os


class Doorbell:
    """Owns its descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    @classmethod
    def inherit(cls, fd: int) -> Doorbell:
        """The bell behind a descriptor that belongs to somebody else, who may close it."""
        return cls(os.dup(fd))

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:
            return  # the counter is full after 2**64 - 2 rings; it is readable then, and that's all

    def drain(self) -> bool:
        """Silence the bell. Says whether it had been rung."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
