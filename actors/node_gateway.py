"""The master, as a scheduler on another host sees it: this plays all whom the scheduler talks to.

It is started with its engine, and ends with it. When the engine works, it says Hello to the
master's gateway of the same rank; from then on, what comes over the link goes into the scheduler's
channels, and what the scheduler says goes over the link. When the link is lost, this ends, and so
does the engine, whose requests have been taken over elsewhere; the next one joins anew.

    attaching                                      | then
    -----------------------------------------------|------------------------------------------------
    Welcome                                        | attached
    no answer, or "ask again"                      | attaching, until --data-parallel-join-timeout
    no answer for that long                        | ends, and its host with it: exit status 1
    "join again"                                   | ends, and its host joins again
    refused                                        | ends, and its host with it: exit status 2

Where replicas step together, its link is lost with the whole unit, on all hosts: this host joins
again then, with whatever lives next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ..mq import codec, messages, supervision
from ..mq.errors import ChannelError, CorruptRecordError, JoinAgainError, NodeLostError
from ..mq.handshake import Bye
from ..mq.link import LinkDialer
from ..mq.link_core import Record
from .base import Actor
from .boot import Boot
from .control import Control
from .forwarding import ForwardLinks
from .joining import hello_of, join


class NodeGateway(Actor):
    links: ForwardLinks

    def __init__(self, boot: Boot, control: Control) -> None:
        super().__init__(boot, control)
        assert boot.cluster is not None
        self._place = boot.cluster
        self._rank = int(boot.actor.partition(".")[2])
        self._link: LinkDialer | None = None
        self._engine_works = asyncio.Event()
        self._scheduler_says = supervision.Statistics({})

    def make_links(self) -> ForwardLinks:
        return ForwardLinks(self.boot.endpoints, self.on_batch, self._on_handed_on)

    async def start(self) -> dict[str, str | int | float]:
        return {}

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().background(), self._attach()]

    def on_control(self, message: Any) -> None:
        match message:
            case supervision.TopologyReady():
                self.control.send(supervision.Listening(f"rank {self._rank}"))
                self._engine_works.set()
            case supervision.Statistics():
                self._scheduler_says = message
                if self._link is not None:
                    self._link.message(message)
            case supervision.BeginDrain():
                self._leave(Bye("it is being shut down"))
            case supervision.TopologyFailed(error=error):
                self._leave(Bye(error, failed=True))
            case _:
                super().on_control(message)

    def on_batch(self, batch: list[tuple[str, Any]]) -> None:
        """What the scheduler says before there is a link is for nobody, and dropped."""
        link = self._link
        if link is None:
            return
        for edge, payload in batch:
            link.record(edge, payload)
        if link.attached and link.full:
            self.links.pause()

    def statistics(self) -> dict[str, float]:
        return {"link_bytes": 0 if self._link is None else self._link.under_way}

    async def end(self) -> None:
        if self._link is not None:
            self._link.close()

    async def _attach(self) -> None:
        await self._engine_works.wait()
        config = self._place.config
        self._link = LinkDialer(self, config.ip(), config.port_of(self._rank), config.keys())
        boot, ranks = self.boot, range(self._rank, self._rank + 1)
        hello = hello_of(boot.engine, boot.spec, ranks, session=self._place.session)
        await join(self._link, hello, config.data_parallel_join_timeout, self._report)
        self._link.message(self._scheduler_says)
        self._report(f"rank {self._rank} serves the master at {self._link.target}")

    def _leave(self, bye: Bye) -> None:
        if self._link is not None:
            self._link.message(bye)
        self.control.send(supervision.Drained())

    # What the link tells

    def on_record(self, record: Record) -> None:
        try:
            self.links.put(record)
        except KeyError:
            self.on_link_lost(CorruptRecordError(f"the master knows an edge {record.edge!r}"))

    def on_message(self, message: messages.Message) -> None:
        if isinstance(message, messages.PeersGone):
            target = f">scheduler.{self._rank}"
            direct = [name for name in message.names if self.links.has(name + target)]
            edge = (direct or ["tokenizer.0"])[0] + target
            self.links.put(Record(edge, codec.encode(message)), own=True)

    def on_room(self) -> None:
        self.links.resume()

    def on_link_lost(self, error: ChannelError) -> None:
        if self.boot.engine.lockstep:
            self.stop(JoinAgainError(str(error)))
        else:
            self.stop(NodeLostError(str(error), from_outside=True))

    def _on_handed_on(self, record: Record) -> None:
        if self._link is not None:
            self._link.handed_on(record)

    def _report(self, text: str) -> None:
        self.control.send(supervision.Notice(text))
