"""Products of decode steps of some tokens, by batch_linear where it was measured to be faster than
cuBLAS (kernels/gpu/batch_linear_table.py).
"""

from __future__ import annotations

import torch

from ...kernels.gpu.batch_linear import batch_linear, batch_linear_scratch
from ...kernels.gpu.batch_linear_table import configuration
from .linears import AnyLinear, Linear

MOST_FEW = 512  # tokens of a step whose products may be batch_linear's


class BatchLinears:
    """most_outputs: of a product."""

    def __init__(self, most_outputs: int, device: torch.device) -> None:
        self._parts = batch_linear_scratch(MOST_FEW, most_outputs, device)

    def into(
        self,
        linear: AnyLinear,
        x_TK: torch.Tensor,
        out_TN: torch.Tensor,
        pdl: bool,
        activation: str | None = None,
        add_to: torch.Tensor | None = None,
    ) -> bool:
        """False where cuBLAS is to do it."""
        if not isinstance(linear, Linear):
            return False
        gated, itemsize = activation is not None, x_TK.element_size()
        config = configuration(*linear.weight_NK.shape, gated, len(x_TK), itemsize)
        if config is None:
            return False
        batch_linear(
            x_TK,
            linear.weight_NK,
            out_TN,
            self._parts,
            bias_N=linear.bias_N,
            activation=activation,
            add_to_TN=add_to,
            config=config,
            pdl=pdl,
        )
        return True
