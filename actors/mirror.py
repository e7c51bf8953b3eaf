"""A host's mirror, where replicas on several hosts step together: what its ranks write for those of
other hosts goes there, and theirs comes here (executor/mirror.py has the rules).

It has one link with each host: hosts are a star, with the master in the middle. All that it carries
belongs to one life of the replicas, on all hosts:

1. A life begins with the master's unit, in a session that no other one has (handshake.py). A node's
   mirror attaches in the session that its host has joined, or is told to join again. Its memory is
   new then, as its host starts everything anew to join.
2. The master's mirror opens when it has a link for every rank and all nodes have said how their
   memory is laid out. Before, nothing is written to anybody's memory, and no rank has begun to wait
   for others (`wait_until_open`).
3. A link that is lost ends the mirror at either end, and each end's unit. On the master the next
   life begins, and waits for all nodes; a node joins that.

    master's mirror            | what comes                                 | then
    ---------------------------|--------------------------------------------|---------------------
    some ranks have no node    | Hello, of ranks that are free              | they have
    all have                   | the last node's greeting                   | greets all; ready
    any                        | a link is lost                             | ends: NodeLostError
    node's                     |                                            |
    attached                   | its own workers' description               | greets the master
                               | the master's greeting                      | ready
    any                        | the link is lost, or it is "join again"    | ends: JoinAgainError
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from .. import __version__
from ..mq import messages, supervision
from ..mq.errors import (
    ChannelError,
    ChannelTimeout,
    CorruptRecordError,
    JoinAgainError,
    NodeLostError,
)
from ..mq.fingerprint import fingerprint
from ..mq.handshake import Bye, Hello, Master, Refused, Welcome
from ..mq.link import LinkDialer, LinkListener
from ..mq.link_core import Record
from .base import Actor
from .boot import Boot
from .control import Control
from .joining import hello_of, join
from .mirroring import Mirroring

_EDGE = "ranks"
_LONGEST_NAP = 5e-3  # nobody says that a wave begins


class _Line:
    """A link with another host, or the wait for one. ranks: the replicas beyond it, once known.
    early: what has come before it could be used: no more than a greeting."""

    def __init__(self, owner: Mirror) -> None:
        self._owner = owner
        self.ranks: tuple[int, ...] = ()
        self.node = ""
        self.early: Record | None = None
        self.mirroring: Mirroring | None = None
        self.link: LinkListener | LinkDialer

    def start(self, boot: Boot, number: int, num_lines: int) -> asyncio.Task[None]:
        """From here on it mirrors. number: of num_lines of this host."""
        width = boot.engine.num_workers
        theirs = [rank * width + i for rank in self.ranks for i in range(width)]

        def send(payload: bytes) -> None:
            self.link.record(_EDGE, payload)

        place = theirs, number, num_lines
        self.mirroring = Mirroring(
            boot.group_fd, *place, send, lambda: self.link.full, longest_nap=_LONGEST_NAP
        )
        if self.early is not None:
            self._take(self.early)
        return asyncio.create_task(self.mirroring.run())

    def on_hello(self, hello: Hello) -> Welcome | Refused:
        return self._owner.judge(hello)

    def on_attached(self, hello: Hello) -> None:
        self.node = f"node {hello.node}"
        self.ranks = tuple(range(hello.start_rank, hello.start_rank + hello.num_ranks))
        self._owner.on_node()

    def on_stranger(self, address: str) -> None:
        self._owner.on_stranger()

    def on_record(self, record: Record) -> None:
        if self.mirroring is None:
            self.early = record
        else:
            self._take(record)
        self._owner.on_greeting()

    def on_message(self, message: messages.Message) -> None:
        if isinstance(message, Bye):
            self._owner.lose(NodeLostError(f"{self.node} has left: {message.reason}", True))

    def on_room(self) -> None:
        pass  # it is looked for

    def on_link_lost(self, error: ChannelError) -> None:
        self._owner.lose(error)

    def _take(self, record: Record) -> None:
        assert self.mirroring is not None
        try:
            self.mirroring.take(record.payload)
        except CorruptRecordError as error:
            self._owner.lose(error)
        else:
            self.link.handed_on(record)


class Mirror(Actor):
    """The actor. It has no channels."""

    def __init__(self, boot: Boot, control: Control) -> None:
        super().__init__(boot, control)
        assert boot.cluster is not None
        self._place = boot.cluster
        self._is_node = boot.cluster.config.headless
        self._everyone = range(boot.engine.data_parallel_size)
        self._others = tuple(rank for rank in self._everyone if rank not in boot.cluster.ranks)
        self._at_the_end = contextlib.ExitStack()
        self._lines: list[_Line] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._has_told_of_strangers = False

    async def start(self) -> dict[str, str | int | float]:
        """Until all hosts are there. How long that may take is the lifecycle's business."""
        self._all_here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_node:
            await self._dial()
        else:
            self._listen()
        await self._all_here
        return {}

    def on_control(self, message: Any) -> None:
        if self._is_node and isinstance(message, supervision.Shutdown):
            for line in self._lines:
                line.link.message(Bye("it is being shut down"))
        super().on_control(message)

    def statistics(self) -> dict[str, float]:
        mirrorings = [line.mirroring for line in self._lines if line.mirroring is not None]
        return {
            "mirrored_out": sum(mirroring.sent_bytes for mirroring in mirrorings),
            "mirrored_in": sum(mirroring.taken_bytes for mirroring in mirrorings),
        }

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._at_the_end.close()

    # Links

    async def _dial(self) -> None:
        boot, place = self.boot, self._place
        config = place.config
        line = _Line(self)
        port = config.mirror_port_of(place.first, len(self._everyone))
        line.link = LinkDialer(line, config.ip(), port, config.keys())
        self._at_the_end.callback(line.link.close)
        self._lines.append(line)
        hello = hello_of(boot.engine, boot.spec, place.ranks, session=place.session)
        await join(line.link, hello, config.data_parallel_join_timeout, self._report)
        line.node, line.ranks = f"the master at {line.link.target}", self._others
        ranks = ", ".join(map(str, place.ranks))
        self._report(f"rank {ranks} steps with those of {line.node}")
        self._start_lines()

    def _listen(self) -> None:
        boot, place = self.boot, self._place
        config = place.config
        self._judge = Master(
            version=__version__,
            session=place.session,
            rank=self._others[0],
            local=(place.first, place.num),
            engine=boot.engine,
            spec=boot.spec,
            fingerprint=fingerprint(boot.spec),
        )
        for rank in self._others:
            line = _Line(self)
            port = config.mirror_port_of(rank, len(self._everyone))
            line.link = LinkListener(line, config.ip(), port, config.keys())
            self._at_the_end.callback(line.link.close)
            self._lines.append(line)
        self._say_who_is_missing()

    def judge(self, hello: Hello) -> Welcome | Refused:
        """Who may attach: for ranks that nobody has."""
        asked = set(range(hello.start_rank, hello.start_rank + hello.num_ranks))
        holders = [line.node for line in self._lines if asked.intersection(line.ranks)]
        judge = msgspec.structs.replace(self._judge, rank=hello.start_rank)
        refusal = judge.refusal(hello, "".join(holders[:1]))
        return refusal or judge.welcome(hello, epoch=1, now=time.monotonic())

    def on_node(self) -> None:
        self._say_who_is_missing()

    def on_stranger(self) -> None:
        if not self._has_told_of_strangers:  # who is refused comes again and again
            self._has_told_of_strangers = True
            self._report(
                "somebody who tried to join is refused: it hasn't shown this cluster's secret "
                "(--cluster-secret-file)"
            )

    def on_greeting(self) -> None:
        """On a node from the master: go. On the master the last one's: now all may."""
        if self._all_here.done():
            return
        if not self._is_node:
            there = [line for line in self._lines if line.early is not None]
            if sum(len(line.ranks) for line in there) < len(self._others):
                return
            self._lines = there
            self._start_lines()
        self._all_here.set_result(None)

    def lose(self, error: ChannelError) -> None:
        """A link is no more, and with it this life of all replicas."""
        ended: Exception
        if self._is_node:
            ended = JoinAgainError(str(error))
        else:
            outside = isinstance(error, ChannelTimeout) or getattr(error, "from_outside", False)
            ended = NodeLostError(f"{error}; all replicas wait for a node", outside)
        if self._all_here.done():
            self.stop(ended)
        else:
            self._all_here.set_exception(ended)

    def _start_lines(self) -> None:
        for number, line in enumerate(self._lines):
            task = line.start(self.boot, number, len(self._lines))
            task.add_done_callback(self._on_broken)
            self._tasks.append(task)

    def _on_broken(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, ChannelError):
            self.lose(error)
        else:
            self.stop(error)

    def _say_who_is_missing(self) -> None:
        there = {rank for line in self._lines for rank in line.ranks}
        if missing := [rank for rank in self._others if rank not in there]:
            ranks = ", ".join(map(str, missing))
            self._report(f"replicas step together: waiting for a headless host with rank {ranks}")

    def _report(self, text: str) -> None:
        self.control.send(supervision.Notice(text))
