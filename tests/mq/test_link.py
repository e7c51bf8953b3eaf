"""Both ends of a link over real sockets: order, back-pressure, strangers, ends and silence."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from ringcast.mq import link as module
from ringcast.mq.cluster_keys import keys_of
from ringcast.mq.errors import ChannelTimeout, ConfigError, CorruptRecordError, PeerDeadError
from ringcast.mq.handshake import Bye, Hello, PeersGone, Refused, Welcome
from ringcast.mq.link import LinkDialer, LinkListener

KEYS, OTHER_KEYS = keys_of(bytes(range(32))), keys_of(bytes(range(1, 33)))
SOON = 10.0


def hello(nonce: str = "n", attach: bool = True) -> Hello:
    return Hello(1, "1.0", nonce, "a", attach, "s", 1, 1, "m", "f", {})


class Owner:
    """Notes what it hears. Hands records on at once unless `hold` is set."""

    def __init__(self):
        self.end = None
        self.heard, self.held, self.lost, self.strangers = [], [], [], []
        self.hold = False
        self.refusal = None
        self.num_hellos = 0
        self.changed = asyncio.Event()

    def on_record(self, record):
        self.heard.append((record.edge, record.payload))
        self.held.append(record)
        if not self.hold:
            self.hand_on()
        self.changed.set()

    def hand_on(self):
        held, self.held = self.held, []
        for record in held:
            self.end.handed_on(record)

    def on_message(self, message):
        self.heard.append(message)
        self.changed.set()

    def on_room(self):
        self.changed.set()

    def on_link_lost(self, error):
        self.lost.append(error)
        self.changed.set()

    def on_hello(self, hello):
        self.num_hellos += 1
        if self.refusal is not None:
            return Refused(hello.nonce, self.refusal)
        return Welcome(hello.nonce, "s", 1.0, self.num_hellos if hello.attach else 0, 64, {})

    def on_stranger(self, address):
        self.strangers.append(address)
        self.changed.set()

    async def until(self, condition):
        async with asyncio.timeout(SOON):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def listening(keys=KEYS, **options):
    owner = Owner()
    owner.end = LinkListener(owner, "127.0.0.1", 0, keys, **options)
    try:
        yield owner
    finally:
        owner.end.close()
        owner.end.close()  # as often as one likes


@contextlib.asynccontextmanager
async def dialing(port, keys=KEYS, **options):
    owner = Owner()
    owner.end = LinkDialer(owner, "127.0.0.1", port, keys, **options)
    try:
        yield owner
    finally:
        owner.end.close()


def run(test):
    """Runs an async test on a fresh loop."""

    def wrapped(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    wrapped.__name__ = test.__name__
    wrapped.__doc__ = test.__doc__
    return wrapped


async def attached(master, node):
    welcome = await node.end.join(hello(), SOON)
    assert isinstance(welcome, Welcome)
    await master.until(lambda: master.end.attached)
    assert node.end.attached
    return welcome


@pytest.mark.parametrize("keys", [KEYS, None])
def test_thousands_of_records_arrive_in_order_both_ways(keys):
    @run
    async def go():
        async with listening(keys) as master, dialing(master.end.port, keys) as node:
            await attached(master, node)
            sent = [(f"peer.{n % 3}", n.to_bytes(4, "big") * (n % 50)) for n in range(5000)]
            for record in sent:
                master.end.record(*record)
                node.end.record(*record)
            master.end.message(PeersGone(1, ["tokenizer.0"]))
            await node.until(lambda: len(node.heard) == len(sent) + 1)
            await master.until(lambda: len(master.heard) == len(sent))
            assert node.heard == [*sent, PeersGone(1, ["tokenizer.0"])]
            assert master.heard == sent
            assert not master.lost
            assert not node.lost

    go()


@run
async def test_one_side_that_takes_nothing_stops_the_other_and_no_more_than_a_window_is_sent():
    window, size = 10_000, 1000
    async with (
        listening(window=window) as master,
        dialing(master.end.port, window=window) as node,
    ):
        await attached(master, node)
        node.hold = True
        num = 0
        while not master.end.full:
            master.end.record("a", bytes(size))
            num += 1
        assert num == window // (size + 2) + 1
        await node.until(lambda: len(node.heard) == num - 1)
        node.end.record("b", b"the other way is open")
        await master.until(lambda: master.heard)
        assert len(node.heard) == num - 1
        assert master.end.full
        node.hold = False
        node.hand_on()
        await node.until(lambda: len(node.heard) == num)
        await master.until(lambda: not master.end.full)


@pytest.mark.parametrize(("ours", "theirs"), [(KEYS, OTHER_KEYS), (KEYS, None), (None, KEYS)])
def test_who_has_another_secret_is_not_heard(ours, theirs):
    @run
    async def go():
        async with listening(ours) as master, dialing(master.end.port, theirs) as node:
            with pytest.raises(TimeoutError):
                await node.end.join(hello(), 0.5)
            assert not master.num_hellos
            if ours is not None:
                await master.until(lambda: master.strangers)

    go()


@run
async def test_a_client_key_that_is_not_the_nodes_is_not_let_in():
    """It knows the master's public key, and that isn't enough."""
    mixed = type(KEYS)(KEYS.master, OTHER_KEYS.node)
    async with listening() as master, dialing(master.end.port, mixed) as node:
        with pytest.raises(TimeoutError):
            await node.end.join(hello(), 0.5)
        assert not master.num_hellos
        await master.until(lambda: master.strangers)


@run
async def test_a_refusal_comes_with_its_reason_and_makes_no_link():
    async with listening() as master, dialing(master.end.port) as node:
        master.refusal = "another model"
        assert await node.end.join(hello(), SOON) == Refused("n", "another model")
        assert not master.end.attached
        master.refusal = None
        await attached(master, node)


@run
async def test_joining_without_attaching_makes_no_link():
    async with listening() as master, dialing(master.end.port) as node:
        assert isinstance(await node.end.join(hello(attach=False), SOON), Welcome)
        assert not master.end.attached
        assert not node.end.attached
        assert node.end.full
        node.end.record("a", b"dropped")


@run
async def test_the_master_may_come_later():
    async with listening() as first:
        port = first.end.port
    async with dialing(port) as node:
        joining = asyncio.create_task(node.end.join(hello(), SOON))
        await asyncio.sleep(0)
        owner = Owner()
        owner.end = LinkListener(owner, "127.0.0.1", port, KEYS)
        try:
            assert isinstance(await joining, Welcome)
        finally:
            owner.end.close()


@run
async def test_a_node_that_goes_is_missed_at_once_and_the_next_has_another_link():
    async with listening() as master:
        async with dialing(master.end.port) as node:
            first = await attached(master, node)
            node.end.message(Bye("enough"))
            await master.until(lambda: master.heard)
        await master.until(lambda: master.lost)
        assert master.heard == [Bye("enough")]
        assert isinstance(master.lost[0], PeerDeadError)
        assert "node a" in str(master.lost[0])
        async with dialing(master.end.port) as node:
            second = await attached(master, node)
            assert second.epoch != first.epoch
            node.end.record("a", b"again")
            await master.until(lambda: len(master.heard) == 2)


@run
async def test_a_master_that_goes_is_missed_at_once():
    async with listening() as master, dialing(master.end.port) as node:
        await attached(master, node)
        master.end.close()
        await node.until(lambda: node.lost)
        assert isinstance(node.lost[0], PeerDeadError)
        assert not node.end.attached


@run
async def test_a_taken_port_is_named():
    async with listening() as master:
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {master.end.port}.*rpc-port"):
            LinkListener(Owner(), "127.0.0.1", master.end.port, None)


class Cable:
    """Carries one connection, until it is cut: then it says nothing, and doesn't close either."""

    def __init__(self, port):
        self._port = port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self):
        self._open.clear()

    async def _accept(self, reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._tasks.append(asyncio.create_task(self._carry(source, target)))

    async def _carry(self, source, target):
        try:
            while data := await source.read(65536):
                await self._open.wait()
                target.write(data)
                await target.drain()
        finally:
            target.close()


def test_a_cut_cable_is_seen_by_both_sides(monkeypatch):
    monkeypatch.setattr(module, "TICK_SECONDS", 0.02)

    @run
    async def go():
        async with (
            listening() as master,
            Cable(master.end.port) as cable,
            dialing(cable.port) as node,
        ):
            await attached(master, node)
            node.end.record("a", b"before")
            await master.until(lambda: master.heard)
            assert not master.lost
            cable.cut()
            for side in (master, node):
                await side.until(lambda: side.lost)  # noqa: B023
                assert isinstance(side.lost[0], ChannelTimeout)
                assert "went silent" in str(side.lost[0])

    go()


@run
async def test_bytes_that_are_no_frame_end_the_link():
    async with listening() as master, dialing(master.end.port) as node:
        await attached(master, node)
        node.end._send(b"\x01nonsense")
        await master.until(lambda: master.lost)
        assert isinstance(master.lost[0], CorruptRecordError)
