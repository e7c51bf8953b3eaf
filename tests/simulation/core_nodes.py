"""Actors that are a core in a shell: tokenizer, scheduler, detokenizer, coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ringcast.actors import topology
from ringcast.actors.coordinator_core import CoordinatorCore
from ringcast.actors.core import Core, PeerAdded, PeerLost
from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.actors.text.detokenizer_core import DetokenizerCore
from ringcast.actors.text.tokenizer_core import TokenizerCore
from ringcast.mq import supervision

from .node import Job, Node


class CoreNode(Node):
    core: Core
    _timer = False

    def _make(self) -> None:
        world = self.world
        spec, tokenizer = world.scenario.spec, world.tokenizer
        match self.name.partition(".")[0]:
            case "tokenizer":
                replicas = topology.num_engines(world.graph)
                today = datetime(2026, 1, 1)
                self.core = TokenizerCore(spec, tokenizer, replicas, clock=lambda: today)
            case "coordinator":
                counts = world.graph
                lockstep = world.scenario.config.lockstep
                self.core = core = CoordinatorCore(
                    counts["scheduler"], counts["client"], lockstep=lockstep
                )
                self._set_timer(core)
            case "scheduler":
                config = world.scenario.config
                self.core = SchedulerCore(
                    config,
                    spec,
                    num_workers=config.num_workers,
                    name=self.name,
                    has_coordinator=world.graph["coordinator"] > 0,
                    num_tokenizers=config.tokenizer_count,
                    num_detokenizers=config.detokenizer_count,
                )
            case "detokenizer":
                self.core = DetokenizerCore(spec, tokenizer)

    def statistics(self) -> dict[str, float]:
        return self.core.statistics() if self.state == "ready" else {}

    def _handle(self, batch: list[tuple[str, Any]], sent: list[tuple[str, Any]]) -> Job:
        now = self.world.clock.now
        for source, message in batch:
            yield from self._send(self.core.handle(source, message, now), sent)
        yield from self._send(self.core.flush(now), sent)
        if isinstance(self.core, SchedulerCore):
            self.core.check()
        elif isinstance(self.core, CoordinatorCore):
            self._set_timer(self.core)

    def _set_timer(self, core: CoordinatorCore) -> None:
        """Coordinator._set_timer of actors/coordinator.py."""
        if core.due is not None and not self._timer:
            self._timer = True
            self.world.clock.after(max(0.0, core.due - self.world.clock.now), self.order, "flush")

    def _obey_more(self, order: Any) -> Job:
        assert order == "flush", f"{self.name} was told {order!r}"
        self._timer = False
        yield from self._handle([], [])

    def _welcome(self, names: Sequence[str]) -> Job:
        yield from self._handle([(name, PeerAdded()) for name in names], [])

    def _forget(self, order: supervision.PeersLost) -> Job:
        sent: list[tuple[str, Any]] = []
        yield from self._handle([(name, PeerLost()) for name in order.lost], sent)
        self.world.wire.forgot(self, order.lost, [message for _, message in sent])
