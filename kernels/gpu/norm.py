"""RMSNorm (Zhang and Sennrich, 2019), alone or with the residual addition before it. One program
per row, the whole row in registers, all arithmetic in float32.

Legend: T tokens, S sequences of the step, H hidden. Norm weights are float32, any +1 already added.

The sum is rounded to the residual's type before it is normed, so that what is normed is what later
layers read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_HIDDEN = 16384
ELEMENTS_PER_WARP = 512  # sixteen a thread: two loads of 16 bytes in 16-bit types


class AddNorm(NamedTuple):
    """What add_rms_norm takes behind x, for those who make x first."""

    residual_TH: torch.Tensor
    weight_H: torch.Tensor
    out_TH: torch.Tensor
    eps: float
    update_weight_H: torch.Tensor | None = None


def rms_norm_reference(
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    out_TH: torch.Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    out_TH.copy_(_normed(x_TH.float(), weight_H, eps))


def add_rms_norm_reference(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    out_TH: torch.Tensor,
    eps: float,
    update_weight_H: torch.Tensor | None = None,
    *,
    index_S: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    update = x_TH.float()
    if update_weight_H is not None:
        update = _normed(update, update_weight_H, eps)
    total = (residual_TH.float() + update).to(residual_TH.dtype)
    if index_S is None:
        residual_TH.copy_(total)
        out_TH.copy_(_normed(total.float(), weight_H, eps))
        return
    chosen = _normed(total.float()[index_S.clamp(min=0).long()], weight_H, eps)
    out_TH.copy_(torch.where((index_S < 0)[:, None], 0.0, chosen))


def rms_norm(
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    out_TH: torch.Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    """out = x / rms(x) * weight. `out` may be `x`."""
    size = _check(x_TH, weight_H, out_TH)
    _rms_norm_kernel[(x_TH.shape[0],)](
        x_TH,
        weight_H,
        out_TH,
        x_TH.stride(0),
        out_TH.stride(0),
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PDL=pdl,
        num_warps=warps_of(size),
        launch_pdl=pdl,
    )


def add_rms_norm(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    out_TH: torch.Tensor,
    eps: float,
    update_weight_H: torch.Tensor | None = None,
    *,
    index_S: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """residual += x in place, out = residual / rms(residual) * weight. `out` may be `x`.

    update_weight: x has an RMSNorm of its own with this weight before it is added (Gemma).
    index: int32. Only these rows are read, `out` is compact [S, H] and must be apart from `x`, and
    the residual isn't written. A row of a negative index is zeros.
    """
    size = _check(x_TH, weight_H, out_TH)
    if residual_TH.shape != x_TH.shape or residual_TH.stride(-1) != 1:
        raise ValueError(
            f"residual is {tuple(residual_TH.shape)}; it must be {tuple(x_TH.shape)} as x is, "
            "with rows in one piece"
        )
    rows = x_TH.shape[0] if index_S is None else index_S.shape[0]
    if out_TH.shape[0] != rows:
        raise ValueError(f"out has {out_TH.shape[0]} rows; there are {rows} to write")
    _add_rms_norm_kernel[(rows,)](
        x_TH,
        residual_TH,
        update_weight_H,
        weight_H,
        index_S,
        out_TH,
        x_TH.stride(0),
        residual_TH.stride(0),
        out_TH.stride(0),
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PDL=pdl,
        num_warps=warps_of(size),
        launch_pdl=pdl,
    )


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    out,
    x_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < SIZE
    scales = tl.load(weight + h, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * x_stride + h, mask=inside, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values) / SIZE + eps) * scales
    tl.store(out + row * out_stride + h, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    x,
    residual,
    update_weight,
    weight,
    index,
    out,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < SIZE
    scales = tl.load(weight + h, mask=inside, other=0.0)
    if update_weight is not None:
        update_scales = tl.load(update_weight + h, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = row
    readable = inside
    if index is not None:
        source = tl.load(index + row).to(tl.int64)
        readable = inside & (source >= 0)
    update = tl.load(x + source * x_stride + h, mask=readable, other=0.0).to(tl.float32)
    before = tl.load(residual + source * residual_stride + h, mask=readable, other=0.0)
    if update_weight is not None:
        update *= tl.rsqrt(tl.sum(update * update) / SIZE + eps) * update_scales
    total = (before.to(tl.float32) + update).to(residual.dtype.element_ty)
    if index is None:
        tl.store(residual + row * residual_stride + h, total, mask=inside)
    values = total.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values) / SIZE + eps) * scales
    tl.store(out + row * out_stride + h, values.to(out.dtype.element_ty), mask=inside)


def _normed(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    return x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + eps) * weight_H


def warps_of(size: int) -> int:
    """Of a program that has a row of so many elements."""
    return min(max(triton.next_power_of_2(size) // ELEMENTS_PER_WARP, 1), 16)


def _check(x_TH: torch.Tensor, weight_H: torch.Tensor, out_TH: torch.Tensor) -> int:
    size = x_TH.shape[1]
    if size > MAX_HIDDEN:
        raise ValueError(f"a row of {size} doesn't fit in registers; at most {MAX_HIDDEN}")
    if weight_H.shape != (size,) or out_TH.shape[1] != size:
        raise ValueError(
            f"x is {tuple(x_TH.shape)}, weight {tuple(weight_H.shape)}, out {tuple(out_TH.shape)}"
        )
    if x_TH.stride(1) != 1 or out_TH.stride(1) != 1:
        raise ValueError("rows must be in one piece")
    return size
