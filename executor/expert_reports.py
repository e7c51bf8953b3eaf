"""What a worker says of its experts: how many tokens each has had, and how even the ranks' loads
were. The counts are the kernels' own (kernels/cpu/experts.py, kernels/gpu/expert_routing.py).

Counts that lie on a device come later than they are asked for. So `ask` says after a step whether
they are wanted as they are then, and `tell` takes them when they are here, in the order of steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..mq.eplb_config import EplbConfig
from ..mq.messages import ExpertLoads
from .expert_balancer import ExpertBalancer
from .expert_placement import balancedness
from .expert_routes import Routes

REPORT_SECONDS = 0.1


class Asked(NamedTuple):
    """Of one step. reports: it goes into its output. logs: its number is told to people."""

    step: int
    reports: bool
    logs: bool
    placement_LRS: np.ndarray


class ExpertReports:
    """routes: by the number of their layer. balancer: None without one."""

    def __init__(
        self, routes: dict[int, Routes], balancer: ExpertBalancer | None, config: EplbConfig
    ) -> None:
        self._routes, self._balancer, self._config = routes, balancer, config
        self._asked_at = -np.inf
        self._said_LE = self._logged_LE = np.zeros(1, np.int64)
        self._steps = 0
        self.has_news = False
        self._notices: list[str] = []

    def ask(self, now: float, any_tokens: bool) -> Asked | None:
        """After each step. any_tokens: whether any of the ranks had some; if none had, nothing
        follows, and what isn't said yet is due.
        """
        config, logs = self._config, False
        if any_tokens:
            self._steps += 1
            self.has_news = True
            due = self._steps % config.log_balancedness_interval == 0
            logs = config.log_balancedness and due
        is_time = not any_tokens or now - self._asked_at >= REPORT_SECONDS
        reports = self.has_news and is_time
        if not (reports or logs):
            return None
        if reports:
            self._asked_at, self.has_news = now, False
        placements = [routes.placement_RS for routes in self._routes.values()]
        return Asked(self._steps, reports, logs, np.stack(placements))

    def tell(self, asked: Asked, loads_LE: np.ndarray) -> ExpertLoads | None:
        """loads: int64 [L, E], of all steps so far. Returns the report, if one was asked for."""
        if asked.logs:
            even = _balancedness(loads_LE - self._logged_LE, asked.placement_LRS)
            self._logged_LE = loads_LE
            if even is not None:
                self._notices.append(f"experts: step {asked.step}, balancedness {even:.3f}")
        if not asked.reports:
            return None
        even = _balancedness(loads_LE - self._said_LE, asked.placement_LRS)
        self._said_LE = loads_LE
        report = ExpertLoads([*self._routes], loads_LE.tobytes(), even)
        if self._balancer is None:
            return report
        b = self._balancer
        counts = b.rounds, b.moved, b.seconds, b.most_seconds
        return ExpertLoads(report.layers, report.tokens, report.balancedness, *counts)

    def notices(self) -> list[str]:
        """What has been logged since the last call."""
        notices, self._notices = self._notices, []
        return notices


def _balancedness(loads_LE: np.ndarray, placement_LRS: np.ndarray) -> float | None:
    return balancedness(loads_LE, placement_LRS) if placement_LRS.shape[1] > 1 else None
