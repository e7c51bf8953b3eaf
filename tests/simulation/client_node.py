"""An API server: frontend/http/actor.py (`ApiServer`) but for HTTP."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ringcast.actors import topology
from ringcast.actors.core import Send
from ringcast.frontend.client import EngineClient
from ringcast.mq import messages, supervision
from ringcast.mq.errors import EngineDeadError

from .node import Job, Node


class ClientNode(Node):
    """Its ledger is real, its users are users.py's."""

    def _make(self) -> None:
        self.open = False
        self.pongs: set[messages.Ping] = set()  # that have come back
        self._collected: list[Send] = []
        self._draining = False
        self.losses: Counter[str] = Counter()  # that it was told of, by who was lost
        scenario = self.world.scenario
        self.client = EngineClient(
            scenario.spec,
            lambda to, message: self._collected.append(Send(to, message)),
            self.index,
            scenario.max_queued,
            seed=scenario.seed,
            policy=scenario.config.scheduling_policy,
            num_engines=topology.num_engines(self.world.graph),
            routing=scenario.config.data_parallel_routing,
            num_tokenizers=scenario.config.tokenizer_count,
            num_detokenizers=scenario.config.detokenizer_count,
        )

    def ping(self, number: int) -> None:
        """Every replica, by every tokenizer and detokenizer that there is."""
        for ping in self.pings(number):
            self._collected.append(Send(f"tokenizer.{ping.tokenizer}", ping))

    def pings(self, number: int) -> list[messages.Ping]:
        gone = self.world.supervisor.life.given_up

        def live(kind: str) -> list[int]:
            names = self.world.instances(kind)
            return [int(name.partition(".")[2]) for name in names if name not in gone]

        ways = itertools.product(live("scheduler"), live("tokenizer"), live("detokenizer"))
        return [messages.Ping(self.index, number, *way) for way in ways]

    def statistics(self) -> dict[str, float]:
        return self.client.statistics() if self.state == "ready" else {}

    @property
    def takes_requests(self) -> bool:
        return self.state == "ready" and self.open

    def _handle(self, batch: list[tuple[str, Any]], sent: list[tuple[str, Any]]) -> Job:
        for source, message in batch:
            if isinstance(message, messages.Ping):
                self.pongs.add(message)
            self.client.deliver(source, message)
        yield from self._flush(sent)

    def _flush(self, sent: list[tuple[str, Any]]) -> Job:
        """Send what the client wanted sent; then, while draining, see whether it's done."""
        effects, self._collected = self._collected, []
        yield from self._send(effects, sent)
        if self._draining and not self.client.num_open:
            self._draining = False
            self._tell(supervision.Drained())

    def _forget(self, order: supervision.PeersLost) -> Job:
        self.losses.update(order.lost)
        if order.removed:
            self.client.removed(order.lost)
        else:
            self.client.lost(order.lost, order.error, order.from_outside)
        self._check_parked()
        yield from self._flush([])

    def _regain(self, names: Sequence[str]) -> Job:
        self.client.regained(names)
        self._check_parked()
        yield from self._flush([])

    def _check_parked(self) -> None:
        """Nobody waits while a replica lives, but for a trial."""
        takeover = self.client._takeover
        for handle in self.client._ledger.values():
            if handle.parked and not takeover.blocked and self.client.dead is None:
                assert takeover.on_trial is not None, f"{handle.request_id} waits for nothing"
                assert handle.strikes or handle.blows, f"{handle.request_id} waits for others"

    def _obey_more(self, order: Any) -> Job:
        match order:
            case supervision.TopologyReady():
                self.open = True
                self._tell(supervision.Listening(f"http://{self.name}"))
            case supervision.BeginDrain(timeout=timeout):
                self._drain(timeout)
            case supervision.PeersLeaving(names=names):
                self.client.leave(names, lambda: self._tell(supervision.PeersLeft()))
            case supervision.TopologyFailed(error=error, traceback=traceback):
                self.client.fail_all(EngineDeadError(error, traceback))
                self._drain(1.0)
            case _:
                assert callable(order), f"{self.name} was told {order!r}"
                order()
        yield from self._flush([])

    def _drain(self, timeout: float) -> None:
        self.client.draining = self._draining = True
        error = EngineDeadError("the server is shutting down")
        late: Callable[[], None] = lambda: self._draining and self.client.fail_all(error)  # noqa: E731
        self.world.clock.after(timeout, self.order, late)
