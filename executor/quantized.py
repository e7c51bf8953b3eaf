"""Linear layers with quantised weights (kernels/cpu/quantize.py): int8 and int4.

Activations are quantised too, each row by itself, in a kernel before each product. What quantises
them is the precision of the server; the number of rows chooses only between kernels that give the
same bits.

int8: a scale for each output and for each row of activations, which have two bytes, or with AVX2
are words of 16 bits; sums in int32.
int4: a scale for each 32 inputs, of weights and of activations, sums in int32 within them. The
output layer has 8 bits: with 4 it costs more quality than it saves time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..kernels.cpu import (
    blocks,
    int4_linear,
    int8_linear,
    int8_word_linear,
    linear,
    quantize,
    tiles,
    vectors,
)
from ..kernels.cpu.openmp import Kernel
from ..mq.errors import ConfigError
from .layers import Layout, Linear
from .program import Operation

BITS = {"int8": 8, "int4": 4}

R = TypeVar("R")


def make_layout(dtype: torch.dtype, quantization: str, deterministic: bool) -> Layout:
    if quantization in BITS:
        return QuantizedLayout(dtype, BITS[quantization])
    return Layout(dtype, deterministic)


class QuantizedLayout(Layout):
    """Of the linear layers; the embedding stays in rows of `dtype`.

    words: activations of products with 8 bits are words, and weights lie in pairs.
    """

    def __init__(self, dtype: torch.dtype, bits: int) -> None:
        super().__init__(dtype)
        self.tiled = False
        self.bits = bits
        self._buffers: dict[tuple[str, int, int], Any] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        if tiles.bytes_available() and vectors.products_available():
            self._how, self.int8 = "matrix tiles (AMX)", int8_linear.int8_tile_linear
            self.int4 = int4_linear.int4_tile_linear
        elif vectors.products_available():
            self._how, self.int8 = "vectors (VNNI)", int8_linear.int8_vector_linear
            self.int4 = int4_linear.int4_vector_linear
        elif blocks.available():
            self._how, self.int8 = "vectors (AVX2)", int8_word_linear.int8_word_linear_kernel
            self.int4 = int4_linear.int4_block_linear
        else:
            self._how, self.int8 = "plain arithmetic", int8_linear.int8_plain_linear
            self.int4 = int4_linear.int4_plain_linear

        self.words = self.int8 is int8_word_linear.int8_word_linear_kernel

    @property
    def packed(self) -> bool:
        return False

    def padded(self, size: int) -> int:
        return quantize.padded(size)

    def linear(
        self,
        parts: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] = (),
        is_head: bool = False,
    ) -> QuantizedLinear:
        return QuantizedLinear(self, parts, biases, 8 if is_head else self.bits)

    def check_experts(self) -> None:
        raise ConfigError(
            f"quantization = 'int{self.bits}': a mixture of experts isn't quantized on device "
            "'cpu'; it takes 'none'"
        )

    def ties(self) -> bool:
        return False

    def kernels(self, tied: bool) -> list[Kernel]:
        bytes_of = quantize.row_words_kernel if self.words else quantize.split_rows_kernel
        kernels = [bytes_of, self.int8, self.embedding(tied)]
        return kernels if self.bits == 8 else [quantize.quantize_rows_kernel, self.int4, *kernels]

    def describe(self) -> str:
        return f"int{self.bits}, {self._how}"

    def rows(self, kind: Callable[[int, int], R], capacity: int, width: int) -> R:
        """A buffer for quantised activations, shared by all layers with this shape of input."""
        key = kind.__name__, capacity, width
        if key not in self._buffers:
            self._buffers[key] = kind(capacity, width)
        return self._buffers[key]

    def scratch(self, size: int) -> torch.Tensor:
        """uint8 [threads, size or more], shared by all layers of about this size."""
        threads = torch.get_num_threads()
        if self._scratch.shape[-1] < size:
            self._scratch = torch.empty(threads, size, dtype=torch.uint8)
        return self._scratch


class _Groups:
    """Activations of 8 bits: for each group of a row its scale, its sum, and their product."""

    def __init__(self, capacity: int, width: int) -> None:
        groups = width // quantize.GROUP
        self.q = torch.zeros(capacity, width, dtype=torch.int8)
        self.scales = torch.zeros(capacity, groups)
        self.sums = torch.zeros(capacity, groups, dtype=torch.int32)
        self.totals = torch.zeros(capacity, groups)


class _Pairs:
    """Activations of two bytes: a row's scale, and its sums of high and of low bytes."""

    def __init__(self, capacity: int, width: int) -> None:
        self.q = torch.zeros(capacity, 2, width, dtype=torch.int8)
        self.scales = torch.zeros(capacity)
        self.sums = torch.zeros(capacity, 2, dtype=torch.int32)


class _Words:
    """Activations of 16 bits: a row's scale."""

    def __init__(self, capacity: int, width: int) -> None:
        self.q = torch.zeros(capacity, width, dtype=torch.int16)
        self.scales = torch.zeros(capacity)


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
        made = quantize.quantize(weight, self._bits)
        return quantize.pairs(made) if self._bits == 8 and self._layout.words else made

    def bind(self, rows: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> list[Operation]:
        """As Linear's."""
        capacity, inner = x.shape
        assert inner == self._layout.padded(self.inputs)
        y = y.view(-1)[: capacity * self.width].view(-1, self.width)
        common = {
            "rows": rows,
            "weight": self.weight.packed,
            "scales": self.weight.scales,
            "bias": self._bias,
            "y": y,
            "inner": inner,
            "outer": self.width,
        }
        if self._bits == 4:
            return self._bind_4(x, common)
        return self._bind_words(x, common) if self._layout.words else self._bind_8(x, common)

    def _bind_words(self, x: torch.Tensor, common: dict[str, Any]) -> list[Operation]:
        layout, (capacity, inner) = self._layout, x.shape
        buffer = layout.rows(_Words, capacity, inner)
        made = {"q": buffer.q, "scales": buffer.scales}
        sizes = {"size": inner, "element_bytes": x.itemsize}
        first = quantize.row_words_kernel.bind(x.dtype, rows=common["rows"], x=x, **made, **sizes)
        product = layout.int8.bind(
            x.dtype,
            **common,
            x=buffer.q,
            row_scales=buffer.scales,
            scratch=layout.scratch(int8_word_linear.SCRATCH_BYTES),
        )
        return [first, product]

    def _bind_8(self, x: torch.Tensor, common: dict[str, Any]) -> list[Operation]:
        layout, (capacity, inner) = self._layout, x.shape
        buffer = layout.rows(_Pairs, capacity, inner)
        made = {"q": buffer.q, "scales": buffer.scales, "sums": buffer.sums}
        sizes = {"size": inner, "element_bytes": x.itemsize}
        first = quantize.split_rows_kernel.bind(x.dtype, rows=common["rows"], x=x, **made, **sizes)
        product = layout.int8.bind(
            x.dtype,
            **common,
            x=buffer.q,
            row_scales=buffer.scales,
            sums=buffer.sums,
            scratch=layout.scratch(int8_linear.SCRATCH_BYTES),
            configurations=linear.CONFIGURATIONS,
        )
        return [first, product]

    def _bind_4(self, x: torch.Tensor, common: dict[str, Any]) -> list[Operation]:
        layout, (capacity, inner) = self._layout, x.shape
        buffer = layout.rows(_Groups, capacity, inner)
        scratch = layout.scratch(int4_linear.scratch_bytes(inner))
        first = quantize.quantize_rows_kernel.bind(
            x.dtype,
            rows=common["rows"],
            x=x,
            q=buffer.q,
            scales=buffer.scales,
            sums=buffer.sums,
            totals=buffer.totals,
            size=inner,
            group=quantize.GROUP,
            element_bytes=x.itemsize,
        )
        product = layout.int4.bind(
            x.dtype,
            **common,
            x=buffer.q,
            row_scales=buffer.scales,
            totals=buffer.totals,
            groups=self.weight.groups,
            scratch=scratch,
            scratch_bytes=scratch.shape[1],
            configurations=int4_linear.CONFIGURATIONS,
        )
        return [first, product]
