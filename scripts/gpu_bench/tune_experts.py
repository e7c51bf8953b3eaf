"""`scripts/tune experts`: the two products of a mixture of experts.

A plan serves all models. So what is measured is the geometric mean of the times of some.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

import torch
from expert_space import BANDS, DOWN, GATE_UP, MODELS, ExpertCase, expert_cases, plan_in_use
from experts import Case as Layer
from experts import make_weights
from search import MARGIN, Search, Subject
from spaces import Limits, first_round, second_round
from timer import MeanTimer, Timer

from ringcast.kernels.gpu.experts import ExpertConfig, ExpertPlan

TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Experts(Subject):
    """All plans, for the models of these names."""

    def __init__(self, names: list[str], limits: Limits) -> None:
        self.cases: list[ExpertCase] = expert_cases(limits)
        self._names, self._limits = names, limits

    def first_round(self, case: ExpertCase, most: int) -> list[Any]:
        return first_round(case, self._limits, most)

    def second_round(self, case: ExpertCase, best: list[Any]) -> list[Any]:
        return second_round(case, self._limits, best)

    def baseline(self, case: ExpertCase) -> ExpertConfig:
        return case.in_use(self._limits)

    def floor(self, case: ExpertCase) -> float:
        return geometric_mean(
            floor(case.kind, name, tokens) for name, tokens in case.points(self._names)
        )

    def open(self, look: bool = False) -> ExpertBench:
        return ExpertBench(self._names, look)


class ExpertBench:
    def __init__(
        self,
        names: list[str],
        look: bool = False,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._names, self._look, self._dtype = names, look, dtype
        self._weights = {name: make_weights(MODELS[name], device, dtype) for name in names}
        self._case: ExpertCase | None = None
        self._layers: list[Layer] = []
        self._wants: list[torch.Tensor] = []

    def _of(self, case: ExpertCase) -> list[Layer]:
        """A layer for each point."""
        if case != self._case:
            self._case, self._wants = case, []
            self._layers = [
                Layer(MODELS[name], tokens, case.rows, self._weights[name], not self._look)
                for name, tokens in case.points(self._names)
            ]
        return self._layers

    def launch(self, case: ExpertCase, config: ExpertConfig) -> Callable[[], object]:
        layers = self._of(case)

        def once() -> None:
            for layer in layers:
                if self._look:
                    layer.route(layer.sets[0], False)
                layer.multiply(case.kind, config, layer.sets[0])

        return once

    def is_right(self, case: ExpertCase, config: ExpertConfig) -> bool:
        """Slots of padding must stay what they were, too: no number."""
        layers, kind, tolerance = self._of(case), case.kind, TOLERANCES[self._dtype]
        self._wants = self._wants or [result(layer, kind, None) for layer in layers]
        for layer, want in zip(layers, self._wants, strict=True):
            got = result(layer, kind, config)
            if not torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True):
                return False
        return True

    def timer(self, case: ExpertCase, config: ExpertConfig, expected: float) -> MeanTimer:
        points = case.points(self._names)
        floors = [floor(case.kind, *point) for point in points]
        longer, timers = expected / geometric_mean(floors), []
        for layer, least in zip(self._of(case), floors, strict=True):

            def launch(step: tuple, layer: Layer = layer) -> None:
                layer.multiply(case.kind, config, step)

            timers.append(Timer(layer.sets, launch, longer * least))
        return MeanTimer(timers)

    def beside(self, case: ExpertCase) -> float:
        return 0.0


def result(layer: Layer, kind: int, config: ExpertConfig | None) -> torch.Tensor:
    """Of the first step; by the reference where there is no configuration."""
    out = torch.full_like(layer.inner if kind == GATE_UP else layer.y, float("nan"))
    layer.product(kind, config, layer.sets[0], out)
    return out


def floor(kind: int, name: str, tokens: int) -> float:
    """Microseconds, roughly: experts are taken to be chosen at random."""
    m = MODELS[name]
    used = m.experts * (1 - (1 - m.chosen / m.experts) ** tokens)
    size = kind * m.hidden * m.inner
    return max(used * size * 2 / 4.3e6, 2.0 * tokens * m.chosen * size / 790e6)


def table(search: Search, tuned: dict[Any, Any], limits: Limits) -> dict[Any, Any]:
    """`tuned` with what was found: of each band the rows with the least sum of both products."""
    if not any(search.best(case) for case in search.cases):
        return tuned
    in_use = {most: plan_in_use(most, limits) for most in BANDS}
    plans = {most: _fields(best_plan(search, most, plan)) for most, plan in in_use.items()}
    return dict(sorted((tuned | {limits.architecture: plans}).items()))


def best_plan(search: Search, most: float, in_use: ExpertPlan) -> ExpertPlan:
    """The one in use, unless another one is faster by more than MARGIN."""
    sums = {}
    for rows in dict.fromkeys(case.rows for case in search.cases if case.most == most):
        cases = [ExpertCase(most, rows, kind) for kind in (GATE_UP, DOWN)]
        gate_up, down = (search.best(case) for case in cases)
        if gate_up and down:
            plan = ExpertPlan(rows, gate_up.config, down.config)
            sums[plan] = gate_up.taken + down.taken
            if rows == in_use.rows:
                sums[in_use] = gate_up.baseline + down.baseline
    if in_use not in sums:
        return in_use
    fastest = min(sums, key=sums.__getitem__)
    return fastest if sums[fastest] < (1 - MARGIN) * sums[in_use] else in_use


def _fields(plan: ExpertPlan) -> tuple[Any, ...]:
    return plan.rows, tuple(plan.gate_up), tuple(plan.down)
