"""The two ends of a link between hosts, over one ZeroMQ connection with CURVE.

The master's end listens (`LinkListener`), the node's end connects (`LinkDialer`). What they say
before a link is made is handshake.py; what travels on it, and when it is given up, is link_core.py.
Here are the sockets, on an asyncio event loop: nothing blocks, and everything that happens is told
to an owner (`LinkOwner`).

1. A link lives and dies with one TCP connection. The monitor of either socket tells of its end at
   once, if the network does; a dialer never goes on with the next connection, and the listener's
   socket gives it another identity.
2. ZeroMQ's own limits are off: what is on its way is bounded by the link's window.
3. With keys, who connects must have the node's, or CURVE doesn't let it in (`_Doorman`).
4. ZeroMQ's descriptor is readable once per change, and sending takes the change away. So whoever
   has sent looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from . import codec
from .cluster_keys import ClusterKeys
from .errors import ChannelError, ChannelTimeout, ConfigError, CorruptRecordError, PeerDeadError
from .handshake import HandshakeMessage, Hello, Refused, Welcome
from .link_core import TICK_SECONDS, WINDOW, LinkCore, Record
from .message import Message

HELLO_SECONDS = 0.5  # between two Hellos, until one is answered
_LINGER_MS = 200
_RECONNECT_MS = 100
_HANDSHAKE = 0  # the kind of a frame that carries a HandshakeMessage; those of a link are above it
_PROBES = (0.0, 0.01, 0.1)  # seconds after a disconnection until ZeroMQ knows whose it was
_REFUSED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # another secret, or none
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # a key that the doorman doesn't know
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # it found so itself, and left first
)

Socket = zmq.Socket[bytes]


class LinkOwner(Protocol):
    def on_record(self, record: Record) -> None:
        """A record has come. Say `handed_on` when it needs no memory any more."""

    def on_message(self, message: Message) -> None: ...

    def on_room(self) -> None:
        """The link is not full any more."""

    def on_link_lost(self, error: ChannelError) -> None:
        """The link is gone, and says nothing after this: ChannelTimeout if the other side is
        silent, PeerDeadError if it has closed the connection."""


class ListenerOwner(LinkOwner, Protocol):
    def on_hello(self, hello: Hello) -> Welcome | Refused:
        """Somebody with the right keys knocks. A Welcome to a Hello that attaches makes the
        link."""

    def on_attached(self, hello: Hello) -> None:
        """The link with whoever said this is made."""

    def on_stranger(self, address: str) -> None:
        """Somebody without them does."""


class _Doorman:
    """Says for one context which CURVE keys are let in (ZeroMQ's ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[Socket], allowed: bytes) -> None:
        self._allowed = z85.decode(allowed)
        self._socket: Socket = context.socket(zmq.REP)
        self._socket.bind("inproc://zeromq.zap.01")
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._answer)

    def _answer(self) -> None:
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            version, number, _, _, _, mechanism, *credentials = self._socket.recv_multipart()
            known = mechanism == b"CURVE" and credentials == [self._allowed]
            status = (b"200", b"OK", b"node") if known else (b"400", b"unknown key", b"")
            self._socket.send_multipart([version, number, *status, b""])

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close(linger=0)


class _LinkEnd:
    """What both ends have: a socket, its monitor, and the link while there is one."""

    def __init__(self, kind: int, owner: LinkOwner, address: str, window: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._window = window
        self._core: LinkCore | None = None
        self._closed = False
        self._looking = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket: Socket = self._context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.set(option, 0)
        self._socket.set(zmq.IPV6, int(":" in address))
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._monitor: Socket = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED_EVENTS
        )

    @property
    def attached(self) -> bool:
        return self._core is not None

    @property
    def full(self) -> bool:
        """Whether to put nothing more in for now. There is no link without an end."""
        return self._core is None or self._core.full

    @property
    def under_way(self) -> int:
        """Bytes of records that the other side has not handed on yet."""
        return 0 if self._core is None else self._core.under_way

    def record(self, edge: str, payload: bytes) -> None:
        """Put in a record of `edge`. What is put in while there is no link is dropped."""
        if self._core is not None:
            self._transmit_all(self._core.record(edge, payload))

    def message(self, message: Message) -> None:
        if self._core is not None:
            self._transmit_all(self._core.message(message))

    def handed_on(self, record: Record) -> None:
        if self._core is not None:
            self._transmit_all(self._core.handed_on(record))

    def close(self) -> None:
        """What has left the link's window still goes out, if that takes a moment only."""
        if self._closed:
            return
        self._closed = True
        self._core = None
        for timer in self._timers:
            timer.cancel()
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._close_context()

    def _close_context(self) -> None:
        self._context.term()

    def _start(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._look)
        self._loop.add_reader(self._monitor.fileno(), self._look_at_monitor)
        self._look_soon()
        self._loop.call_soon(self._look_at_monitor)  # ZeroMQ rings only for who has looked once

    def _after(self, seconds: float, call: Any, *args: Any) -> None:
        def run() -> None:
            self._timers.discard(timer)
            call(*args)

        timer = self._loop.call_later(seconds, run)
        self._timers.add(timer)

    # Frames

    def _send(self, frame: bytes) -> None:
        raise NotImplementedError

    def _take(self, parts: list[bytes]) -> None:
        raise NotImplementedError

    def _transmit_all(self, frames: Iterable[bytes]) -> None:
        try:
            for frame in frames:
                self._send(frame)
        except zmq.ZMQError:  # the listener's: there is no such connection any more
            if self._core is not None:
                self._lose(PeerDeadError(f"{self._core.other} has closed the connection"))
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._looking and not self._closed:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        while not self._closed:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)

    def _hear(self, frame: bytes) -> None:
        """A frame of the link has come."""
        core = self._core
        if core is None:
            return
        was_full = core.full
        try:
            heard, frames = core.heard(frame)
        except CorruptRecordError as error:
            self._lose(error)
            return
        self._transmit_all(frames)
        match heard:
            case Record():
                self._owner.on_record(heard)
            case Message():
                self._owner.on_message(heard)
            case None if was_full and not self.full:
                self._owner.on_room()

    # The link's life

    def _attach(self, epoch: int, other: str) -> None:
        self._core = LinkCore(epoch, other, self._window)
        self._after(TICK_SECONDS, self._tick, self._core)
        self._owner.on_room()

    def _tick(self, core: LinkCore) -> None:
        if core is not self._core:
            return
        self._look()  # silence counts only after everything was heard
        if core is not self._core:
            return
        try:
            frames = core.tick()
        except ChannelTimeout as error:
            self._lose(error)
            return
        self._transmit_all(frames)
        self._after(TICK_SECONDS, self._tick, core)

    def _lose(self, error: ChannelError) -> None:
        if self._core is not None:
            self._core = None
            self._owner.on_link_lost(error)

    def _look_at_monitor(self) -> None:
        while not self._closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._on_event(event["event"], event["endpoint"].decode())

    def _on_event(self, event: int, address: str) -> None:
        raise NotImplementedError


class LinkListener(_LinkEnd):
    """The master's end, bound at `address`:`port`; 0 takes a free one, which is then `port`.

    Raises ConfigError if it can't be bound, which names the `options` that say where.
    """

    def __init__(
        self,
        owner: ListenerOwner,
        address: str,
        port: int,
        keys: ClusterKeys | None,
        window: int = WINDOW,
        options: str = "--data-parallel-address and --data-parallel-rpc-port",
    ) -> None:
        super().__init__(zmq.ROUTER, owner, address, window)
        self._listener_owner = owner
        self._identity = b""  # of whom the link is with
        self._welcome: Welcome | None = None
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._doorman = None if keys is None else _Doorman(self._context, keys.node.public)
        if keys is not None:
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_SECRETKEY, keys.master.secret)
        host = f"[{address}]" if ":" in address else address
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen for nodes at {address} port {port}: {error.strerror}; see {options}"
            ) from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rstrip("\0").rpartition(":")[2])
        self._start()

    def _send(self, frame: bytes) -> None:
        self._socket.send_multipart([self._identity, frame], zmq.NOBLOCK)

    def _take(self, parts: list[bytes]) -> None:
        if len(parts) != 2 or not parts[1]:
            return
        identity, frame = parts
        if frame[0] != _HANDSHAKE:
            if identity == self._identity:
                self._hear(frame)
            return
        with contextlib.suppress(CorruptRecordError):
            hello = _decode(frame[1:])
            if isinstance(hello, Hello):
                self._answer(identity, hello)

    def _answer(self, identity: bytes, hello: Hello) -> None:
        welcome = self._welcome
        if self.attached and identity == self._identity:
            answer: Welcome | Refused | None = welcome  # it asked again before it had the answer
            if welcome is None or hello.nonce != welcome.nonce:
                return
        else:
            answer = self._listener_owner.on_hello(hello)
        assert answer is not None
        with contextlib.suppress(zmq.ZMQError):  # it has gone meanwhile
            frame = bytes((_HANDSHAKE,)) + codec.encode(answer)
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
            if hello.attach and isinstance(answer, Welcome) and not self.attached:
                self._identity, self._welcome = identity, answer
                self._attach(answer.epoch, f"node {hello.node}")
                self._listener_owner.on_attached(hello)
        self._look_soon()

    def _on_event(self, event: int, address: str) -> None:
        if event & _REFUSED_EVENTS:
            self._listener_owner.on_stranger(address)
        elif event == zmq.EVENT_DISCONNECTED:
            for seconds in _PROBES:
                self._after(seconds, self._probe, self._core)

    def _probe(self, core: LinkCore | None) -> None:
        """Ask ZeroMQ whether it was the link's connection that has ended."""
        if core is not None and core is self._core:
            self._transmit_all([core.probe()])

    def _close_context(self) -> None:
        if self._doorman is not None:
            self._doorman.close()
        super()._close_context()


class LinkDialer(_LinkEnd):
    """The node's end. It says Hello until it is answered: see `join`."""

    def __init__(
        self,
        owner: LinkOwner,
        address: str,
        port: int,
        keys: ClusterKeys | None,
        window: int = WINDOW,
    ) -> None:
        super().__init__(zmq.DEALER, owner, address, window)
        if keys is not None:
            self._socket.set(zmq.CURVE_SERVERKEY, keys.master.public)
            self._socket.set(zmq.CURVE_PUBLICKEY, keys.node.public)
            self._socket.set(zmq.CURVE_SECRETKEY, keys.node.secret)
        host = f"[{address}]" if ":" in address else address
        self.target = f"{host}:{port}"
        self._hello: Hello | None = None
        self._answered: asyncio.Future[Welcome | Refused] = self._loop.create_future()
        self._connected = False
        self._socket.connect(f"tcp://{self.target}")
        self._start()

    async def join(self, hello: Hello, timeout: float) -> Welcome | Refused:
        """Say Hello until it is answered. A Welcome to one that attaches makes the link.

        Raises TimeoutError when there is no answer for so many seconds.
        """
        self._hello = hello
        self._answered = self._loop.create_future()
        self._say_hello(hello)
        async with asyncio.timeout(timeout):
            return await self._answered

    def _say_hello(self, hello: Hello) -> None:
        if hello is not self._hello or self._answered.done():
            return
        if self._connected:
            self._transmit_all([bytes((_HANDSHAKE,)) + codec.encode(hello)])
        self._after(HELLO_SECONDS, self._say_hello, hello)

    def _send(self, frame: bytes) -> None:
        self._socket.send(frame, zmq.NOBLOCK)

    def _take(self, parts: list[bytes]) -> None:
        (frame, *more) = parts
        if more or not frame:
            return
        if frame[0] != _HANDSHAKE:
            self._hear(frame)
            return
        with contextlib.suppress(CorruptRecordError):
            answer, hello = _decode(frame[1:]), self._hello
            if hello is None or self._answered.done() or isinstance(answer, Hello):
                return
            if answer.nonce == hello.nonce:
                if hello.attach and isinstance(answer, Welcome):
                    self._attach(answer.epoch, f"the master at {self.target}")
                self._answered.set_result(answer)

    def _on_event(self, event: int, address: str) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            if self._hello is not None and not self._answered.done():
                self._transmit_all([bytes((_HANDSHAKE,)) + codec.encode(self._hello)])
        elif event == zmq.EVENT_DISCONNECTED:
            self._connected = False
            self._look()  # what had come before
            if self._core is not None:
                self._lose(PeerDeadError(f"{self._core.other} has closed the connection"))


_decode: codec.Decoder[Any] = codec.Decoder(HandshakeMessage)
