"""A replica on another host, as the master's actors see it: this plays its scheduler.

It listens until a node joins with its rank, and is ready from then on. What the master's actors say
to scheduler.r goes over the link, and what scheduler.r says comes into their channels. It ends, and
the unit engine.r with it, when the link does: so a node that is lost is treated as an engine that
has died, and the next gateway waits for a node to come.

A peer's death on this host is told to the scheduler over the link, after all that the peer had
sent; it is forgotten when the scheduler's answer has come on the way to every detokenizer, where it
follows all that the scheduler had said before it knew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from .. import __version__
from ..mq import codec, messages, supervision
from ..mq.errors import ChannelError, ChannelTimeout, CorruptRecordError, NodeLostError
from ..mq.fingerprint import fingerprint
from ..mq.handshake import Bye, Hello, Master, Refused, Welcome
from ..mq.link import LinkListener
from ..mq.link_core import Record
from . import topology
from .base import Actor
from .boot import Boot
from .control import Control
from .forwarding import ForwardLinks

# Who else the scheduler would be told of. Other replicas are nothing to it.
_OF_INTEREST = ("client", "tokenizer", "detokenizer", "coordinator")


class MasterGateway(Actor):
    links: ForwardLinks

    def __init__(self, boot: Boot, control: Control) -> None:
        super().__init__(boot, control)
        assert boot.cluster is not None
        self._place = boot.cluster
        self._rank = int(boot.actor.partition(".")[2])
        self._at_the_end = contextlib.ExitStack()
        self._node = ""
        self._epoch = 0
        self._scheduler_says: dict[str, float] = {}
        # Deaths that the scheduler has yet to answer: on the way to how many detokenizers.
        self._asked: dict[int, int] = {}
        self._num_detokenizers = topology.count_of("detokenizer", boot.counts)
        self._decode: codec.Decoder[Any] = codec.Decoder(messages.SchedulerToDetokenizer)
        self._strangers: set[str] = set()

    def make_links(self) -> ForwardLinks:
        return ForwardLinks(self.boot.endpoints, self.on_batch, self._on_handed_on)

    async def start(self) -> dict[str, str | int | float]:
        """Wait for a node. How long that may take is the lifecycle's business."""
        self._judge = self.make_judge()
        self._attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = self.make_link()
        self._at_the_end.callback(self._link.close)
        what = self._judge.what
        self.control.send(supervision.Progress(f"waiting for {what}", 0, 1))
        await self._attached
        self.control.send(supervision.Progress(f"waiting for {what}", 1, 1))
        return {what: self._node}

    def make_judge(self) -> Master:
        return Master(**self._judged_by())

    def make_link(self) -> LinkListener:
        config = self._place.config
        return LinkListener(self, config.ip(), config.port_of(self._rank), config.keys())

    def _judged_by(self) -> dict[str, Any]:
        place, boot = self._place, self.boot
        return {
            "version": __version__,
            "session": place.session,
            "rank": self._rank,
            "local": (place.first, place.num),
            "engine": boot.engine,
            "spec": boot.spec,
            "fingerprint": fingerprint(boot.spec),
        }

    def on_batch(self, batch: list[tuple[str, Any]]) -> None:
        for edge, payload in batch:
            self._link.record(edge, payload)
        if self._link.full:
            self.links.pause()

    def statistics(self) -> dict[str, float]:
        return {**self._scheduler_says, "link_bytes": self._link.under_way}

    async def end(self) -> None:
        self._at_the_end.close()

    def _lose(self, message: supervision.PeersLost) -> None:
        self.links.lose(message.lost)
        names = [name for name in message.lost if name.partition(".")[0] in _OF_INTEREST]
        if names:
            self._asked[message.death] = self._num_detokenizers
            self._link.message(messages.PeersGone(message.death, names))
        else:
            self.control.send(supervision.PeersForgotten(message.death))

    # What the link tells

    def on_hello(self, hello: Hello) -> Welcome | Refused:
        refusal = self._judge.refusal(hello, self._node)
        if refusal is not None:
            if refusal.then == "give up":
                self._report(f"node {hello.node} is refused: {refusal.reason}")
            return refusal
        if hello.attach:
            self._epoch += 1
        return self._judge.welcome(hello, self._epoch if hello.attach else 0, time.monotonic())

    def on_attached(self, hello: Hello) -> None:
        self._node = f"node {hello.node}"
        self._attached.set_result(None)

    def on_stranger(self, address: str) -> None:
        self._report(
            f"somebody who tried to join as {self._judge.what} is refused: it hasn't shown this "
            "cluster's secret (--cluster-secret-file)"
        )

    def on_record(self, record: Record) -> None:
        if self._asked and self._is_answer(record):
            self._link.handed_on(record)
            return
        try:
            self.links.put(record)
        except KeyError:
            self.on_link_lost(CorruptRecordError(f"{self._node} knows an edge {record.edge!r}"))

    def on_message(self, message: messages.Message) -> None:
        if isinstance(message, supervision.Statistics):
            self._scheduler_says = message.values
        elif isinstance(message, Bye):
            self._end(f"{self._node} has left: {message.reason}", not message.failed)

    def on_room(self) -> None:
        self.links.resume()

    def on_link_lost(self, error: ChannelError) -> None:
        self._end(str(error), isinstance(error, ChannelTimeout))

    def _end(self, reason: str, from_outside: bool) -> None:
        self.stop(NodeLostError(f"{reason}; {self.waits()}", from_outside))

    def waits(self) -> str:
        return f"rank {self._rank} waits for a node"

    def _is_answer(self, record: Record) -> bool:
        """Whether this is the scheduler's answer to a death, which is for us."""
        if not record.edge.partition(">")[2].startswith("detokenizer."):
            return False
        message = self._decode(record.payload)
        if not isinstance(message, messages.PeersGoneHeard):
            return False
        left = self._asked.get(message.death, 0) - 1
        if left > 0:
            self._asked[message.death] = left
        else:
            self._asked.pop(message.death, None)
            self.control.send(supervision.PeersForgotten(message.death))
        return True

    def _on_handed_on(self, record: Record) -> None:
        self._link.handed_on(record)

    def _report(self, text: str) -> None:
        if text not in self._strangers:  # who is refused comes again and again
            self._strangers.add(text)
            self.control.send(supervision.Notice(text))
