"""The endpoint: all that an actor needs to open its end of a channel, as a message from its parent.

The supervisor makes a ChannelOwner for every channel of the topology, and hands each actor its
endpoints. The descriptors in them are the supervisor's, renumbered on their way into the actor; an
end that is opened duplicates what it keeps, so closing it closes nothing that an endpoint names,
and an endpoint can be opened again.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

import msgspec

from .board import Board, board_bytes
from .channel import Receiver, Sender
from .errors import ConfigError
from .owner import BoardOwner
from .segment import Segment

# Each module has a class for either end, made from an Endpoint. None is imported before it is used.
SENDERS = {"ring": ".ring:RingSender", "zmq": ".zmq_channel:ZmqSender"}
RECEIVERS = {"ring": ".ring:RingReceiver", "zmq": ".zmq_channel:ZmqReceiver"}

_LONGEST_PATH = 95  # of a Unix socket, with room for two numbers (107 in all)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One end of one channel.

    edge: the channel's name. messages: its union in messages.py. peers: the instances on the other
    side. reader: which of `num_readers` readers this is (0 for the writer). address: where the
    readers of a ZeroMQ channel bind (zmq_channel.py). fds: the segment, this end's bell, then the
    bells of the other side.
    """

    edge: str
    messages: str
    role: Literal["send", "receive"]
    peers: tuple[str, ...]
    transport: str
    reader: int
    num_readers: int
    fds: list[int]
    address: str = ""


def open_sender(endpoint: Endpoint) -> Sender:
    assert endpoint.role == "send", endpoint
    sender: Sender = _lookup(SENDERS, endpoint.transport)(endpoint)
    return sender


def open_receiver(endpoint: Endpoint) -> Receiver:
    assert endpoint.role == "receive", endpoint
    receiver: Receiver = _lookup(RECEIVERS, endpoint.transport)(endpoint)
    return receiver


def _lookup(registry: dict[str, str], transport: str) -> Any:
    if transport not in registry:
        raise ConfigError(f"transport must be one of {', '.join(registry)}, got {transport!r}")
    module, _, name = registry[transport].partition(":")
    return getattr(import_module(module, __package__), name)


def received(encoded: bytes, fds: list[int]) -> list[Endpoint]:
    """Endpoints that came over a control connection (a MessagePack list of them), with their
    descriptors, in order: under the numbers that these have in this process."""
    endpoints = []
    for endpoint in msgspec.msgpack.decode(encoded, type=list[Endpoint]):
        count = len(endpoint.fds)
        endpoints.append(msgspec.structs.replace(endpoint, fds=fds[:count]))
        fds = fds[count:]
    return endpoints


class ChannelOwner(BoardOwner):
    """A channel between processes, from its owner's side. Make it with `create`."""

    def __init__(
        self,
        transport: str,
        name: str,
        writer: str,
        readers: Sequence[str],
        messages: str,
        segment: Segment,
        board: Board,
        address: str,
    ) -> None:
        super().__init__(name, writer, readers, board)
        self.messages = messages
        self.transport = transport
        self.address = address
        self._segment = segment

    @classmethod
    def create(
        cls,
        transport: str,
        name: str,
        writer: str,
        readers: Sequence[str],
        messages: str,
        ring_bytes: int,
        folder: str,
        start: int = 0,
    ) -> ChannelOwner:
        """Make a channel from the instance `writer` to the instances `readers`.

        ring_bytes: what may be sent and not yet committed. folder: where sockets go, if any are
        needed; nobody else may look into it. start: the position of the first record. Raises
        ConfigError.
        """
        _lookup(SENDERS, transport)
        address = _socket_path(folder) if transport == "zmq" else ""
        capacity = -(-ring_bytes // 64) * 64
        board_size = board_bytes(len(readers))
        segment = Segment.create(board_size + (capacity if transport == "ring" else 0))
        try:
            board = Board.format(segment.memory, capacity, len(readers), start)
            try:
                return cls(transport, name, writer, readers, messages, segment, board, address)
            except BaseException:
                board.close()
                raise
        except BaseException:
            segment.close()
            raise

    @property
    def fds(self) -> list[int]:
        """Every descriptor that the endpoints of this channel name."""
        return [self._segment.fd, *(bell.fileno() for bell in self.bells)]

    def endpoint(self, instance: str) -> Endpoint:
        """The end of `instance`: the writer's, or that of one of the readers."""
        segment, writer_bell, *reader_bells = self.fds
        sends = instance == self.writer
        reader = 0 if sends else self.readers.index(instance)
        return Endpoint(
            edge=self.name,
            messages=self.messages,
            role="send" if sends else "receive",
            peers=self.readers if sends else (self.writer,),
            transport=self.transport,
            reader=reader,
            num_readers=len(self.readers),
            fds=[segment, writer_bell, *reader_bells]
            if sends
            else [segment, reader_bells[reader], writer_bell],
            address=self.address,
        )

    def close(self) -> None:
        super().close()
        self._segment.close()
        for path in glob.glob(f"{glob.escape(self.address)}.*") if self.address else ():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _socket_path(folder: str) -> str:
    """Where the readers' sockets go: reader i, reset n times, at this path and ".i.n"."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_mode & 0o077:
        raise ConfigError(f"others than its owner may enter {folder}; make it mode 0700")
    path = os.path.join(folder, secrets.token_hex(6))
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(f"a socket's path must be at most {_LONGEST_PATH} bytes long: {path}")
    return path
