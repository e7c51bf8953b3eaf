"""Channels of every transport, made the same way, with all their ends closed after the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from ringcast.mq import zmq_channel as zmq_channel_module
from ringcast.mq.channel import Receiver, Sender
from ringcast.mq.endpoint import ChannelOwner, open_receiver, open_sender
from ringcast.mq.inproc import InprocChannel
from ringcast.mq.owner import BoardOwner


class Channel(Protocol):
    """What the fixture `channel` makes."""

    owner: BoardOwner

    def sender(self) -> Sender: ...

    def receiver(self, reader: int = 0) -> Receiver: ...


class InprocUnderTest:
    def __init__(self, stack: contextlib.ExitStack, num_readers: int, capacity: int) -> None:
        self._stack = stack
        readers = [f"reader.{i}" for i in range(num_readers)]
        self.owner = InprocChannel("writer.0>readers", "writer.0", readers, capacity)
        stack.callback(self.owner.close)

    def sender(self) -> Sender:
        return self._stack.enter_context(contextlib.closing(self.owner.sender()))

    def receiver(self, reader: int = 0) -> Receiver:
        return self._stack.enter_context(contextlib.closing(self.owner.receiver(reader)))


class OwnedUnderTest:
    def __init__(
        self,
        stack: contextlib.ExitStack,
        transport: str,
        num_readers: int,
        capacity: int,
        folder: str,
        start: int = 0,
    ) -> None:
        self._stack = stack
        readers = [f"reader.{i}" for i in range(num_readers)]
        self.owner = ChannelOwner.create(
            transport, "writer.0>readers", "writer.0", readers, "Any", capacity, folder, start
        )
        stack.callback(self.owner.close)

    def sender(self) -> Sender:
        sender = open_sender(self.owner.endpoint("writer.0"))
        return self._stack.enter_context(contextlib.closing(sender))

    def receiver(self, reader: int = 0) -> Receiver:
        receiver = open_receiver(self.owner.endpoint(f"reader.{reader}"))
        return self._stack.enter_context(contextlib.closing(receiver))


@pytest.fixture
def socket_folder(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return str(tmp_path)


@pytest.fixture(params=["ring", "zmq", "inproc"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def channel(
    transport: str, socket_folder: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Channel]]:
    monkeypatch.setattr(zmq_channel_module, "LINGER_MS", 20)  # many senders here have no reader
    with contextlib.ExitStack() as stack:

        def make(num_readers: int = 1, capacity: int = 4096) -> Channel:
            if transport == "inproc":
                return InprocUnderTest(stack, num_readers, capacity)
            return OwnedUnderTest(stack, transport, num_readers, capacity, socket_folder)

        yield make


@pytest.fixture
def ring() -> Iterator[Callable[..., OwnedUnderTest]]:
    with contextlib.ExitStack() as stack:

        def make(num_readers: int = 1, capacity: int = 4096, start: int = 0) -> OwnedUnderTest:
            return OwnedUnderTest(stack, "ring", num_readers, capacity, "", start)

        yield make


@pytest.fixture
def zmq_channel(socket_folder: str) -> Iterator[Callable[..., OwnedUnderTest]]:
    with contextlib.ExitStack() as stack:

        def make(num_readers: int = 1, capacity: int = 4096) -> OwnedUnderTest:
            return OwnedUnderTest(stack, "zmq", num_readers, capacity, socket_folder)

        yield make
