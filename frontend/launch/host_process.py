"""The headless host that Ray's actor starts: `ringcast serve --headless`, with its secret.

    python -P -m ringcast.frontend.launch.host_process FD

reads a HostBoot as MessagePack from the inherited descriptor FD. Its standard input is its
lifeline: a pipe that nobody writes into, and whose end of file is the death of Ray's actor, however
that came. It leaves the master then, by a word and not by a connection that breaks, so that none of
its requests is suspected to be the cause; but soon, because Ray has given its room away. What
hasn't ended after a few seconds is killed, and by the kernel its children.

The secret is in an anonymous file, which the process's own children open by its path in /proc.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from ...actors.linux import memory_fd, read_fd
from ..cli.main import main as ringcast

_LEAVE_SECONDS = 5.0


class HostBoot(msgspec.Struct, frozen=True, kw_only=True):
    """options: of `ringcast serve`, by name."""

    options: dict[str, Any]
    secret: str


def secret_path(secret: str) -> tuple[int, str]:
    """(a descriptor to keep, the path by which this user's processes read the secret).

    The file is private and has no name; it goes with the process.
    """
    fd = memory_fd(secret.encode())
    os.fchmod(fd, 0o600)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def main() -> int:
    boot = msgspec.msgpack.decode(read_fd(int(sys.argv[1])), type=HostBoot)
    threading.Thread(target=_watch_lifeline, daemon=True).start()
    _, path = secret_path(boot.secret)
    options = yaml.safe_dump({**boot.options, "cluster_secret_file": path})
    return ringcast(["serve", "--config", f"/proc/self/fd/{memory_fd(options.encode())}"])


def _watch_lifeline() -> None:
    while os.read(0, 1):
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody reads it any more
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LEAVE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
