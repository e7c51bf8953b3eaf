"""A mixture of experts on processors: its weights, and the operations that take a step's rows to
the experts and back (kernels/cpu/experts.py).

All of it but the products of many rows runs on the step's tape, and these are one product for each
expert that has rows. What depends on how many tokens an expert has is read when the operations run.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ..kernels.cpu import experts as kernels
from ..kernels.cpu import linear
from ..kernels.cpu.openmp import Kernel
from .expert_routes import Routes
from .layers import Layout
from .lockstep import Replicas
from .models.llama import Experts, LlamaConfig
from .program import FEW_ROWS, ByRows, Operation
from .weights import WeightSource, take_experts


def expert_kernels(layout: Layout) -> list[Kernel]:
    """What Mixture binds, beside linear layers and the activation."""
    product = kernels.tile_experts if layout.tiled else kernels.row_experts
    return [
        kernels.route_kernel,
        kernels.dispatch_kernel,
        kernels.gather_kernel,
        product,
        kernels.combine_kernel,
    ]


class ExpertBuffers:
    """What the mixtures of a model share, for steps of `tokens`.

    used: the number of slots of the step, int64 [1]. turn: which replica of an expert comes first
    in the step, int64 [1].
    """

    def __init__(
        self,
        layout: Layout,
        experts: Experts,
        hidden_size: int,
        tokens: int,
        replicas: Replicas | None = None,
    ) -> None:
        """tokens: of each of the replicas, where these step together."""
        self.replicas = replicas
        if replicas is not None:
            all_width = replicas.num * layout.padded(hidden_size)
            self.all_x_PNH = torch.zeros(tokens, all_width, dtype=layout.dtype)
            self.all_y_PNH = torch.zeros(tokens, all_width)
            tokens *= replicas.num
        pad, dtype, slots = layout.padded, layout.dtype, tokens * experts.chosen
        self.logits_TE = torch.zeros(tokens, pad(experts.num))
        self.experts_TC = torch.zeros(tokens, experts.chosen, dtype=torch.int32)
        self.weights_TC = torch.zeros(tokens, experts.chosen)
        self.slots_TC = torch.zeros(tokens, experts.chosen, dtype=torch.int32)
        self.tokens_S = torch.zeros(slots, dtype=torch.int32)
        self.offsets = np.zeros(experts.held + 1, np.int64)
        self.used, self.turn = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.seen = np.zeros(experts.num, np.int64)
        self.x_SH = torch.zeros(slots, pad(hidden_size), dtype=dtype)
        self.gate_up_SN = torch.zeros(slots, pad(2 * experts.inner_size))
        self.inner_SI = torch.zeros(slots, pad(experts.inner_size), dtype=dtype)
        self.y_SH = torch.zeros(slots, pad(hidden_size))


class ExpertLinear:
    """y = x W', where each expert has a W of its own and its rows of x in one piece."""

    def __init__(self, layout: Layout, experts: Experts) -> None:
        self._layout, self._experts = layout, experts
        self.weight = torch.empty(0)

    def put(self, number: int, weight: torch.Tensor) -> None:
        """The weight [outputs, inputs] of one of the experts that are held."""
        packed = self._pack(weight.to(self._layout.dtype))
        if not number:
            self.weight = torch.empty(self._experts.held, *packed.shape, dtype=packed.dtype)
        self.weight[number] = packed

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Tiles, or rows of padded width. Where other layers' weights are widened in registers, an
        expert's are float32: no kernel of theirs does that.
        """
        layout = self._layout
        if layout.tiled:
            return layout.pack(weight)
        missing = [layout.padded(size) - size for size in weight.shape]
        return F.pad(weight, (0, missing[1], 0, missing[0])) if any(missing) else weight

    def bind(self, buffers: ExpertBuffers, x: torch.Tensor, y: torch.Tensor) -> Operation:
        """x [S, padded inputs] -> y float32 [S, padded outputs]."""
        common = {
            "offsets": buffers.offsets,
            "x": x,
            "weight": self.weight,
            "y": y,
            "inner": x.shape[1],
            "outer": y.shape[1],
            "held": self._experts.held,
        }
        if self._layout.tiled:
            configurations = linear.CONFIGURATIONS
            return kernels.tile_experts.bind(x.dtype, **common, configurations=configurations)
        few = kernels.row_experts.bind(x.dtype, **common, element_bytes=x.itemsize)
        if self._layout.deterministic:
            return few
        most_few = FEW_ROWS * self._experts.num // self._experts.chosen

        def run_many(tokens: int) -> None:
            if tokens <= most_few:
                few()
            else:
                self._products(buffers.offsets, x, y)

        return ByRows(few, run_many)

    def _products(self, offsets: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> None:
        for e in np.flatnonzero(np.diff(offsets)).tolist():
            rows = slice(int(offsets[e]), int(offsets[e + 1]))
            if x.dtype == torch.float32:
                torch.mm(x[rows], self.weight[e].T, out=y[rows])
            else:
                y[rows] = F.linear(x[rows], self.weight[e])


def _with_rows(rows: np.ndarray, operation: Operation) -> Operation:
    """It goes by this number of rows, not by the program's."""
    if not isinstance(operation, ByRows):
        return operation

    def run(_: int) -> None:
        if rows[0] <= FEW_ROWS:
            operation.few()
        else:
            operation.many(int(rows[0]))

    return ByRows(run, run)


class Mixture:
    """The experts of one layer, and their router. loads: how many tokens each has had, of all
    ranks', int64 [E].
    """

    def __init__(
        self, c: LlamaConfig, layout: Layout, source: WeightSource, layer: str, routes: Routes
    ) -> None:
        assert c.experts is not None
        self.routes, self.loads_E = routes, np.zeros(c.experts.num, np.int64)
        layout.check_experts()
        self._c, self._layout, self._experts = c, layout, c.experts
        name = f"{layer}{c.experts.block}gate.weight"
        self._router = layout.linear([source.take(name, (c.experts.num, c.hidden_size))])
        self._gate_up = ExpertLinear(layout, c.experts)
        self._down = ExpertLinear(layout, c.experts)
        for i, (gate, up, down) in enumerate(take_experts(source, c.experts, c.hidden_size, layer)):
            self._gate_up.put(i, torch.cat([gate, up]))
            self._down.put(i, down)

    @property
    def weights(self) -> list[torch.Tensor]:
        """Of the experts, by slot."""
        return [self._gate_up.weight, self._down.weight]

    @property
    def num_bytes(self) -> int:
        return self._router.num_bytes + self._gate_up.weight.nbytes + self._down.weight.nbytes

    def bind_for_all(
        self, x_TH: torch.Tensor, buffers: ExpertBuffers, activation: Kernel
    ) -> list[Operation]:
        """The same for the tokens of all replicas, each rank with its experts, and added up by
        all. The results of this one are replicas.own_rows of buffers.all_y_PNH.
        """
        replicas, x_PNH, y_PNH = buffers.replicas, buffers.all_x_PNH, buffers.all_y_PNH
        assert replicas is not None
        width = x_TH.shape[1]
        all_x, all_y = x_PNH.view(-1, width), y_PNH.view(-1, width)
        operations = self.bind(replicas.rows, all_x, buffers, activation, all_y)
        return [
            *replicas.gather(x_TH, x_PNH),
            *(_with_rows(replicas.rows, operation) for operation in operations),
            *replicas.all.sum(replicas.rows, all_y),
        ]

    def bind(
        self,
        rows: np.ndarray,
        x_TH: torch.Tensor,
        buffers: ExpertBuffers,
        activation: Kernel,
        out_TH: torch.Tensor,
    ) -> list[Operation]:
        """x [T, padded hidden] -> out float32 [T, padded hidden]."""
        e, dtype, b, routes = self._experts, self._layout.dtype, buffers, self.routes
        return [
            *self._router.bind(rows, x_TH, b.logits_TE),
            kernels.route_kernel.bind(
                dtype,
                rows=rows,
                logits=b.logits_TE,
                experts=b.experts_TC,
                weights=b.weights_TC,
                num=e.num,
                stride=b.logits_TE.shape[1],
                chosen=e.chosen,
                renormalize=e.renormalize,
            ),
            *([b.replicas.pad(b.experts_TC)] if b.replicas is not None else []),
            kernels.dispatch_kernel.bind(
                dtype,
                rows=rows,
                experts=b.experts_TC,
                slots=b.slots_TC,
                tokens=b.tokens_S,
                offsets=b.offsets,
                used=b.used,
                turn=b.turn,
                counts=routes.counts_E,
                places=routes.places_ER,
                seen=b.seen,
                load=self.loads_E,
                chosen=e.chosen,
                num=e.num,
                most=routes.places_ER.shape[1],
                held=e.held,
            ),
            kernels.gather_kernel.bind(
                dtype,
                rows=b.used,
                tokens=b.tokens_S,
                x=x_TH,
                out=b.x_SH,
                width=x_TH.shape[1],
                element_bytes=x_TH.itemsize,
            ),
            self._gate_up.bind(b, b.x_SH, b.gate_up_SN),
            activation.bind(
                dtype,
                rows=b.used,
                gate_up=b.gate_up_SN,
                out=b.inner_SI,
                size=e.inner_size,
                stride=b.gate_up_SN.shape[1],
                out_bytes=b.inner_SI.stride(0) * b.inner_SI.itemsize,
            ),
            self._down.bind(b, b.inner_SI, b.y_SH),
            kernels.combine_kernel.bind(
                dtype,
                rows=rows,
                y=b.y_SH,
                slots=b.slots_TC,
                weights=b.weights_TC,
                out=out_TH,
                width=out_TH.shape[1],
                chosen=e.chosen,
            ),
        ]
