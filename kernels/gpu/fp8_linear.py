"""Linear layers of 8 bits (float8_e4m3fn): weights with a scale for each output, activations with
one for each token, and their product by cuBLAS or CUTLASS (torch._scaled_mm).

A row's scale maps its largest element to the largest that the type holds, so nothing saturates; a
scale that was fixed beforehand may make some do so.

Legend: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max  # 448
LEAST_SPREAD = 1e-10  # a row of zeros has a scale too
MAX_INPUTS = 65536
ALIGNMENT = 16  # of inputs and outputs: torch._scaled_mm takes no others
ELEMENTS_PER_WARP = 512


def quantize_weight(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 8 bits, and float32 scales [N]: weight = q x scale."""
    weight_NK = weight_NK.float()
    scale_N = weight_NK.abs().amax(-1).clamp(min=LEAST_SPREAD) * (1.0 / MOST)
    return (weight_NK / scale_N[:, None]).clamp(-MOST, MOST).to(FP8), scale_N


def quantize_rows_reference(
    x_TK: torch.Tensor,
    q_TK: torch.Tensor,
    scale_T1: torch.Tensor,
    *,
    fixed_scale_1: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    x = x_TK.float()
    if fixed_scale_1 is None:
        scale_T1.copy_(x.abs().amax(-1, keepdim=True).clamp(min=LEAST_SPREAD) * (1.0 / MOST))
    else:
        scale_T1.copy_(fixed_scale_1.expand_as(scale_T1))
    q_TK.copy_((x / scale_T1).clamp(-MOST, MOST).to(FP8))


def quantize_rows(
    x_TK: torch.Tensor,
    q_TK: torch.Tensor,
    scale_T1: torch.Tensor,
    *,
    fixed_scale_1: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """q = x / scale in 8 bits, and float32 scales: each row's own, or `fixed_scale` for all."""
    tokens, inputs = x_TK.shape
    if inputs > MAX_INPUTS:
        raise ValueError(f"a row of {inputs} doesn't fit in registers; at most {MAX_INPUTS}")
    if q_TK.shape != x_TK.shape or scale_T1.shape != (tokens, 1):
        raise ValueError(
            f"x is {tuple(x_TK.shape)}, q {tuple(q_TK.shape)}, scale {tuple(scale_T1.shape)}"
        )
    if x_TK.stride(1) != 1 or q_TK.stride(1) != 1 or not scale_T1.is_contiguous():
        raise ValueError("rows, and scales, must be in one piece")
    block = triton.next_power_of_2(inputs)
    _quantize_rows_kernel[(tokens,)](
        x_TK,
        q_TK,
        scale_T1,
        fixed_scale_1,
        x_TK.stride(0),
        q_TK.stride(0),
        INPUTS=inputs,
        BLOCK=block,
        MOST=MOST,
        LEAST_SPREAD=LEAST_SPREAD,
        PDL=pdl,
        num_warps=min(max(block // ELEMENTS_PER_WARP, 1), 16),
        launch_pdl=pdl,
    )


@triton.jit
def _quantize_rows_kernel(
    x,
    q,
    scales,
    fixed_scale,
    x_stride,
    q_stride,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_SPREAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < INPUTS
    if fixed_scale is not None:
        scale = tl.load(fixed_scale)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    if fixed_scale is None:
        scale = tl.maximum(tl.max(tl.abs(values)), LEAST_SPREAD) * (1.0 / MOST)
    tl.store(scales + row, scale)
    values = tl.minimum(tl.maximum(tl.div_rn(values, scale), -MOST), MOST)
    tl.store(q + row * q_stride + k, values.to(q.dtype.element_ty), mask=inside)


def fp8_linear(
    q_TK: torch.Tensor,
    scale_T1: torch.Tensor,
    weight_NK: torch.Tensor,
    scale_N: torch.Tensor,
    out_TN: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> None:
    """out = (q x scale_T) @ (weight x scale_N).T [+ bias], in bfloat16.

    On a CUDA device it must be of compute capability 9.0, and K and N multiples of ALIGNMENT.
    """
    # With a bias and fast accumulation cuBLAS has no algorithm for few tokens of many inputs.
    torch._scaled_mm(
        q_TK,
        weight_NK.t(),
        scale_T1,
        scale_N[None],
        bias=bias_N,
        out_dtype=torch.bfloat16,
        use_fast_accum=bias_N is None,
        out=out_TN,
    )


def fp8_linear_reference(
    q_TK: torch.Tensor,
    scale_T1: torch.Tensor,
    weight_NK: torch.Tensor,
    scale_N: torch.Tensor,
    out_TN: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> None:
    result = (q_TK.float() * scale_T1) @ (weight_NK.float() * scale_N[:, None]).T
    out_TN.copy_(result if bias_N is None else result + bias_N.float())
