"""What a runner has to do for its model's experts around each step: to have them balanced before
it, and to report what they had to do in it. Counted it is by the kernels of the step.

All of it is enqueued on the stream of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ...mq.config import EngineConfig
from ...mq.messages import ExpertLoads
from ..expert_balancer import ExpertBalancer
from ..expert_reports import Asked, ExpertReports
from .device_experts import Carrier, DeviceExperts, HostCopy
from .experts import Mixtures

Report = Callable[[], ExpertLoads | None]


class ExpertWatch:
    """mixtures: None of a dense model, which has nothing to watch."""

    def __init__(
        self,
        config: EngineConfig,
        mixtures: Mixtures | None,
        speaks: bool,
        carrier: Carrier,
    ) -> None:
        """speaks: this worker reports. All count the same, and one of them does. carrier: between
        the ranks that experts are dealt to.
        """
        self._mixtures = mixtures
        self._balancer: ExpertBalancer | None = None
        self._reports: ExpertReports | None = None
        if mixtures is None:
            return
        if config.enable_eplb:
            experts = DeviceExperts(mixtures, carrier, delay=config.most_steps_in_flight + 1)
            self._balancer = ExpertBalancer(config.eplb_config, experts)
        if speaks:
            routes = dict(zip(mixtures.layers, mixtures.routes, strict=True))
            self._reports = ExpertReports(routes, self._balancer, config.eplb_config)

    @property
    def has_news(self) -> bool:
        """Whether a step without tokens has something to report."""
        return self._reports is not None and self._reports.has_news

    def before_step(self) -> int:
        """Before each step in which any rank has tokens. Returns its turn (batch.py)."""
        return 0 if self._balancer is None else self._balancer.before_step()

    def after_step(self, any_tokens: bool) -> Report | None:
        """What its output is to say, once the step is over."""
        if self._reports is None or self._mixtures is None:
            return None
        asked = self._reports.ask(time.perf_counter(), any_tokens)
        if asked is None:
            return None
        return partial(self._tell, asked, HostCopy(self._mixtures.loads_LE))

    def notices(self) -> list[str]:
        return [] if self._reports is None else self._reports.notices()

    def _tell(self, asked: Asked, copy: HostCopy) -> ExpertLoads | None:
        assert self._reports is not None
        assert self._mixtures is not None
        return self._reports.tell(asked, self._mixtures.loads_of(copy.read()))
