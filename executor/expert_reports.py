"""What a worker says of its experts: how many tokens each has had, and how even the ranks' loads
were. The counts are the operations' own (kernels/cpu/experts.py); here they are only read.
"""

from __future__ import annotations

import numpy as np

from ..mq.eplb_config import EplbConfig
from ..mq.messages import ExpertLoads
from .expert_balancer import ExpertBalancer
from .expert_placement import balancedness
from .experts import Mixture

REPORT_SECONDS = 0.1


class ExpertReports:
    """mixtures: by the number of their layer. balancer: None without one."""

    def __init__(
        self, mixtures: dict[int, Mixture], balancer: ExpertBalancer | None, config: EplbConfig
    ) -> None:
        self._mixtures, self._balancer, self._config = mixtures, balancer, config
        self._said_at = -np.inf
        self._said_LE = self._logged_LE = self._loads()
        self._steps = 0
        self._notices: list[str] = []

    def read(self, now: float, at_once: bool) -> ExpertLoads | None:
        """A report, if one is due, or if there is something new and it is wanted at once."""
        if not at_once and now - self._said_at < REPORT_SECONDS:
            return None
        loads_LE = self._loads()
        new_LE, balancer = loads_LE - self._said_LE, self._balancer
        if not new_LE.any():
            return None
        self._said_at, self._said_LE = now, loads_LE
        report = ExpertLoads([*self._mixtures], loads_LE.tobytes(), self._balancedness(new_LE))
        if balancer is None:
            return report
        return ExpertLoads(
            report.layers,
            report.tokens,
            report.balancedness,
            balancer.rounds,
            balancer.moved,
            balancer.seconds,
            balancer.most_seconds,
        )

    def count_step(self) -> None:
        """After each step in which any of the ranks had tokens."""
        self._steps += 1
        config = self._config
        if not config.log_balancedness or self._steps % config.log_balancedness_interval:
            return
        loads_LE = self._loads()
        even = self._balancedness(loads_LE - self._logged_LE)
        self._logged_LE = loads_LE
        if even is not None:
            self._notices.append(f"experts: step {self._steps}, balancedness {even:.3f}")

    def notices(self) -> list[str]:
        """What has been logged since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def _loads(self) -> np.ndarray:
        return np.stack([mixture.routes.loads_E for mixture in self._mixtures.values()])

    def _balancedness(self, loads_LE: np.ndarray) -> float | None:
        placements = np.stack([m.routes.placement_RS for m in self._mixtures.values()])
        return balancedness(loads_LE, placements) if placements.shape[1] > 1 else None
