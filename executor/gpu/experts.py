"""A mixture of experts on a CUDA device: its weights, what its launches share, and their order.

Which experts a token has is only known on the device, so every grid is for as many blocks as there
can be (kernels/gpu/expert_routing.py), and a decode step can be captured in a graph.

A rank of several has a part of each expert, or some experts whole (sharding.py). Either way it
routes all tokens, and makes its part of the layer's sum of them: pairs of experts that it doesn't
have are given no slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.gpu.expert_routing import dispatch, is_direct, make_blocks, route
from ...kernels.gpu.experts import (
    ExpertPlan,
    choose_plan,
    combine,
    expert_down,
    expert_gate_up,
    num_blocks,
)
from ..models.llama import Experts
from .linears import Linear


class ExpertWeights(NamedTuple):
    """Of one layer: those experts that are held. E: experts, I: inner size of one."""

    router: Linear
    gate_up_ENH: torch.Tensor
    down_EHI: torch.Tensor


class ExpertRunner:
    """Runs a layer's experts on up to `tokens` tokens of each of the replicas that share them, on
    buffers that all layers share.
    """

    def __init__(
        self,
        experts: Experts,
        activation: str,
        hidden_size: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        replicas: int = 1,
    ) -> None:
        self._experts, self._activation, self._itemsize = experts, activation, dtype.itemsize
        self._replicas = replicas
        tokens *= replicas
        counts = [self._count(n) for n in range(1, tokens + 1)]
        slots = max(count * self._plan(n + 1).rows for n, count in enumerate(counts))

        def buffer(rows: int, size: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(rows, size, dtype=kind, device=device)

        self._blocks = make_blocks(max(counts), slots, experts.held, device)
        self._logits_TE = buffer(tokens, experts.num)
        self._experts_TC = buffer(tokens, experts.chosen, torch.int32)
        self._weights_TC = buffer(tokens, experts.chosen, torch.float32)
        self._inner_SI = buffer(slots, experts.inner_size)
        self._y_PH = buffer(tokens * experts.chosen, hidden_size)

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
        num_tokens_N: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """x -> out, to which add_to is added. num_tokens: as `route` has it."""
        e, tokens = self._experts, len(x_TH)
        plan, count = self._plan(tokens), self._count(tokens)
        logits_TE, experts_TC, weights_TC = (
            each[:tokens] for each in (self._logits_TE, self._experts_TC, self._weights_TC)
        )
        here = {"first": e.first, "held": e.held}
        weights.router.into(x_TH, logits_TE)
        route(
            logits_TE,
            experts_TC,
            weights_TC,
            renormalize=e.renormalize,
            num_tokens_N=num_tokens_N,
            blocks=self._blocks if is_direct(tokens) else None,
            rows=plan.rows,
            **here,
            pdl=pdl,
        )
        if not is_direct(tokens):
            dispatch(experts_TC, self._blocks, rows=plan.rows, **here, pdl=pdl)
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
        combine(self._y_PH, experts_TC, out_TH, **here, add_to_TH=add_to_TH, pdl=pdl)

    def _plan(self, tokens: int) -> ExpertPlan:
        return choose_plan(tokens * self._experts.chosen, self._experts.num, self._itemsize)

    def _count(self, tokens: int) -> int:
        e = self._experts
        return num_blocks(tokens, e.chosen, e.held, self._plan(tokens).rows)
