"""The few system calls that keep processes together, and what /proc says of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_OF_GROUPS = (signal.SIGINT, signal.SIGTERM)
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; end if it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """A process that is started within begins with SIGINT and SIGTERM held back until it takes
    them (`take_signals`). They reach whole groups, and may come before it has said what they mean.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUPS)


def start_process(module: str, order: bytes, fds: Collection[int]) -> subprocess.Popen[bytes]:
    """A process that runs a module of ours, which finds `order` in the descriptor that its argument
    names. fds: what else it inherits. Raises OSError where no descriptors, processes or memory are
    left.
    """
    order_fd = memory_fd(order)
    command = [sys.executable, "-P", "-m", module, str(order_fd)]
    try:
        with signals_held():
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds={order_fd, *fds})
    finally:
        os.close(order_fd)


def allow_many_files() -> None:
    """As many descriptors as this process may have at all: a channel takes three and more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def memory_fd(payload: bytes) -> int:
    """An anonymous file holding `payload`, for another process."""
    fd = os.memfd_create("ringcast-message")
    with open(fd, "wb", closefd=False) as file:
        file.write(payload)
    return fd


def read_fd(fd: int) -> bytes:
    """All that a descriptor from another process holds, from its beginning. Closes it."""
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb") as file:
        return file.read()


def usage(pid: int) -> tuple[float, int]:
    """(CPU seconds used, resident bytes) of a process; zeros if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/statm") as statm:
            fields = stat.read().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / _TICK, int(statm.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0


def oom_kills() -> int:
    """How many processes the kernel has killed on this host because memory ran out."""
    with open("/proc/vmstat") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def describe_exit(status: int) -> str:
    """How a process ended, in words, from os.waitstatus_to_exitcode's number."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def sleep_precisely() -> None:
    """By default the kernel may make each nap 50 us longer, to wake several sleepers at once."""
    with contextlib.suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1000")
