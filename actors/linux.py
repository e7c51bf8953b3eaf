"""The few system calls that keep processes together, and what /proc says of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; end if it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def allow_many_files() -> None:
    """As many descriptors as this process may have at all: a channel takes three and more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
