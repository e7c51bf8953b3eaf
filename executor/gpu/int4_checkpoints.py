"""Weights of 4 bits from AWQ's and GPTQ's tensors, repacked to the one layout that the kernels read
(kernels/gpu/int4_linear.py).

Both have three tensors for a linear layer, with eight numbers to an int32, the first in the lowest
bits but for AWQ's order:

            qweight                           qzeros                   scales
    awq     [K, N / 8]: outputs side by side  [G, N / 8], as qweight   [G, N]
    gptq    [K / 8, N]: inputs side by side   [G, N / 8]: outputs      [G, N]

GPTQ has a fourth, g_idx: the group of each input. With desc_act false it says nothing new, and it
is held to that.

Legend: K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import torch

from ...kernels.gpu.int4_linear import SPAN, Int4Weight, is_group_size, pack_int4
from ...mq.errors import ModelLoadError
from ..quantization import Int4Checkpoint
from ..weights import WeightSource

PER_INT = 8
# Where AWQ has the eight outputs of an int32: output i is at place AWQ_PLACES[i].
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def read_int4(
    source: WeightSource,
    checkpoint: Int4Checkpoint,
    name: str,
    outputs: int,
    inputs: int,
    device: torch.device,
) -> Int4Weight:
    """The linear layer `name`. Raises ModelLoadError for tensors that aren't as they should be."""
    group = inputs if checkpoint.group < 0 else checkpoint.group
    if not is_group_size(group, inputs):
        raise ModelLoadError(
            f"{name}: group_size {group} for {inputs} inputs is not supported; a multiple of "
            f"{SPAN} that divides them is"
        )
    if outputs % PER_INT:
        raise ModelLoadError(f"{name}: {outputs} outputs; {PER_INT} are packed into one number")
    groups, is_awq = inputs // group, checkpoint.method == "awq"
    shape = (inputs, outputs // PER_INT) if is_awq else (inputs // PER_INT, outputs)
    qweight = source.take(f"{name}.qweight", shape, dtype=torch.int32).to(device)
    qzeros = source.take(f"{name}.qzeros", (groups, outputs // PER_INT), dtype=torch.int32).to(
        device
    )
    scales = source.take(f"{name}.scales", (groups, outputs)).to(device)
    if source.has(f"{name}.g_idx"):
        _check_order(source.take(f"{name}.g_idx", (inputs,), dtype=torch.int32), group, name)
    weight_NK = _unpack_awq(qweight).T if is_awq else _unpack_inputs(qweight)
    zeros_GN = _unpack_awq(qzeros) if is_awq else _unpack(qzeros).flatten(1)
    return Int4Weight(
        pack_int4(weight_NK.contiguous()), scales.contiguous(), zeros_GN + checkpoint.zero_offset
    )


def _check_order(g_idx: torch.Tensor, group: int, name: str) -> None:
    if not torch.equal(g_idx.cpu(), torch.arange(len(g_idx), dtype=torch.int32) // group):
        raise ModelLoadError(
            f"tensor '{name}.g_idx' has inputs in another order (desc_act), which is not supported"
        )


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 8] of int32 [...]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return (packed[..., None] >> shifts & 15).to(torch.uint8)


def _unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    return _unpack(packed)[..., AWQ_PLACES].flatten(1)


def _unpack_inputs(packed: torch.Tensor) -> torch.Tensor:
    """[N, K] of [K / 8, N]."""
    return _unpack(packed).transpose(0, 1).flatten(1)
