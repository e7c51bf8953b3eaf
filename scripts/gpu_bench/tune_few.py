"""`scripts/tune few`: products of one token (few_linear).

Launches take turns at enough copies of the weight that the L2 cache never serves one.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import torch
from few_space import Shape, candidates
from search import Search, Subject
from timer import Timer

from ringcast.kernels.gpu.few_linear import few_linear, few_linear_reference
from ringcast.kernels.gpu.few_linear_table import Config, rule

CACHE_TIMES = 3  # copies of a weight together fill the L2 cache so many times
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Few(Subject):
    """One shape."""

    def __init__(self, shape: Shape) -> None:
        self.cases: list[Shape] = [shape]

    def first_round(self, case: Shape, most: int) -> list[Config]:
        return list(candidates(case))[: most + 2]

    def second_round(self, case: Shape, best: list[Config]) -> list[Config]:
        return list(candidates(case))

    def baseline(self, case: Shape) -> Config:
        """The rule, which is what shapes that have no entry get."""
        return rule(*case[:2], case.gated)

    def floor(self, case: Shape) -> float:
        return case.rows * case.inputs * 2 / 4.3e6

    def open(self, look: bool = False) -> FewBench:
        return FewBench(self.cases[0], copies=1 if look else 0)


class FewBench:
    """copies: of the weight; 0 for enough."""

    def __init__(
        self,
        shape: Shape,
        copies: int = 0,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._pdl = device == "cuda"
        if not copies:
            size = shape.rows * shape.inputs * dtype.itemsize
            cache = torch.cuda.get_device_properties(0).L2_cache_size
            copies = max(2, -(-CACHE_TIMES * cache // size))
        weight = torch.randn(shape.rows, shape.inputs, device=device, dtype=dtype)
        weight *= shape.inputs**-0.5
        self._weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        self._x = torch.randn(1, shape.inputs, device=device, dtype=dtype)
        outputs = shape.rows // 2 if shape.gated else shape.rows
        self._out = torch.zeros(1, outputs, device=device, dtype=dtype)
        self._options: dict[str, Any] = {"activation": shape.activation}
        if "norm" in shape.parts:
            self._options["norm_weight_K"] = torch.ones(shape.inputs, device=device)
        if "add" in shape.parts:
            self._options["add_to_1N"] = self._out
        self._want: torch.Tensor | None = None

    def _product(self, weight: torch.Tensor, config: Config) -> None:
        few_linear(self._x, weight, self._out, config=config, pdl=self._pdl, **self._options)

    def launch(self, case: Shape, config: Config) -> Callable[[], object]:
        return lambda: self._product(self._weights[0], config)

    def is_right(self, case: Shape, config: Config) -> bool:
        nothing = float("nan") if "add_to_1N" not in self._options else 0.0
        if self._want is None:
            self._want = torch.zeros_like(self._out)
            few_linear_reference(
                self._x, self._weights[0], self._want, **self._options | self._added_to(self._want)
            )
        self._out.fill_(nothing)
        self._product(self._weights[0], config)
        tolerance = TOLERANCES[self._out.dtype]
        return torch.allclose(self._out, self._want, rtol=tolerance, atol=tolerance)

    def _added_to(self, stream: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"add_to_1N": stream} if "add_to_1N" in self._options else {}

    def timer(self, case: Shape, config: Config, expected: float) -> Timer:
        return Timer(self._weights, lambda weight: self._product(weight, config), expected)

    def beside(self, case: Shape) -> float:
        return 0.0


def table(search: Search, tuned: dict[Any, Any]) -> dict[Any, Any]:
    """`tuned` with what was found."""
    tuned = dict(tuned)
    for case in search.cases:
        if best := search.best(case):
            key = (case.rows, case.inputs, case.gated)
            tuned.pop(key, None)
            if best.is_worth_it:
                tuned[key] = best.config
    return tuned


def parse_shape(text: str) -> Shape:
    size, _, parts = text.partition(":")
    rows, _, inputs = size.partition("x")
    names = tuple(parts.split("+")) if parts else ()
    if unknown := set(names) - {"norm", "add", "silu", "gelu_tanh"}:
        raise ArgumentTypeError(f"{text!r}: unknown {', '.join(sorted(unknown))}")
    try:
        return Shape(int(rows), int(inputs), names)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} isn't ROWSxINPUTS[:part+part]") from None
