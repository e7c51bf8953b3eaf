"""The folder of a topology's Unix sockets: nobody else may enter it, and it isn't left behind.

It is locked for as long as its maker lives. A maker that is killed leaves it, and the next topology
of any kind removes it, as it does with segments (segment.py): a lock, not a process id, says who
is alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "ringcast-sockets-"


class SocketFolder:
    def __init__(self) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX)  # mode 0700
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.path.isdir(self.path):
                return
            os.close(self._fd)  # a reaper was quicker

    def remove(self) -> None:
        """May be called any number of times."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def reap() -> list[str]:
    """Remove the folders whose makers are dead. Returns their paths."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # just gone, or another user's
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
            removed.append(str(path))
        os.close(fd)
    return removed
