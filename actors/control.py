"""The control connection of an actor with the supervisor, which is also its lifeline.

A Unix socket pair of whole packets, made before the child starts. Its end of file is the other
side's death: the kernel closes it whatever the kind of death, so an actor that reads end of file
has been orphaned and ends. It carries few and small messages; requests and tokens never travel
here. Descriptors can be passed along (SCM_RIGHTS). A message that is larger than a packet (the
status of very many actors) lies in a file in memory, whose descriptor is the packet's last.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from ..mq import codec, messages
from .linux import memory_fd, read_fd

MAX_PACKET = 128 * 1024
_TEXT_LIMIT = 32 * 1024
_MAX_FDS = 250
_IN_FILE = b"\xc1"  # no MessagePack begins so


class Control:
    """One end. `incoming` is the union of message types that the other side sends."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._socket = sock
        self._decode: codec.Decoder[Any] = codec.Decoder(incoming)
        sock.setblocking(False)

    @classmethod
    def pair(cls) -> tuple[socket.socket, socket.socket]:
        """(supervisor's socket, actor's socket)"""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (left, right):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET)
        return left, right

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: messages.Message, fds: list[int] | None = None) -> bool:
        """Send one message.

        False if the other side is gone or doesn't read: its death is seen elsewhere.
        """
        payload = codec.encode(message)
        if len(payload) <= MAX_PACKET:
            return self._send(payload, fds or [])
        file = memory_fd(payload)
        try:
            return self._send(_IN_FILE, [*(fds or []), file])
        finally:
            os.close(file)

    def _send(self, packet: bytes, fds: list[int]) -> bool:
        try:
            socket.send_fds(self._socket, [packet], fds)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Any, list[int]] | None:
        """The next message with its descriptors; None if there is none now.

        Raises EOFError when the other side is gone.
        """
        try:
            data, fds, _, _ = socket.recv_fds(
                self._socket, MAX_PACKET, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise EOFError from None
        if not data:
            raise EOFError
        if data == _IN_FILE:
            data = read_fd(fds.pop())
        return self._decode(data), fds

    def close(self) -> None:
        self._socket.close()


def shorten(text: str) -> str:
    """Keep a traceback's end, where its reason is, within what a packet can carry."""
    return text if len(text) <= _TEXT_LIMIT else "…" + text[-_TEXT_LIMIT:]
