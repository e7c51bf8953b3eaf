"""The gated activations of the feed-forward layer, silu(gate) * up and gelu(gate) * up (Shazeer,
2020). gelu is the approximation by tanh; 0.5 (1 + tanh(y)) is sigmoid(2 y).

Legend: T tokens, I inner size of the feed-forward layer, N = 2 I.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KINDS = ("silu", "gelu_tanh")
BLOCK = 1024


def gated_activation_reference(
    gate_up_TN: torch.Tensor, out_TI: torch.Tensor, kind: str, *, pdl: bool = False
) -> None:
    gate_TI, up_TI = gate_up_TN.float().chunk(2, -1)
    out_TI.copy_(activate(gate_TI, kind) * up_TI)


def activate(gate: torch.Tensor, kind: str) -> torch.Tensor:
    """In plain torch. `kind` is one of KINDS."""
    check_kind(kind)
    if kind == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"activation is {kind!r}; accepted: {', '.join(KINDS)}")


def gated_activation(
    gate_up_TN: torch.Tensor, out_TI: torch.Tensor, kind: str, *, pdl: bool = False
) -> None:
    """out = act(gate) * up, where gate_up rows are [gate | up]. kind: "silu" or "gelu_tanh"."""
    check_kind(kind)
    tokens, size = out_TI.shape
    if gate_up_TN.shape != (tokens, 2 * size):
        raise ValueError(f"gate_up is {tuple(gate_up_TN.shape)}, out {tuple(out_TI.shape)}")
    if gate_up_TN.stride(1) != 1 or out_TI.stride(1) != 1:
        raise ValueError("rows must be in one piece")
    _gated_activation_kernel[(tokens, triton.cdiv(size, BLOCK))](
        gate_up_TN,
        out_TI,
        gate_up_TN.stride(0),
        out_TI.stride(0),
        size,
        KIND=kind,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """Of float32 values, inside a kernel."""
    twice = gate
    if KIND == "gelu_tanh":
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-twice))


@triton.jit
def _gated_activation_kernel(
    gate_up,
    out,
    gate_up_stride,
    out_stride,
    size,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    first = gate_up + row * gate_up_stride
    gate = tl.load(first + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + size + i, mask=inside, other=0.0).to(tl.float32)
    values = activated(gate, KIND) * up
    tl.store(out + row * out_stride + i, values.to(out.dtype.element_ty), mask=inside)
