"""Shared memory that can't be left behind: it has no name, and lives while a descriptor of it does.

1. `create` makes a segment under a name of ours, locks it and unlinks it before doing anything
   else. Peers get the descriptor, never the name, so two topologies can't meet, and no kind of
   death leaves an entry in /dev/shm.
2. A process that dies between making and unlinking, which is microseconds, leaves a name. `reap`
   removes names of ours that it can lock. A lock, not a process id, says who is alive: containers
   may share /dev/shm but not pids. Taking the name from a living process that has not locked yet
   does no harm: it only needs its descriptor.
3. Memory is reserved by posix_fallocate: a segment that was only enlarged dies by SIGBUS when
   /dev/shm is full.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets

import posix_ipc

from .errors import ConfigError

PREFIX = "ringcast-"
FOLDER = "/dev/shm"


class Segment:
    """`memory` is the mapping. `fd` is for passing on, and -1 for a segment that was attached."""

    def __init__(self, memory: mmap.mmap, fd: int) -> None:
        self.memory = memory
        self.fd = fd

    @classmethod
    def create(cls, size: int) -> Segment:
        """Reserve `size` bytes, all 0. Raises ConfigError when there is not so much shared memory
        left."""
        name = f"/{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        fd: int = posix_ipc.SharedMemory(name, flags=posix_ipc.O_CREX, mode=0o600).fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(posix_ipc.ExistentialError):  # a reaper was quicker
                posix_ipc.unlink_shared_memory(name)
            _reserve(fd, size)
            return cls(mmap.mmap(fd, size), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """Map the segment behind a descriptor that belongs to somebody else, who may close it."""
        return cls(mmap.mmap(fd, os.fstat(fd).st_size), -1)

    def close(self) -> None:
        self.memory.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _reserve(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        disk = os.statvfs(FOLDER)
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        raise ConfigError(
            f"ring_bytes: {size} bytes of shared memory were asked for, and {FOLDER} has {free} "
            f"left of {total}; lower --ring-bytes, or give the container more with --shm-size"
        ) from None


def reap() -> list[str]:
    """Remove what a crash left in /dev/shm. Returns the names removed. Never touches what someone
    holds."""
    return [
        name for name in sorted(os.listdir(FOLDER)) if name.startswith(PREFIX) and _remove(name)
    ]


def _remove(name: str) -> bool:
    try:
        fd: int = posix_ipc.SharedMemory(f"/{name}").fd
    except (posix_ipc.ExistentialError, posix_ipc.PermissionsError):  # just gone, or another user's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        posix_ipc.unlink_shared_memory(f"/{name}")
    except (BlockingIOError, posix_ipc.ExistentialError):
        return False
    finally:
        os.close(fd)
    return True
