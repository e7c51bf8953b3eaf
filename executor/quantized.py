"""Linear layers with quantised weights (kernels/cpu/quantize.py): int8 and int4.

Activations are quantised too, each row by itself, in a kernel before each product. What quantises
them is the precision of the server; the number of rows chooses only between kernels that give the
same bits.

int8: a scale for each output and for each row of activations, sums in int32.
int4: a scale for each 32 inputs, of weights and of activations, sums in int32 within them. The
output layer has 8 bits: with 4 it costs more quality than it saves time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..kernels.cpu import embedding, int4_linear, int8_linear, linear, quantize, tiles, vectors
from ..kernels.cpu.openmp import Kernel
from .layers import Layout, Linear
from .program import Operation

BITS = {"int8": 8, "int4": 4}


def make_layout(dtype: torch.dtype, quantization: str) -> Layout:
    return QuantizedLayout(dtype, BITS[quantization]) if quantization in BITS else Layout(dtype)


class QuantizedLayout(Layout):
    """Of the linear layers; the embedding stays in rows of `dtype`."""

    def __init__(self, dtype: torch.dtype, bits: int) -> None:
        super().__init__(dtype)
        self.tiled = False
        self.bits = bits
        self._buffers: dict[tuple[int, int, int], _Rows] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        if tiles.bytes_available() and vectors.products_available():
            self._how, self.int8 = "matrix tiles (AMX)", int8_linear.int8_tile_linear
            self.int4 = int4_linear.int4_tile_linear
        elif vectors.products_available():
            self._how, self.int8 = "vectors (VNNI)", int8_linear.int8_vector_linear
            self.int4 = int4_linear.int4_vector_linear
        else:
            self._how, self.int8 = "plain arithmetic", int8_linear.int8_plain_linear
            self.int4 = int4_linear.int4_plain_linear

    def padded(self, size: int) -> int:
        return quantize.padded(size)

    def linear(
        self,
        parts: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] = (),
        is_head: bool = False,
    ) -> QuantizedLinear:
        return QuantizedLinear(self, parts, biases, 8 if is_head else self.bits)

    def ties(self) -> bool:
        return False

    def kernels(self, tied: bool) -> list[Kernel]:
        products = [self.int8] if self.bits == 8 else [self.int8, self.int4]
        return [quantize.quantize_rows_kernel, *products, embedding.row_embedding]

    def describe(self) -> str:
        return f"int{self.bits}, {self._how}"

    def rows(self, capacity: int, width: int, group: int) -> _Rows:
        """A buffer for quantised activations, shared by all layers with this shape of input."""
        key = capacity, width, group
        if key not in self._buffers:
            self._buffers[key] = _Rows(*key)
        return self._buffers[key]

    def scratch(self, inner: int) -> torch.Tensor:
        """uint8 [threads, enough], shared by all layers of about this size."""
        size, threads = int4_linear.scratch_bytes(inner), torch.get_num_threads()
        if self._scratch.shape[-1] < size:
            self._scratch = torch.empty(threads, size, dtype=torch.uint8)
        return self._scratch


class _Rows:
    """Quantised activations: bytes, and for each group its scale, its sum, and their product."""

    def __init__(self, capacity: int, width: int, group: int) -> None:
        groups = width // group
        self.q = torch.zeros(capacity, width, dtype=torch.int8)
        self.scales = torch.zeros(capacity, groups)
        self.sums = torch.zeros(capacity, groups, dtype=torch.int32)
        self.totals = torch.zeros(capacity, groups)


class QuantizedLinear(Linear):
    """y = x W' + b with quantised x and W."""

    def __init__(
        self,
        layout: QuantizedLayout,
        parts: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        bits: int,
    ) -> None:
        self._bits = bits
        super().__init__(layout, parts, biases)

    def _pack(self, weight: torch.Tensor) -> quantize.QuantizedWeight:
        return quantize.quantize(weight, self._bits)

    def bind(self, rows: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> list[Operation]:
        """As Linear's."""
        capacity, inner = x.shape
        assert inner == self._layout.padded(self.inputs)
        group = inner if self._bits == 8 else quantize.GROUP
        buffer = self._layout.rows(capacity, inner, group)
        y = y.view(-1)[: capacity * self.width].view(-1, self.width)
        first = quantize.quantize_rows_kernel.bind(
            x.dtype,
            rows=rows,
            x=x,
            q=buffer.q,
            scales=buffer.scales,
            sums=buffer.sums,
            totals=buffer.totals,
            size=inner,
            group=group,
            element_bytes=x.itemsize,
        )
        common = {
            "rows": rows,
            "x": buffer.q,
            "row_scales": buffer.scales,
            "weight": self.weight.packed,
            "scales": self.weight.scales,
            "bias": self._bias,
            "y": y,
            "inner": inner,
            "outer": self.width,
        }
        if self._bits == 8:
            product = self._layout.int8.bind(
                x.dtype, **common, sums=buffer.sums, configurations=linear.CONFIGURATIONS
            )
            return [first, product]
        scratch = self._layout.scratch(inner)
        product = self._layout.int4.bind(
            x.dtype,
            **common,
            totals=buffer.totals,
            groups=self.weight.groups,
            scratch=scratch,
            scratch_bytes=scratch.shape[1],
            configurations=int4_linear.CONFIGURATIONS,
        )
        return [first, product]
