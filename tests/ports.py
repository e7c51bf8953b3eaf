"""TCP ports for servers that tests start on this host."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that the kernel gives to connections, which could come between.
FIRST, LAST = 10_000, 32_000


def free_ports(count: int = 1) -> int:
    """The first of so many in a row that nobody listens at. Drawn, since tests run side by side."""
    while True:
        port = random.SystemRandom().randrange(FIRST, LAST - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in range(port, port + count):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", each))
            return port
