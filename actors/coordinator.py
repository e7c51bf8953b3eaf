"""The coordinator actor: what the replicas have to do, for the clients that choose among them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ..mq import supervision
from .base import Actor
from .coordinator_core import CoordinatorCore
from .core import Core


class Coordinator(Actor):
    def make_core(self) -> Core:
        counts = self.boot.counts
        self._coordinator = CoordinatorCore(
            counts["scheduler"], counts.get("client", 1), lockstep=self.boot.engine.lockstep
        )
        self._timer: asyncio.TimerHandle | None = None
        return self._coordinator

    async def start(self) -> dict[str, str | int | float]:
        details = await super().start()
        self._set_timer()
        return details

    def on_batch(self, batch: list[tuple[str, Any]]) -> None:
        super().on_batch(batch)
        self._set_timer()

    def on_lost(self, message: supervision.PeersLost) -> None:
        self._set_timer()

    async def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        due = self._coordinator.due
        if due is not None and self._timer is None:
            delay = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._flush)

    def _flush(self) -> None:
        self._timer = None
        self.send_all(self._coordinator.flush(time.monotonic()))
        self._set_timer()
