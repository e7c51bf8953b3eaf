"""Both gateways of one rank, with the channels of either host: what crosses, and what a death does.

They run on one event loop; the test plays the supervisors and everybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec
import pytest
from ports import free_ports

from ringcast.actors import hosts, topology
from ringcast.actors.boot import Boot
from ringcast.actors.control import Control
from ringcast.actors.links import Links
from ringcast.actors.master_gateway import MasterGateway
from ringcast.actors.node_gateway import NodeGateway
from ringcast.mq import messages, supervision
from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.endpoint import ChannelOwner
from ringcast.mq.errors import ConfigError, JoinAgainError, NodeLostError
from ringcast.mq.link_core import WINDOW

ENGINE = EngineConfig(device="fake", data_parallel_size=2)
SPEC = ModelSpec(
    name="m",
    path="/nowhere",
    tokenizer_path="",
    architecture="A",
    vocab_size=9,
    max_model_len=7,
    eos_token_ids=[],
    hf_config={},
)
RING_BYTES = 65536
SOON = 10.0


class Side:
    """One host: the gateway, its supervisor's end of the control connection, and `others`, who
    have the other ends of its channels."""

    def __init__(
        self,
        kind,
        name: str,
        others: list[str],
        headless: bool,
        port: int,
        session: str,
        engine: EngineConfig = ENGINE,
    ):
        # Rank 1 is the node's, so that its port is `port`.
        config = ClusterConfig(
            headless=headless, data_parallel_size_local=1, data_parallel_rpc_port=port - 1
        )
        place = ClusterPlace(config=config, first=int(headless), num=1, session=session)
        counts = topology.counts_of(engine)
        counts = hosts.counts_on(counts, place)
        self.owners = [
            ChannelOwner.create(
                "ring", c.name, c.writer, c.readers, c.messages, RING_BYTES, folder=""
            )
            for c in hosts.part_of(counts, place).channels
            if name in (c.writer, *c.readers)
        ]
        ours, theirs = Control.pair()
        self.changed = asyncio.Event()
        self.control = Control(ours, supervision.ActorToSupervisor)
        boot = Boot(
            actor=name,
            target="",
            parent_pid=0,
            control_fd=-1,
            engine=engine,
            spec=SPEC,
            endpoints=[owner.endpoint(name) for owner in self.owners],
            counts=counts,
            cluster=place,
        )
        self.actor = kind(boot, Control(theirs, supervision.SupervisorToActor))
        self._theirs = theirs
        take_in = self.actor.on_record

        def on_record(record):
            take_in(record)
            self.changed.set()

        self.actor.on_record = on_record
        self.got: list[tuple[str, messages.Message]] = []
        self.said: list[messages.Message] = []
        self.others = {}
        for other in others:
            ends = [o.endpoint(other) for o in self.owners if other in (o.writer, *o.readers)]
            self.others[other] = Links(ends, self._on_batch)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        self.task = asyncio.create_task(self.actor._main())

    def held_bytes(self) -> int:
        """What has come over the link and waits for somebody to take it."""
        held = self.actor.links._held.values()
        return sum(len(record.payload) for records in held for record in records)

    def _on_batch(self, batch):
        self.got += batch
        self.changed.set()

    def _read(self):
        with contextlib.suppress(EOFError):
            while (packet := self.control.receive()) is not None:
                self.said.append(packet[0])
                self.changed.set()

    def listen(self):
        for links in self.others.values():
            links.start()

    def send(self, source: str, message: messages.Message):
        self.others[source].send("scheduler.1", message)

    async def until(self, condition):
        async with asyncio.timeout(SOON):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def until_said(self, kind):
        await self.until(lambda: any(isinstance(message, kind) for message in self.said))

    async def close(self):
        self.actor.stop()
        await asyncio.gather(self.task, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self.control.fileno())
        self.control.close()
        self._theirs.close()
        for links in self.others.values():
            links.close()
        for owner in self.owners:
            owner.close()


@contextlib.asynccontextmanager
async def pair(node_session: str = "s", engine: EngineConfig = ENGINE):
    port = free_ports()
    counts = topology.counts_of(engine)
    kinds = ("tokenizer", "detokenizer", "coordinator")
    peers = [f"{kind}.{i}" for kind in kinds for i in range(topology.count_of(kind, counts))]
    master = Side(MasterGateway, "scheduler.1", peers, False, port, "s", engine)
    node = Side(NodeGateway, "gateway.1", ["scheduler.1"], True, port, node_session, engine)
    try:
        yield master, node
    finally:
        await node.close()
        await master.close()


async def joined(master: Side, node: Side):
    master.listen()
    node.listen()
    await node.until_said(supervision.ActorReady)
    assert not any(isinstance(said, supervision.ActorReady) for said in master.said)
    node.actor.on_control(supervision.TopologyReady())
    await master.until_said(supervision.ActorReady)
    await node.until_said(supervision.Notice)


def run(test):
    def wrapped():
        asyncio.run(test())

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


def ping(number: int) -> messages.Ping:
    return messages.Ping(0, number, 1)


@run
async def test_records_cross_on_their_edges_in_order():
    async with pair() as (master, node):
        await joined(master, node)
        for number in range(500):
            master.send("tokenizer.0", ping(number))
            master.send("detokenizer.0", messages.StopStream(number, 1))
        await node.until(lambda: len(node.got) == 1000)
        by_source = {s: [m for source, m in node.got if source == s] for s, _ in node.got}
        assert by_source["tokenizer.0"] == [ping(n) for n in range(500)]
        assert by_source["detokenizer.0"] == [messages.StopStream(n, 1) for n in range(500)]
        scheduler = node.others["scheduler.1"]
        scheduler.send("detokenizer.0", ping(7))
        scheduler.send("coordinator.0", messages.Load(1, 2, 0.5, []))
        await master.until(lambda: len(master.got) == 2)
        assert sorted(master.got, key=str) == sorted(
            [("scheduler.1", ping(7)), ("scheduler.1", messages.Load(1, 2, 0.5, []))], key=str
        )


@run
async def test_a_scheduler_that_takes_nothing_stops_its_sender_in_bounded_memory():
    async with pair() as (master, node):
        master.listen()
        node.actor.on_control(supervision.TopologyReady())
        await master.until_said(supervision.ActorReady)
        record = messages.ResetPrefixCache(0, "x" * 50_000, 1)
        total = 400  # 20 MB, of which a window of 4 MiB and three rings are on their way
        for _ in range(total):
            master.send("tokenizer.0", record)
        await node.until(lambda: node.held_bytes() > WINDOW - 4 * RING_BYTES)
        assert node.held_bytes() <= WINDOW
        assert master.others["tokenizer.0"].num_waiting() > total / 2
        node.listen()
        await node.until(lambda: len(node.got) == total)
        assert not master.others["tokenizer.0"].num_waiting()


@run
async def test_a_peers_death_is_heard_after_all_it_had_sent_and_forgotten_after_all_it_was_told():
    async with pair() as (master, node):
        await joined(master, node)
        for number in range(100):
            master.send("detokenizer.0", messages.StopStream(number, 1))
        for owner in master.owners:
            if "detokenizer.0" in (owner.writer, *owner.readers):
                owner.mark_dead("detokenizer.0")
        lost = supervision.PeersLost(5, "detokenizer.0", "died", "", ["detokenizer.0"])
        master.actor.on_control(lost)
        await node.until(lambda: len(node.got) == 101)
        assert node.got[-1] == ("detokenizer.0", messages.PeersGone(5, ["detokenizer.0"]))
        assert supervision.PeersForgotten(5) not in master.said
        scheduler = node.others["scheduler.1"]
        scheduler.send("detokenizer.0", ping(1))  # for the dead one
        scheduler.send("detokenizer.0", messages.PeersGoneHeard(5))
        await master.until_said(supervision.PeersForgotten)
        for owner in master.owners:
            if "detokenizer.0" in owner.readers:
                owner.reset("detokenizer.0")
            if "detokenizer.0" in (owner.writer, *owner.readers):
                owner.mark_alive("detokenizer.0")
        master.actor.on_control(supervision.PeersBack(["detokenizer.0"]))
        master.others["detokenizer.0"].regain(["scheduler.1"])
        scheduler.send("detokenizer.0", ping(2))
        await master.until(lambda: ("scheduler.1", ping(2)) in master.got)
        assert ("scheduler.1", ping(1)) not in master.got
        assert not any(isinstance(m, messages.PeersGoneHeard) for _, m in master.got)


@run
async def test_a_client_that_is_lost_and_a_replica_that_is_nothing_to_it():
    async with pair() as (master, node):
        await joined(master, node)
        master.actor.on_control(supervision.PeersLost(1, "client.0", "died", "", ["client.0"]))
        await node.until(lambda: node.got)
        assert node.got == [("tokenizer.0", messages.PeersGone(1, ["client.0"]))]
        assert not any(isinstance(m, supervision.PeersForgotten) for m in master.said)
        others = ["worker.0", "scheduler.0"]
        master.actor.on_control(supervision.PeersLost(2, "worker.0", "died", "", others))
        await master.until(lambda: supervision.PeersForgotten(2) in master.said)


@run
async def test_a_death_is_forgotten_when_every_detokenizers_way_has_brought_the_answer():
    several = msgspec.structs.replace(ENGINE, tokenizer_count=2, detokenizer_count=2)
    async with pair(engine=several) as (master, node):
        await joined(master, node)
        master.send("tokenizer.1", ping(1))
        lost = supervision.PeersLost(5, "tokenizer.1", "died", "", ["tokenizer.1"])
        for owner in master.owners:
            if "tokenizer.1" in (owner.writer, *owner.readers):
                owner.mark_dead("tokenizer.1")
        master.actor.on_control(lost)
        await node.until(lambda: len(node.got) == 2)
        gone_too = messages.PeersGone(5, ["tokenizer.1"])
        assert node.got == [("tokenizer.1", ping(1)), ("tokenizer.1", gone_too)]
        scheduler = node.others["scheduler.1"]
        scheduler.send("detokenizer.1", messages.PeersGoneHeard(5))
        scheduler.send("detokenizer.0", ping(2))
        await master.until(lambda: ("scheduler.1", ping(2)) in master.got)
        assert not any(isinstance(m, supervision.PeersForgotten) for m in master.said)
        scheduler.send("detokenizer.0", messages.PeersGoneHeard(5))
        await master.until_said(supervision.PeersForgotten)


@run
async def test_the_schedulers_numbers_are_published_on_the_master():
    async with pair() as (master, node):
        node.actor.on_control(supervision.Statistics({"running": 1.0}))
        await joined(master, node)
        node.actor.on_control(supervision.Statistics({"running": 2.0}))
        node.others["scheduler.1"].send("detokenizer.0", ping(1))  # comes after them
        await master.until(lambda: master.got)
        assert master.actor.statistics() == {"running": 2.0, "link_bytes": 0}


@run
async def test_a_node_that_drains_says_so_and_both_end():
    async with pair() as (master, node):
        await joined(master, node)
        node.actor.on_control(supervision.BeginDrain(1.0))
        await node.until_said(supervision.Drained)
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(asyncio.shield(master.task), SOON)
        (error,) = caught.value.exceptions
        assert isinstance(error, NodeLostError)
        assert "has left: it is being shut down; rank 1 waits for a node" in str(error)
        node.actor.stop()


@run
async def test_a_node_of_another_session_is_told_to_join_again():
    async with pair("before") as (master, node):
        await node.until_said(supervision.ActorReady)
        node.actor.on_control(supervision.TopologyReady())
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(asyncio.shield(node.task), SOON)
        assert isinstance(caught.value.exceptions[0], JoinAgainError)
        master.task.cancel()


@run
async def test_replicas_that_step_together_speak_of_waves_and_join_again_when_they_are_lost():
    together = msgspec.structs.replace(ENGINE, enable_expert_parallel=True)
    async with pair(engine=together) as (master, node):
        await joined(master, node)
        master.send("coordinator.0", messages.StartWave(1))
        await node.until(lambda: ("coordinator.0", messages.StartWave(1)) in node.got)
        node.others["scheduler.1"].send("coordinator.0", messages.WantWave(2))
        await master.until(lambda: ("scheduler.1", messages.WantWave(2)) in master.got)
        lost = supervision.PeersLost(3, "coordinator.0", "died", "", ["coordinator.0"])
        master.actor.on_control(lost)
        gone = messages.PeersGone(3, ["coordinator.0"])
        await node.until(lambda: ("coordinator.0", gone) in node.got)
        node.others["scheduler.1"].send("detokenizer.0", messages.PeersGoneHeard(3))
        await master.until_said(supervision.PeersForgotten)
        master.task.cancel()
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(asyncio.shield(node.task), SOON)
        assert isinstance(caught.value.exceptions[0], JoinAgainError)


@run
async def test_a_taken_port_is_the_masters_end_with_its_reason():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        master = Side(MasterGateway, "scheduler.1", [], False, port, "s")
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}: Address already in use"):
            await master.task
        await master.close()
