"""The mirrors of three hosts on one event loop, each with a memory of its own: when they open, what
crosses, and how they end. The test plays the supervisors and the ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os

from ports import free_ports

from ringcast.actors.boot import Boot
from ringcast.actors.control import Control
from ringcast.actors.mirror import Mirror
from ringcast.executor import mirror
from ringcast.executor.mirror import Exchange
from ringcast.executor.parallel import HostGroup, map_parts
from ringcast.mq import supervision
from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.errors import JoinAgainError, NodeLostError

SIZE = 4  # replicas: one of the master, and two and one of the nodes
ENGINE = EngineConfig(device="fake", data_parallel_size=SIZE, enable_expert_parallel=True)
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
SOON = 20.0


class Host:
    """A host's mirror, and its ranks, which wait in threads until they may meet."""

    def __init__(self, port: int, ranks: range, session: str = "s") -> None:
        self.port, self.ranks, self.said = port, ranks, []
        self.changed = asyncio.Event()
        self.meetings: list[asyncio.Task[None]] = []
        self.memory_fd = os.memfd_create("ranks")
        ours, self._theirs = Control.pair()
        self.control = Control(ours, supervision.ActorToSupervisor)
        config = ClusterConfig(headless=ranks.start > 0, data_parallel_rpc_port=port)
        place = ClusterPlace(config=config, first=ranks.start, num=len(ranks), session=session)
        boot = Boot(
            actor=f"mirror.{ranks.start}",
            target="",
            parent_pid=0,
            control_fd=-1,
            engine=ENGINE,
            spec=SPEC,
            endpoints=[],
            group_fd=self.memory_fd,
            cluster=place,
        )
        self.actor = Mirror(boot, Control(self._theirs, supervision.SupervisorToActor))
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        self.task = asyncio.create_task(self.actor._main())

    def meet(self) -> list[asyncio.Task[None]]:
        meet = [asyncio.to_thread(self._meet, rank) for rank in self.ranks]
        self.meetings = [asyncio.create_task(each) for each in meet]
        return self.meetings

    def _meet(self, rank: int) -> None:
        (memory,) = map_parts(self.memory_fd, [Exchange(tuple(range(SIZE)))], 1)
        group = HostGroup(rank, SIZE, memory, SOON)
        for _ in range(3):
            group.barrier()

    @property
    def is_ready(self) -> bool:
        return any(isinstance(message, supervision.ActorReady) for message in self.said)

    async def until(self, condition) -> None:
        async with asyncio.timeout(SOON):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def error(self) -> BaseException:
        """What it ends by."""
        await asyncio.wait([self.task], timeout=SOON)
        error = self.task.exception()
        while isinstance(error, BaseExceptionGroup):
            (error,) = error.exceptions
        assert error is not None
        return error

    def texts(self) -> str:
        said = [message for message in self.said if isinstance(message, supervision.Notice)]
        return "\n".join(message.text for message in said)

    def _read(self) -> None:
        with contextlib.suppress(EOFError):
            while (packet := self.control.receive()) is not None:
                self.said.append(packet[0])
                self.changed.set()

    async def close(self) -> None:
        self.task.cancel()
        for place in (mirror.HEAD_BYTES, 8 * mirror._OPEN):  # one has left, and they have met
            os.pwrite(self.memory_fd, (1).to_bytes(8, "little"), place)  # so they wait no longer
        await asyncio.gather(self.task, *self.meetings, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self.control.fileno())
        self.control.close()
        self._theirs.close()
        os.close(self.memory_fd)


@contextlib.asynccontextmanager
async def cluster(*more: tuple[range, str]):
    port = free_ports(2 * SIZE)
    hosts = [Host(port, range(1))]
    try:
        hosts += [Host(port, *each) for each in more]
        yield hosts
    finally:
        for host in hosts:
            await host.close()


def run(test):
    def wrapped():
        asyncio.run(test())

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


A, B = (range(1, 3), "s"), (range(3, 4), "s")


@run
async def test_the_ranks_of_all_hosts_meet_when_all_are_there_and_one_loss_ends_all():
    async with cluster(A, B) as (master, a, b):
        await master.until(lambda: "headless host with rank 1, 2, 3" in master.texts())
        meetings = [*master.meet(), *a.meet()]
        await a.until(lambda: "rank 1, 2 steps with those of the master" in a.texts())
        assert not any(host.is_ready for host in (master, a, b))  # b's ranks aren't there yet
        meetings += b.meet()
        await asyncio.wait_for(asyncio.gather(*meetings), SOON)
        for host in (master, a, b):
            await host.until(lambda host=host: host.is_ready)
        assert master.actor.statistics()["mirrored_out"] > 0
        a.task.cancel()  # it is killed
        error = await master.error()
        assert isinstance(error, NodeLostError)
        assert "has closed the connection; all replicas wait for a node" in str(error)
        assert isinstance(await b.error(), JoinAgainError)


@run
async def test_who_is_of_an_earlier_life_joins_again_and_writes_nothing():
    async with cluster((range(1, 4), "before")) as (master, node):
        meetings = node.meet()
        assert "the master has been started anew" in str(await node.error())
        assert not any(meeting.done() for meeting in meetings)
        (memory,) = map_parts(master.memory_fd, [Exchange(tuple(range(SIZE)))], 0)
        assert not memory.any()


@run
async def test_a_rank_has_one_host():
    async with cluster(A) as hosts:
        master, first = hosts
        await first.until(lambda: "rank 1, 2 steps with" in first.texts())
        second = Host(master.port, range(2, 4))
        hosts.append(second)
        await second.until(lambda: "rank 2 is served by node" in second.texts())
        third = Host(master.port, range(3, 4))
        hosts.append(third)
        await third.until(lambda: "rank 3 steps with" in third.texts())
        assert not first.task.done()


@run
async def test_a_node_that_is_shut_down_says_so():
    async with cluster((range(1, 4), "s")) as (master, node):
        await asyncio.wait_for(asyncio.gather(*master.meet(), *node.meet()), SOON)
        await node.until(lambda: node.is_ready)
        node.actor.on_control(supervision.Shutdown())
        assert "has left: it is being shut down" in str(await master.error())
