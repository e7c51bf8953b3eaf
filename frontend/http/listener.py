"""The server's listening socket, bound first of all, so that a taken port is said at once."""

from __future__ import annotations

import errno
import socket

from ...mq.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A bound and listening TCP socket. Who connects before the server is ready waits for it.

    Raises ConfigError when the address is taken or isn't this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host = {host!r}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port = {port}: taken on {host} by another process; "
                "choose another with --port, or 0 for a free one"
            ) from None
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"port = {port}: needs privileges; choose one above 1023 with --port"
            ) from None
        raise ConfigError(f"host = {host!r}, port = {port}: {error.strerror}") from None
    return listener
