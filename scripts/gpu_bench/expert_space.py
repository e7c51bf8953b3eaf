"""The configurations of a mixture's products that are worth a try.

A plan is for experts that have up to so many tokens each. Its rows are those of the plan in use,
half and twice as many; for each the two products' configurations are searched by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from spaces import Limits

from ringcast.kernels.gpu.experts import (
    LARGEST_PLAN,
    PLANS,
    ExpertConfig,
    ExpertPlan,
    choose_plan,
)

ITEMSIZE = 2
GATE_UP, DOWN = 2, 1  # weights that a program of a product multiplies with
ROWS = (16, 32, 64, 128)


class Model(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    inner: int


MODELS = {
    "qwen3-30b-a3b": Model(128, 8, 2048, 768),
    "mixtral-8x7b": Model(8, 2, 4096, 14336),
}
# Of each plan: how many tokens an expert has at most, and where it is measured.
BANDS: dict[float, tuple[float, ...]] = {
    0.5: (0.0625, 0.5),
    12: (2, 8),
    32: (24,),
    96: (64,),
    512: (256,),
}


@dataclass(frozen=True)
class ExpertCase:
    """most: of BANDS. kind: GATE_UP or DOWN."""

    most: float
    rows: int
    kind: int

    def __str__(self) -> str:
        name = "gate_up" if self.kind == GATE_UP else "down"
        return f"{name}, up to {self.most} tokens an expert, {self.rows} rows"

    def points(self, names: list[str]) -> list[tuple[str, int]]:
        """Models and numbers of tokens."""
        means = BANDS[self.most]
        models = [(name, MODELS[name]) for name in names]
        found = (
            (n, max(1, round(mean * m.experts / m.chosen))) for mean in means for n, m in models
        )
        return list(dict.fromkeys(found))

    def in_use(self, limits: Limits) -> ExpertConfig:
        """That of the nearest plan with these rows."""
        near = sorted(BANDS, key=lambda most: abs(most - self.most))
        plans = [*(plan_in_use(most, limits) for most in near), *(plan for _, plan in PLANS)]
        plan = next(plan for plan in [*plans, LARGEST_PLAN] if plan.rows == self.rows)
        return plan.gate_up if self.kind == GATE_UP else plan.down

    def candidates(self, limits: Limits) -> Iterator[ExpertConfig]:
        """Those that fit."""
        rows, kind = self.rows, self.kind
        outputs = (32, 64, 128, 256) if rows >= 64 else (16, 32, 64, 128)
        for config in map(ExpertConfig._make, product(outputs, (64, 128, 256), (4, 8), (3, 4, 5))):
            wide, few, many = kind * config.outputs, rows <= 32, rows >= 64
            held = rows * wide / (config.warps * 32)  # sums of a thread
            few &= config.warps == 8 or config.block == 64 or wide > 128 or wide < 32
            many &= config.block == 256 or wide < 128 or held < 32
            shared = self.shared_bytes(config, limits)
            if held <= 128 and 40_000 <= shared <= limits.shared and not few and not many:
                yield config

    def shared_bytes(self, config: ExpertConfig, limits: Limits) -> int:
        """Of a program. Operands of a whole warp group are in it for a stage longer."""
        kept = config.stages if self.rows >= 64 else config.stages - 1
        return (self.rows + self.kind * config.outputs) * config.block * ITEMSIZE * kept


def plan_in_use(most: float, limits: Limits) -> ExpertPlan:
    return choose_plan(int(2 * most), 2, ITEMSIZE, limits.architecture)


def expert_cases(limits: Limits) -> list[ExpertCase]:
    """Of each plan in use first, then with other rows."""
    in_use = {most: plan_in_use(most, limits).rows for most in BANDS}
    found = list(in_use.items())
    others = ((most, each) for most, rows in in_use.items() for each in (rows // 2, rows * 2))
    found += [(most, rows) for most, rows in others if rows in ROWS]
    return [ExpertCase(most, rows, kind) for most, rows in found for kind in (GATE_UP, DOWN)]
