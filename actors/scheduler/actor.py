"""The scheduler actor: requests become steps."""

from __future__ import annotations

from ..base import Actor
from ..core import Core
from .core import SchedulerCore


class Scheduler(Actor):
    def make_core(self) -> Core:
        boot = self.boot
        return SchedulerCore(boot.engine, boot.spec, num_workers=boot.counts.get("worker", 1))
