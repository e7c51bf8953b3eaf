"""Both gateways of an engine on two hosts, on one event loop: what crosses, and what a cut does.

The test plays the supervisors, the scheduler, and the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os

import numpy as np
import pytest
from ports import free_ports

from ringcast.actors import hosts, topology
from ringcast.actors.boot import Boot
from ringcast.actors.control import Control
from ringcast.actors.ranks_gateway import RanksMaster, RanksNode
from ringcast.executor import mirror
from ringcast.executor.mirror import Exchange, lay_out, regions
from ringcast.mq import supervision
from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.endpoint import ChannelOwner, open_receiver, open_sender
from ringcast.mq.errors import ConfigError, JoinAgainError, NodeLostError

ENGINE = EngineConfig(device="fake", tensor_parallel_size=2)
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
PARTS, SIZE = lay_out([Exchange((0, 1))])
SOON = 10.0


class Host:
    """A gateway, and the ends of its channels that others have."""

    def __init__(self, kind, node: int, port: int, session: str = "s", engine=ENGINE) -> None:
        config = ClusterConfig(nnodes=2, node_rank=node, headless=node > 0, master_port=port)
        place = ClusterPlace(config=config, first=0, num=1, session=session)
        counts = hosts.counts_on(topology.counts_of(engine), place)
        self.memory_fd = os.memfd_create("ranks")
        self._ends = []
        self.owners = [
            ChannelOwner.create("ring", c.name, c.writer, c.readers, c.messages, 65536, folder="")
            for c in hosts.part_of(counts, place).channels
            if "gateway.1" in (c.writer, *c.readers)
        ]
        ours, theirs = Control.pair()
        self.control, self._theirs = Control(ours, supervision.ActorToSupervisor), theirs
        boot = Boot(
            actor="gateway.1",
            target="",
            parent_pid=0,
            control_fd=-1,
            engine=engine,
            spec=SPEC,
            endpoints=[owner.endpoint("gateway.1") for owner in self.owners],
            counts=counts,
            group_fd=self.memory_fd,
            cluster=place,
        )
        self.actor = kind(boot, Control(theirs, supervision.SupervisorToActor))
        self.task = asyncio.create_task(self.actor._main())

    def end(self, name: str, actor: str):
        owner = next(owner for owner in self.owners if owner.name == name)
        opens = open_sender if owner.writer == actor else open_receiver
        self._ends.append(opens(owner.endpoint(actor)))
        return self._ends[-1]

    def load(self) -> np.ndarray:
        """What a worker does first: the memory."""
        os.ftruncate(self.memory_fd, SIZE)
        memory = np.frombuffer(mmap.mmap(self.memory_fd, SIZE), np.int64)
        mirror.describe(memory, PARTS)
        return memory

    async def close(self) -> BaseException | None:
        """What the gateway has ended by."""
        self.actor.stop()
        (ended,) = await asyncio.gather(self.task, return_exceptions=True)
        for end in self._ends:
            end.close()
        self.control.close()
        self._theirs.close()
        for owner in self.owners:
            owner.close()
        os.close(self.memory_fd)
        return ended.exceptions[0] if isinstance(ended, BaseExceptionGroup) else ended


async def until(condition):
    async with asyncio.timeout(SOON):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


def test_plans_answers_and_what_ranks_say_cross_until_the_node_goes():
    async def run():
        port = free_ports()
        master, node = Host(RanksMaster, 0, port), Host(RanksNode, 1, port)
        memories = [host.load() for host in (master, node)]
        words = [regions(PARTS)[place].word // 8 for place in (1, 3)]  # the ranks' threads
        await until(lambda: all(memory[mirror._OPEN] for memory in memories))
        for memory, word in zip(memories, words, strict=True):
            memory[word] = 7
        await until(lambda: all((memory[words] == 7).all() for memory in memories))
        scheduler = master.end("scheduler.0>workers", "scheduler.0")
        worker, plans = (node.end("scheduler.0>workers", "worker.1"), [])
        scheduler.send(b"plan one", SOON)
        scheduler.send(b"plan two", SOON)
        await until(lambda: plans.append(worker.try_receive()) or plans[-1] == b"plan two")
        assert [plan for plan in plans if plan] == [b"plan one", b"plan two"]
        answers = master.end("worker.1>scheduler.0", "scheduler.0")
        node.end("worker.1>scheduler.0", "worker.1").send(b"ready", SOON)
        await until(lambda: answers.try_receive() == b"ready")
        ended = await node.close()
        assert ended is None
        await until(master.task.done)
        error = await master.close()
        assert isinstance(error, NodeLostError)
        assert str(error).endswith("has closed the connection; waiting for node 1")

    asyncio.run(run())


def test_the_node_joins_again_when_the_master_goes():
    async def run():
        port = free_ports()
        master, node = Host(RanksMaster, 0, port), Host(RanksNode, 1, port)
        await until(lambda: master.actor._node and node.actor._link.attached)
        await master.close()
        await until(node.task.done)
        assert isinstance(await node.close(), JoinAgainError)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ({"session": "older"}, JoinAgainError),
        ({"engine": EngineConfig(device="fake", pipeline_parallel_size=2)}, ConfigError),
    ],
)
def test_who_does_not_fit(other, kind):
    async def run():
        port = free_ports()
        master, node = Host(RanksMaster, 0, port), Host(RanksNode, 1, port, **other)
        await until(node.task.done)
        assert isinstance(await node.close(), kind)
        assert not master.task.done()
        master.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await master.task
        await master.close()

    asyncio.run(run())
