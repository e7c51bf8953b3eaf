"""The linear layers of a model on a CUDA device, by how their weights are kept.

    Linear        16 bits (or 32); cuBLAS
    Fp8Linear     8 bits with a scale for each output; activations are quantised before each product
                  (kernels/gpu/fp8_linear.py)
    Int4Linear    4 bits with a scale and a zero point for each group of inputs; activations keep
                  their type (kernels/gpu/int4_linear.py)

All write where they are told, so that a step can be captured in a graph; what the quantised ones
need beside that is in one Workspace.

Legend: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.gpu.fp8_linear import FP8, fp8_linear, quantize_rows
from ...kernels.gpu.int4_linear import MANY_TOKENS, Int4Weight, int4_linear, int4_scratch


class Workspace:
    """What the layers of a model share. They say what they need; then the buffers are made, once
    the number of tokens is known.
    """

    def __init__(self) -> None:
        self._fp8_inputs = 0
        self._int4_elements = 0
        self._has_int4 = False

    def need_fp8(self, inputs: int) -> None:
        self._fp8_inputs = max(self._fp8_inputs, inputs)

    def need_int4(self, elements: int) -> None:
        self._has_int4 = True
        self._int4_elements = max(self._int4_elements, elements)

    def make(self, max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        if self._fp8_inputs:
            self._quantized = torch.empty(max_tokens * self._fp8_inputs, dtype=FP8, device=device)
            self._scales_T1 = torch.empty(max_tokens, 1, dtype=torch.float32, device=device)
        if self._has_int4:
            elements = self._int4_elements if max_tokens >= MANY_TOKENS else 0
            self.int4 = int4_scratch(elements, dtype, device)

    def rows(self, tokens: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For activations of 8 bits, and their scales."""
        rows = self._quantized[: tokens * inputs].view(tokens, inputs)
        return rows, self._scales_T1[:tokens]


class Linear(NamedTuple):
    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    scale_N: None = None

    def into(self, x_TK: torch.Tensor, out_TN: torch.Tensor, pdl: bool = False) -> None:
        if self.bias_N is None:
            torch.mm(x_TK, self.weight_NK.t(), out=out_TN)
        else:
            torch.addmm(self.bias_N, x_TK, self.weight_NK.t(), out=out_TN)


class Fp8Linear(NamedTuple):
    """input_scale_1: of all activations; None: each token has its own. One token alone is not
    quantised (few_linear).
    """

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    scale_N: torch.Tensor
    input_scale_1: torch.Tensor | None
    workspace: Workspace

    def into(self, x_TK: torch.Tensor, out_TN: torch.Tensor, pdl: bool = False) -> None:
        q_TK, scale_T1 = self.workspace.rows(*x_TK.shape)
        quantize_rows(x_TK, q_TK, scale_T1, fixed_scale_1=self.input_scale_1, pdl=pdl)
        fp8_linear(q_TK, scale_T1, self.weight_NK, self.scale_N, out_TN, self.bias_N)


class Int4Linear(NamedTuple):
    weight: Int4Weight
    bias_N: torch.Tensor | None
    workspace: Workspace

    def into(self, x_TK: torch.Tensor, out_TN: torch.Tensor, pdl: bool = False) -> None:
        scratch = self.workspace.int4
        int4_linear(x_TK, self.weight, out_TN, scratch, bias_N=self.bias_N, pdl=pdl)


AnyLinear = Linear | Fp8Linear | Int4Linear
# Those that few_linear takes.
OneTokenLinear = Linear | Fp8Linear
