"""Layers that own weights: the linear layer and the token embedding, in the layout that their
kernels read.

With matrix tiles a bfloat16 weight is held as tiles, and one kernel serves any number of rows. So
it is where the processor has no arithmetic for bfloat16, but AVX2: there weights are widened in
registers, and activations are float32.
Otherwise it is held in rows, for a kernel that serves a few rows and for torch, which serves many;
the two add up in different orders, so where results must not depend on the batch (--deterministic)
the kernel serves all.
Quantised weights have layers of their own (quantized.py).
Inputs have the layout's `dtype` in buffers of `padded` width, zero beyond their own; outputs
are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..kernels.cpu import blocks, embedding, linear, tiles, vectors, wide_linear
from ..kernels.cpu.openmp import Kernel, Launch
from .program import ByRows, Operation


def widens() -> bool:
    """Whether bfloat16 weights are widened here, because the processor can do no more with them."""
    return blocks.available() and not vectors.bfloat16_available()


class Layout:
    """How weights are held: `tiled` for bfloat16 where the processor has matrix tiles, `widened`
    where it has no arithmetic for bfloat16 (widens).

    dtype: of weights. The attribute of this name is that of activations.
    deterministic: a row's result is the same bit for bit, whatever the number of rows.
    """

    def __init__(self, dtype: torch.dtype, deterministic: bool = False) -> None:
        self.weight_dtype = dtype
        self.deterministic = deterministic
        self.tiled = dtype == torch.bfloat16 and tiles.available()
        self.widened = dtype == torch.bfloat16 and not self.tiled and widens()
        self.dtype = torch.float32 if self.widened else dtype

    @property
    def packed(self) -> bool:
        """Whether weights are packed (tiles.pack)."""
        return self.tiled or self.widened

    def padded(self, size: int) -> int:
        return tiles.padded(size) if self.packed else size

    def linear(
        self,
        parts: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] = (),
        is_head: bool = False,
    ) -> Linear:
        """A linear layer in this layout; is_head: it makes logits."""
        return Linear(self, parts, biases)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight [outputs, inputs] as kernels read it."""
        return tiles.pack(weight) if self.packed else weight

    def check_experts(self) -> None:
        """Raises ConfigError where experts can't be in this layout."""

    def ties(self) -> bool:
        """Whether an embedding can use the weight of the output layer that it is tied to."""
        return True

    def kernels(self, tied: bool) -> list[Kernel]:
        """What Linear and Embedding bind; tied: the embedding uses the output layer's weight."""
        product = linear.row_linear
        if self.packed:
            product = linear.tile_linear if self.tiled else wide_linear.wide_linear_kernel
        return [product, self.embedding(tied)]

    def embedding(self, tied: bool) -> Kernel:
        if tied and self.packed:
            return embedding.tile_embedding
        return embedding.bfloat16_embedding if self.widened else embedding.row_embedding

    def describe(self) -> str:
        if self.tiled:
            return "matrix tiles (AMX)"
        if self.widened:
            return "bfloat16 weights, widened in vectors (AVX2)"
        many = "the kernel" if self.deterministic else "torch"
        return f"rows (a kernel for few rows, {many} for many)"


class Linear:
    """y = x W' + b. `parts` are stacked: several layers that share an input become one."""

    def __init__(
        self, layout: Layout, parts: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()
    ) -> None:
        self._layout = layout
        self.outputs, self.inputs = sum(len(part) for part in parts), parts[0].shape[1]
        self.width = layout.padded(self.outputs)  # of the output buffer's rows
        weight = torch.cat([part.to(layout.weight_dtype) for part in parts])
        self.weight = self._pack(weight)
        self._bias: torch.Tensor | None = None
        if biases:
            self._bias = F.pad(
                torch.cat([b.float() for b in biases]), (0, self.width - self.outputs)
            )

    def _pack(self, weight: torch.Tensor) -> Any:
        return self._layout.pack(weight)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (self._bias.nbytes if self._bias is not None else 0)

    def bind(self, rows: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> list[Operation]:
        """x [capacity, padded inputs] -> y float32, of which the first capacity x width numbers are
        used.
        """
        assert x.shape[1] == self._layout.padded(self.inputs)
        y = y.view(-1)[: x.shape[0] * self.width].view(-1, self.width)
        common = {"rows": rows, "x": x, "weight": self.weight, "bias": self._bias, "y": y}
        sizes = {"inner": x.shape[1], "outer": self.width}
        if self._layout.tiled:
            configurations = linear.CONFIGURATIONS
            return [
                linear.tile_linear.bind(x.dtype, **common, **sizes, configurations=configurations)
            ]
        if self._layout.widened:
            return [wide_linear.wide_linear_kernel.bind(x.dtype, **common, **sizes)]
        few = linear.row_linear.bind(x.dtype, **common, **sizes)
        if self._layout.deterministic:
            return [few]
        return [ByRows(few, lambda count: self._product(x[:count], y[:count]))]

    def _product(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if x.dtype == torch.float32:
            torch.mm(x, self.weight.T, out=y)
        else:
            y.copy_(F.linear(x, self.weight))
        if self._bias is not None:
            y += self._bias


class Embedding:
    """A table of its own, or the weight of the output layer that it is tied to. Its rows are those
    of the tokens from `first` on.
    """

    def __init__(
        self,
        layout: Layout,
        table: torch.Tensor | None,
        tied: Linear | None = None,
        first: int = 0,
    ) -> None:
        assert (table is None) != (tied is None)
        self._layout = layout
        self._first = first
        self._table = table.to(layout.weight_dtype, copy=True) if table is not None else None
        self._tied = tied
        self._shape = table.shape if table is not None else (tied.outputs, tied.inputs)  # type: ignore[union-attr]

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes if self._table is not None else 0

    def bind(
        self, rows: np.ndarray, token_ids: np.ndarray, out: torch.Tensor, scale: float
    ) -> Launch:
        """token_ids int32 [rows] -> out float32 [capacity, size], `scale` times their rows; zeros
        for tokens that have none.
        """
        tied = self._tied
        vocabulary, size = self._shape
        return self._layout.embedding(tied is not None).bind(
            self._layout.dtype,
            rows=rows,
            token_ids=token_ids,
            weight=self._table if tied is None else tied.weight,
            out=out,
            first=self._first,
            vocabulary=vocabulary,
            size=size,
            scale=scale,
        )
