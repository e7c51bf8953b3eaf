"""The scheduler actor: the shell of `SchedulerCore`, with a watch on steps that don't end."""

from __future__ import annotations

import logging

from ..base import Actor
from ..core import Core
from .core import SchedulerCore

log = logging.getLogger(__name__)


class Scheduler(Actor):
    def make_core(self) -> Core:
        boot = self.boot
        return SchedulerCore(boot.engine, boot.spec, num_workers=boot.counts.get("worker", 1))
