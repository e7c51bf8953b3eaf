"""`scripts/tune attention`: decode and prefill attention.

A configuration serves batches of any kind and, by its key, several models. So what is measured is
the geometric mean of some batches' times, with the queries of each model that has the key.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from attention_inputs import (
    Caches,
    Decode,
    Prefill,
    contexts_of,
    make_caches,
    make_decode,
    make_prefill,
    pairs,
)
from attention_space import Case, DecodeCase, Model
from search import Search, Subject
from spaces import Limits, first_round, second_round
from timer import MeanTimer, Timer

from ringcast.kernels.gpu.decode_attention import decode_attention_reference
from ringcast.kernels.gpu.prefill_attention import prefill_attention_reference

DECODE_BATCHES = ("8x800", "64x96", "64xmixed", "256x800")
PREFILL_BATCHES = ("4x2048", "4x1024+1024", "1x8192")
# What results are checked with: contexts, and of how many query tokens.
CHECKED = (
    np.array([0, 1, 15, 16, 17, 100, 129, 800, 1500, 4500]),
    np.array([0, 1, 15, 1, 17, 70, 129, 300, 513, 200]),
)
BLOCK_SIZE = 64
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
Point = tuple[Model, str]


class Attention(Subject):
    """One entry of a table. names: of attention_space's MODELS."""

    def __init__(self, case: Case, names: list[str], limits: Limits) -> None:
        self.cases: list[Case] = [case]
        self._limits, self._models = limits, case.points(names)
        batches = DECODE_BATCHES if isinstance(case, DecodeCase) else PREFILL_BATCHES
        self._points: list[Point] = [(m, batch) for batch in batches for m in self._models]
        self._floors = [floor(case, *point) for point in self._points]

    def first_round(self, case: Case, most: int) -> list[Any]:
        return first_round(case, self._limits, most)

    def second_round(self, case: Case, best: list[Any]) -> list[Any]:
        return second_round(case, self._limits, best)

    def baseline(self, case: Case) -> Any:
        return case.in_use(self._limits)

    def floor(self, case: Case) -> float:
        return geometric_mean(self._floors)

    def open(self, look: bool = False) -> AttentionBench:
        points = [] if look else self._points
        return AttentionBench(self.cases[0], self._models, points, self._floors)


class AttentionBench:
    """floors: of the points, microseconds. checked: contexts and query tokens."""

    def __init__(
        self,
        case: Case,
        models: list[Model],
        points: list[Point],
        floors: list[float],
        checked: tuple[np.ndarray, np.ndarray] = CHECKED,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._case, self._device, self._dtype, self._floors = case, device, dtype, floors
        self._pdl = device == "cuda"
        shared = {(m[1:3], b): self._caches(m, contexts_of(b)[0], 0) for m, b in points}
        self._points = [self._inputs(m, shared[m[1:3], b], contexts_of(b)[1]) for m, b in points]
        self._checked = [
            self._inputs(m, self._caches(m, checked[0], 1), checked[1]) for m in models
        ]
        self._wants: list[torch.Tensor] = []

    def _caches(self, model: Model, contexts: np.ndarray, layers: int) -> Caches:
        case, dtype = self._case, self._dtype
        if isinstance(case, DecodeCase) and case.element_size == 1:
            dtype = torch.float8_e4m3fn
        shape = (model.kv_heads, model.head_size, BLOCK_SIZE)
        return make_caches(contexts, *shape, dtype, self._device, layers)

    def _inputs(self, model: Model, caches: Caches, lengths: np.ndarray) -> Decode | Prefill:
        if isinstance(self._case, DecodeCase):
            return make_decode(model, caches, self._dtype)
        return make_prefill(model, caches, lengths, self._dtype)

    def launch(self, case: Case, config: Any) -> Callable[[], object]:
        return lambda: [each.launcher(config, self._pdl)(0) for each in self._checked]

    def is_right(self, case: Case, config: Any) -> bool:
        self._wants = self._wants or [want(inputs) for inputs in self._checked]
        for inputs in self._checked:
            inputs.out.fill_(float("nan"))
        self.launch(case, config)()
        tolerance = TOLERANCES[self._dtype]
        return all(
            torch.allclose(inputs.out, expected, rtol=tolerance, atol=tolerance)
            for inputs, expected in zip(self._checked, self._wants, strict=True)
        )

    def timer(self, case: Case, config: Any, expected: float) -> MeanTimer:
        longer = expected / geometric_mean(self._floors)
        return MeanTimer(
            [
                Timer(range(len(p.caches.layers)), p.launcher(config, self._pdl), longer * least)
                for p, least in zip(self._points, self._floors, strict=True)
            ]
        )

    def beside(self, case: Case) -> float:
        return 0.0


def want(inputs: Decode | Prefill) -> torch.Tensor:
    """The reference's results."""
    m, caches, out = inputs.model, inputs.caches, torch.zeros_like(inputs.out)
    how = {"scale": m.head_size**-0.5, "kv_heads": m.kv_heads, "window": m.window}
    before = (inputs.q, *caches.layers[0], caches.tables, caches.rows)
    if isinstance(inputs, Decode):
        decode_attention_reference(*before, caches.context, None, out, None, **how)
    else:
        prefill_attention_reference(*before, inputs.starts, caches.context, None, out, **how)
    return out


def floor(case: Case, model: Model, batch: str) -> float:
    """Microseconds that a batch takes at least."""
    contexts, lengths = contexts_of(batch)
    if isinstance(case, DecodeCase):
        elements = 2 * contexts.sum() * model.kv_heads * model.head_size
        return float(elements * case.element_size / 4.3e6)
    return 4 * model.heads * model.head_size * pairs(contexts, lengths, model.window) / 790e6


def table(search: Search, tuned: dict[Any, Any], limits: Limits, kind: type) -> dict[Any, Any]:
    """`tuned`, of one kind of case, with what was found."""
    tuned = {architecture: dict(entries) for architecture, entries in tuned.items()}
    entries = tuned.setdefault(limits.architecture, {})
    for case in search.cases:
        best = search.best(case) if isinstance(case, kind) else None
        if best:
            entries[case.key] = tuple(best.config if best.is_worth_it else case.in_use(limits))
    tuned[limits.architecture] = dict(sorted(entries.items()))
    return {architecture: entries for architecture, entries in sorted(tuned.items()) if entries}
