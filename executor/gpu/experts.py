"""A mixture of experts on a CUDA device: its weights, what its launches share, and their order.

Which experts a token has is only known on the device, so every grid is for as many blocks as there
can be (kernels/gpu/expert_routing.py), and a decode step can be captured in a graph.

A rank of several has a part of each expert, or some experts whole (sharding.py). Either way it
routes all tokens, and makes its part of the layer's sum of them: pairs of experts that it doesn't
have are given no slot. So each rank counts all tokens, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...kernels.gpu.architecture import architecture_of
from ...kernels.gpu.expert_routing import Routes as DeviceRoutes
from ...kernels.gpu.expert_routing import dispatch, is_direct, make_blocks, route
from ...kernels.gpu.experts import (
    ExpertPlan,
    choose_plan,
    combine,
    expert_down,
    expert_gate_up,
    num_blocks,
)
from ..expert_routes import Routes
from ..models.llama import LlamaConfig
from ..sharding import Sharding
from .linears import Linear

# Numbers that a layer's part of a table is a multiple of: so that kernels see all alike aligned.
ALIGNMENT = 16


class ExpertWeights(NamedTuple):
    """Of one layer: those experts that are held. number: of the layer among those with experts that
    are here. E: experts, I: inner size of one.
    """

    router: Linear
    gate_up_ENH: torch.Tensor
    down_EHI: torch.Tensor
    number: int


class Mixtures:
    """Those of a worker, what their kernels count, and what they read.

    rank: among those that experts are dealt to. layers: their numbers. routes: of each, as the host
    has it. loads: how many tokens each expert
    has had, int64 [L, E], and then what makes a layer's part a multiple of ALIGNMENT.
    """

    def __init__(
        self, sparse: dict[int, ExpertWeights], sharding: Sharding, device: torch.device
    ) -> None:
        """sparse: by the number of the layer."""
        experts, placement, count = sharding.local.experts, sharding.placement, len(sparse)
        assert experts is not None
        self.layers, self.weights, self._num = [*sparse], [*sparse.values()], experts.num
        self.rank = sharding.place
        self.routes = [Routes(experts.num, placement, self.rank) for _ in sparse]
        self.loads_LE = torch.zeros(count, _aligned(experts.num), dtype=torch.int64, device=device)
        self._is_dealt, self._columns = len(placement) > 1, 1 + len(placement)
        numbers = (count, _aligned(experts.num * self._columns) if self._is_dealt else 0)
        self._tables = torch.zeros(numbers, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self._sources = torch.zeros(numbers, dtype=torch.int32, pin_memory=on_gpu)
        for number in range(count):
            self._write(number)

    def loads_of(self, copied: np.ndarray) -> np.ndarray:
        """int64 [L, E] of what `loads_LE` was on the device."""
        return copied[:, : self._num].copy()

    def take(self, number: int, placement_RS: np.ndarray) -> None:
        """Of a layer, from the next step on. Once that step is over it can take another."""
        self.routes[number].take(placement_RS)
        self._write(number)

    def _write(self, number: int) -> None:
        if not self._is_dealt:
            return
        routes, source = self.routes[number], self._sources[number]
        table_EC = np.column_stack([routes.counts_E, routes.places_ER])
        source[: table_EC.size] = torch.from_numpy(table_EC.ravel())
        self._tables[number].copy_(source, non_blocking=True)

    def on_device(
        self, number: int, turn_1: torch.Tensor
    ) -> tuple[torch.Tensor, DeviceRoutes | None]:
        """A layer's loads and routes, as `route` takes them."""
        loads_E = self.loads_LE[number, : self._num]
        if not self._is_dealt:
            return loads_E, None
        table = self._tables[number, : self._num * self._columns]
        return loads_E, DeviceRoutes(table.view(self._num, self._columns), turn_1)


class ExpertRunner:
    """Runs a layer's experts on up to `tokens` tokens of each of the replicas that share them, on
    buffers that all layers share.
    """

    def __init__(
        self,
        c: LlamaConfig,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        mixtures: Mixtures,
        turn_1: torch.Tensor,
        num_tokens_N: torch.Tensor,
    ) -> None:
        """turn, num_tokens: of each step, int32, as `route` has them."""
        experts, replicas = c.experts, len(num_tokens_N)
        assert experts is not None
        self._num_tokens_N = num_tokens_N
        self._tables = [mixtures.on_device(n, turn_1) for n in range(len(mixtures.layers))]
        self._experts, self._activation, self._itemsize = experts, c.activation, dtype.itemsize
        self._architecture, self._replicas = architecture_of(device), replicas
        tokens *= replicas
        counts = [self._count(n) for n in range(1, tokens + 1)]
        slots = max(count * self._plan(n + 1).rows for n, count in enumerate(counts))

        def buffer(rows: int, size: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(rows, size, dtype=kind, device=device)

        self._blocks = make_blocks(max(counts), slots, experts.held, device)
        self._logits_TE = buffer(tokens, experts.num)
        self._places_TC = buffer(tokens, experts.chosen, torch.int32)
        self._weights_TC = buffer(tokens, experts.chosen, torch.float32)
        self._inner_SI = buffer(slots, experts.inner_size)
        self._y_PH = buffer(tokens * experts.chosen, c.hidden_size)

    def steps(self, most: int) -> list[int]:
        """Numbers of a replica's tokens up to `most`, one for each way of computing them."""
        numbers = range(1, most + 1)
        all_tokens = [n * self._replicas for n in numbers]
        ways = {(is_direct(t), self._plan(t)): n for n, t in zip(numbers, all_tokens, strict=True)}
        return sorted(ways.values())

    def run(
        self,
        weights: ExpertWeights,
        x_TH: torch.Tensor,
        out_TH: torch.Tensor,
        *,
        add_to_TH: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """x -> out, to which add_to is added."""
        e, tokens = self._experts, len(x_TH)
        plan, count = self._plan(tokens), self._count(tokens)
        logits_TE, places_TC, weights_TC = (
            each[:tokens] for each in (self._logits_TE, self._places_TC, self._weights_TC)
        )
        loads_E, routes = self._tables[weights.number]
        weights.router.into(x_TH, logits_TE)
        route(
            logits_TE,
            places_TC,
            weights_TC,
            renormalize=e.renormalize,
            num_tokens_N=self._num_tokens_N,
            routes=routes,
            loads_E=loads_E,
            blocks=self._blocks if is_direct(tokens) else None,
            rows=plan.rows,
            pdl=pdl,
        )
        if not is_direct(tokens):
            dispatch(places_TC, self._blocks, rows=plan.rows, held=e.held, pdl=pdl)
        expert_gate_up(
            x_TH,
            weights.gate_up_ENH,
            self._blocks,
            self._inner_SI,
            self._activation,
            chosen=e.chosen,
            rows=plan.rows,
            count=count,
            config=plan.gate_up,
            pdl=pdl,
        )
        expert_down(
            self._inner_SI,
            weights.down_EHI,
            self._blocks,
            weights_TC,
            self._y_PH,
            rows=plan.rows,
            count=count,
            config=plan.down,
            pdl=pdl,
        )
        combine(self._y_PH, places_TC, out_TH, add_to_TH=add_to_TH, pdl=pdl)

    def _plan(self, tokens: int) -> ExpertPlan:
        e = self._experts
        return choose_plan(tokens * e.chosen, e.num, self._itemsize, self._architecture)

    def _count(self, tokens: int) -> int:
        e = self._experts
        return num_blocks(tokens, e.chosen, e.held, self._plan(tokens).rows)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
