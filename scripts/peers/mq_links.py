"""What scripts/bench mq measures: one writer, n readers, whole messages of bytes, by each peer.

A Link is made in one process; it forks, and then each end is opened in the process that uses it.
LINKS has one by the name of each peer. Nothing is imported before it is used: vLLM and Ringcast
needn't be installed in the same environment.
"""

from __future__ import annotations

import abc
import multiprocessing
from collections.abc import Callable
from typing import Any

PATIENCE = 30.0  # seconds
AT_ONCE = 64  # most messages that are taken before their space is given back

fork = multiprocessing.get_context("fork")


class Receiver:
    """receive: the next message, waiting for it. receive_some: one or more, as cheaply as the peer
    can. wait: for so many seconds for a message that doesn't come.
    """

    def __init__(self, receive: Callable[[], bytes], wait: Callable[[float], object]) -> None:
        self.receive = receive
        self.receive_some = lambda: [receive()]
        self.wait = wait


class Link(abc.ABC):
    """Opening a sender may wait for its readers to open theirs.

    folder: where sockets may be made. name: of this link among others in it. modules: what the ends
    need, imported once, before the forks.
    """

    modules: tuple[str, ...] = ()

    @abc.abstractmethod
    def __init__(self, name: str, num_readers: int, folder: str) -> None: ...

    @abc.abstractmethod
    def open_sender(self) -> Callable[[bytes], object]: ...

    @abc.abstractmethod
    def open_receiver(self, reader: int) -> Receiver: ...

    @abc.abstractmethod
    def close(self) -> None:
        """In the process that made it, when all ends are gone."""


class RingcastLink(Link):
    """A channel of ours, of the default size, waiting as it does by default."""

    modules = ("ringcast.mq.ring", "ringcast.mq.zmq_channel")
    transport = "ring"
    spin_seconds: float | None = None

    def __init__(self, name: str, num_readers: int, folder: str) -> None:
        from ringcast.mq.config import EngineConfig
        from ringcast.mq.endpoint import ChannelOwner

        self._owner = ChannelOwner.create(
            self.transport,
            name,
            "writer.0",
            [f"reader.{i}" for i in range(num_readers)],
            "Any",
            EngineConfig().ring_bytes,
            folder,
        )

    def open_sender(self) -> Callable[[bytes], object]:
        from ringcast.mq.endpoint import open_sender

        sender = open_sender(self._owner.endpoint("writer.0"))
        self._set_spin(sender)
        send = sender.send
        return lambda payload: send(payload, PATIENCE)

    def open_receiver(self, reader: int) -> Receiver:
        from ringcast.mq.endpoint import open_receiver
        from ringcast.mq.errors import ChannelTimeout

        receiver = open_receiver(self._owner.endpoint(f"reader.{reader}"))
        self._set_spin(receiver)

        def receive() -> bytes:
            payload = receiver.receive(PATIENCE)
            receiver.commit()
            return payload

        def receive_some() -> list[bytes]:
            payloads = [receiver.receive(PATIENCE)]
            while len(payloads) < AT_ONCE and (more := receiver.try_receive()) is not None:
                payloads.append(more)
            receiver.commit()
            return payloads

        def wait(seconds: float) -> None:
            try:
                receiver.receive(seconds)
            except ChannelTimeout:
                return
            raise AssertionError("a message came")

        end = Receiver(receive, wait)
        end.receive_some = receive_some
        return end

    def _set_spin(self, end: Any) -> None:
        if self.spin_seconds is not None:
            end.spin_seconds = self.spin_seconds

    def close(self) -> None:
        self._owner.close()


class SpinningLink(RingcastLink):
    spin_seconds = PATIENCE


class BellLink(RingcastLink):
    spin_seconds = 0.0


class OwnZmqLink(RingcastLink):
    transport = "zmq"


class PyzmqLink(Link):
    """PUSH and PULL over a Unix socket; XPUB and SUB for several readers, told to drop nothing."""

    modules = ("zmq",)

    def __init__(self, name: str, num_readers: int, folder: str) -> None:
        self._address = f"ipc://{folder}/{name}"
        self._num_readers = num_readers

    def open_sender(self) -> Callable[[bytes], object]:
        import zmq

        context = zmq.Context()
        if self._num_readers == 1:
            socket = context.socket(zmq.PUSH)
            socket.connect(self._address)
            return socket.send
        socket = context.socket(zmq.XPUB)
        socket.set(zmq.XPUB_VERBOSE, 1)
        socket.set(zmq.XPUB_NODROP, 1)
        socket.bind(self._address)
        for _ in range(self._num_readers):
            assert socket.recv() == b"\x01"  # a subscription
        return socket.send

    def open_receiver(self, reader: int) -> Receiver:
        import zmq

        context = zmq.Context()
        if self._num_readers == 1:
            socket = context.socket(zmq.PULL)
            socket.bind(self._address)
        else:
            socket = context.socket(zmq.SUB)
            socket.connect(self._address)
            socket.subscribe(b"")
        return Receiver(socket.recv, lambda seconds: _idle(socket.poll(int(1000 * seconds))))

    def close(self) -> None:
        pass


class PipeLink(Link):
    def __init__(self, name: str, num_readers: int, folder: str) -> None:
        assert num_readers == 1, num_readers
        self._reader, self._writer = fork.Pipe(duplex=False)

    def open_sender(self) -> Callable[[bytes], object]:
        return self._writer.send_bytes

    def open_receiver(self, reader: int) -> Receiver:
        return Receiver(self._reader.recv_bytes, lambda seconds: _idle(self._reader.poll(seconds)))

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class QueueLink(Link):
    """At most 1,024 messages, so that the writer is bounded as in every other peer."""

    def __init__(self, name: str, num_readers: int, folder: str) -> None:
        assert num_readers == 1, num_readers
        self._queue = fork.Queue(1024)

    def open_sender(self) -> Callable[[bytes], object]:
        return self._queue.put

    def open_receiver(self, reader: int) -> Receiver:
        import queue

        def wait(seconds: float) -> None:
            try:
                self._queue.get(timeout=seconds)
            except queue.Empty:
                return
            raise AssertionError("a message came")

        return Receiver(self._queue.get, wait)

    def close(self) -> None:
        self._queue.close()


class VllmLink(Link):
    """vLLM's MessageQueue with its own defaults: chunks of 24 MiB, ten of them."""

    modules = ("vllm.distributed.device_communicators.shm_broadcast",)

    def __init__(self, name: str, num_readers: int, folder: str) -> None:
        self._num_readers = num_readers
        self._handles = [fork.Pipe(duplex=False) for _ in range(num_readers)]

    def open_sender(self) -> Callable[[bytes], object]:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        queue = MessageQueue(n_reader=self._num_readers, n_local_reader=self._num_readers)
        for _, writer in self._handles:
            writer.send(queue.export_handle())
        queue.wait_until_ready()
        return queue.enqueue

    def open_receiver(self, reader: int) -> Receiver:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        queue = MessageQueue.create_from_handle(self._handles[reader][0].recv(), reader)
        queue.wait_until_ready()

        def wait(seconds: float) -> None:
            try:
                queue.dequeue(timeout=seconds)
            except TimeoutError:
                return
            raise AssertionError("a message came")

        return Receiver(queue.dequeue, wait)

    def close(self) -> None:
        for pair in self._handles:
            for end in pair:
                end.close()


def _idle(came: object) -> None:
    assert not came, "a message came"


LINKS: dict[str, type[Link]] = {
    "ring": RingcastLink,
    "spin": SpinningLink,
    "bell": BellLink,
    "zmq": OwnZmqLink,
    "pyzmq": PyzmqLink,
    "pipe": PipeLink,
    "queue": QueueLink,
    "vllm": VllmLink,
}
