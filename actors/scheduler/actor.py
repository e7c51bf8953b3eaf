"""The scheduler actor: requests become steps."""

from __future__ import annotations

from .. import topology
from ..base import Actor
from ..core import Core
from .core import SchedulerCore
from .pooling import PoolingCore


class Scheduler(Actor):
    def make_core(self) -> Core:
        boot = self.boot
        kind = SchedulerCore if boot.spec.pooling is None else PoolingCore
        return kind(
            boot.engine,
            boot.spec,
            num_workers=topology.ranks_per_engine(boot.counts),
            name=boot.actor,
            has_coordinator=boot.counts.get("coordinator", 0) > 0,
            num_tokenizers=topology.count_of("tokenizer", boot.counts),
            num_detokenizers=topology.count_of("detokenizer", boot.counts),
        )
