"""An engine that several hosts share: gateway.k on the master plays node k's workers, gateway.k on
node k all whom these talk to.

Plans go over the link, and the workers' answers come back, on the edges that they have on either
host. What ranks tell each other within a step goes over it, too, as records of an edge that there
is nowhere (MIRRORED): each gateway has a mirror of the memory that its host's ranks share.

Ranks load together, so the link is made first: both gateways are ready once it is, and the workers,
which wait for that, then begin to load. Nobody on either host can go on without the other. So the
master's gateway ends with its link, and with it the unit, whose next incarnation waits for the node
for any time; and the node ends all that it has and joins again (frontend/cli/headless.py), which
takes no longer than to start the same workers anew. Either supervisor kills the ranks. They aren't
told that the link is lost, or one's death could come before the gateway's, and be taken for the
reason.

    on the node                                    | then
    -----------------------------------------------|------------------------------------------------
    no answer, or "ask again"                      | attaching, until --data-parallel-join-timeout
    no answer for that long                        | ends, and its host with it: exit status 1
    the link is lost; "join again"                 | ends, and its host joins again
    refused                                        | ends, and its host with it: exit status 2
    a worker dies                                  | its unit ends, and the link; both begin anew
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from ..mq import messages, supervision
from ..mq.errors import ChannelError, CorruptRecordError, JoinAgainError
from ..mq.handshake import NodesMaster
from ..mq.link import LinkDialer, LinkListener
from ..mq.link_core import Record
from .base import Actor
from .boot import Boot
from .joining import hello_of, join
from .master_gateway import MasterGateway
from .mirroring import Mirroring
from .node_gateway import NodeGateway

MIRRORED = "ranks"


class RanksMaster(MasterGateway):
    async def start(self) -> dict[str, str | int | float]:
        node = self._rank
        workers = self._place.config.workers_of(node, self.boot.engine.num_workers)
        self._mirroring = _mirroring(self.boot, workers, node - 1, self)
        return await super().start()

    def make_judge(self) -> NodesMaster:
        return NodesMaster(**self._judged_by(), nnodes=self._place.config.nnodes)

    def make_link(self) -> LinkListener:
        config = self._place.config
        where = config.ip(), config.node_port(self._rank), config.keys()
        return LinkListener(self, *where, options="--master-addr and --master-port")

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().background(), self._mirroring.run()]

    def on_batch(self, batch: list[tuple[str, Any]]) -> None:
        super().on_batch(batch)
        self._mirroring.wake()

    def on_record(self, record: Record) -> None:
        if record.edge != MIRRORED:
            super().on_record(record)
            return
        _take(self, self._mirroring, record)
        self._link.handed_on(record)

    def statistics(self) -> dict[str, float]:
        return {"link_bytes": self._link.under_way, **_statistics(self._mirroring)}

    def waits(self) -> str:
        return f"waiting for node {self._rank}"

    def _lose(self, message: supervision.PeersLost) -> None:
        Actor._lose(self, message)  # no worker has to know


class RanksNode(NodeGateway):
    async def start(self) -> dict[str, str | int | float]:
        boot, node, config = self.boot, self._rank, self._place.config
        num_workers = boot.engine.num_workers
        here = config.workers_of(node, num_workers)
        theirs = [worker for worker in range(num_workers) if worker not in here]
        self._mirroring = _mirroring(boot, theirs, 0, self)
        self._link = LinkDialer(self, config.ip(), config.node_port(node), config.keys())
        numbers = range(node, node + 1)
        hello = hello_of(boot.engine, boot.spec, numbers, self._place.session, config.nnodes)
        await join(self._link, hello, config.data_parallel_join_timeout, self._report)
        self._report(f"node {node} has joined the master at {self._link.target}")
        return {}

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [*Actor.background(self), self._mirroring.run()]

    def on_control(self, message: Any) -> None:
        if isinstance(message, supervision.TopologyReady):
            self.control.send(supervision.Listening(f"node {self._rank}"))
        else:
            super().on_control(message)

    def on_record(self, record: Record) -> None:
        if record.edge == MIRRORED:
            _take(self, self._mirroring, record)
            self._on_handed_on(record)
            return
        self._mirroring.wake()
        super().on_record(record)

    def on_message(self, message: messages.Message) -> None:
        self.on_link_lost(CorruptRecordError(f"the master says {type(message).__name__}"))

    def on_link_lost(self, error: ChannelError) -> None:
        self.stop(JoinAgainError(str(error)))

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), **_statistics(self._mirroring)}


def _mirroring(boot: Boot, theirs: Any, link: int, gateway: RanksMaster | RanksNode) -> Mirroring:
    assert boot.cluster is not None

    def send(payload: bytes) -> None:
        assert gateway._link is not None
        gateway._link.record(MIRRORED, payload)

    def is_full() -> bool:
        return gateway._link is None or gateway._link.full

    return Mirroring(boot.group_fd, theirs, link, boot.cluster.num_links, send, is_full)


def _take(gateway: RanksMaster | RanksNode, mirroring: Mirroring, record: Record) -> None:
    try:
        mirroring.take(record.payload)
    except CorruptRecordError as error:
        gateway.on_link_lost(error)


def _statistics(mirroring: Mirroring) -> dict[str, float]:
    return {"mirrored_out": mirroring.sent_bytes, "mirrored_in": mirroring.taken_bytes}
