"""The scheduler actor: the shell of `SchedulerCore`, with a watch on steps that don't end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from ...mq.errors import EngineDeadError
from ..base import Actor
from .core import SchedulerCore


class Scheduler(Actor):
    def make_core(self) -> SchedulerCore:
        boot = self.boot
        self._scheduler = SchedulerCore(
            boot.engine, boot.spec, num_workers=boot.counts.get("worker", 1)
        )
        return self._scheduler

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().background(), self._watch_steps()]

    async def _watch_steps(self) -> None:
        """End the engine, saying why, when the workers have been at one step for too long."""
        limit = self.boot.engine.step_timeout
        step, since = self._scheduler.oldest_step, time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            now = time.monotonic()
            if self._scheduler.oldest_step != step:
                step, since = self._scheduler.oldest_step, now
            elif step is not None and now - since > limit:
                self.stop(
                    EngineDeadError(
                        f"step {step} has not ended for {now - since:.1f} s (--step-timeout "
                        f"{limit:g}): a worker hangs, or a step is too large for it"
                    )
                )
                return
