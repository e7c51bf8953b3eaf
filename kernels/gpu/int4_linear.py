"""Linear layers whose weights have 4 bits, a scale and a zero point for each group of inputs:
weight = (w - zero) x scale. Activations keep their type, and no weight is rounded again: w - zero
is a whole number that 16 bits hold, and scales multiply the float32 sums of a group.

Of 32 inputs in a row, byte i (of 16) has input i in its low half and input 16 + i in its high half.
So a tile of bytes is two tiles of weights, each contiguous in the inputs, and nothing is shuffled.

A product has three ways, chosen by the number of tokens. For few, reading the weight is all the
work: programs have 16 to 64 tokens by 64 outputs, and inputs are split so that all multiprocessors
read; the last split to arrive adds the parts, always in the same order. For more, tiles are wider
and not split. From MANY_TOKENS on, unpacking again for every tile of tokens costs more than a pass
over the weight: it is unpacked once into scratch, and the product is cuBLAS's.

Legend: T tokens, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

SPAN = 32  # inputs whose order within their 16 bytes is as above
HALF_SPAN = tl.constexpr(SPAN // 2)
MANY_TOKENS = 256
# Programs that are enough for the 132 multiprocessors of an H200, four each.
RESIDENT = 528
MAX_SPLITS = 16
# Elements of the parts of a launch, and output tiles with parts.
MAX_PARTS = RESIDENT * 64 * 64
MAX_COUNTERS = RESIDENT
DEQUANTIZED_ROWS = 16


class Int4Weight(NamedTuple):
    """packed: uint8. scales: floating point. zeros: uint8, 0 to 16."""

    packed_NK2: torch.Tensor
    scales_GN: torch.Tensor
    zeros_GN: torch.Tensor

    @property
    def inputs(self) -> int:
        return 2 * self.packed_NK2.shape[1]

    @property
    def outputs(self) -> int:
        return self.packed_NK2.shape[0]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // len(self.scales_GN)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self)


class Int4Scratch(NamedTuple):
    """For any launches of one stream: parts of split products, and room for an unpacked weight."""

    parts: torch.Tensor
    counters: torch.Tensor
    weight: torch.Tensor


class Int4Config(NamedTuple):
    tokens: int
    outputs: int
    splits: int
    warps: int
    stages: int


def int4_scratch(elements: int, dtype: torch.dtype, device: torch.device | str) -> Int4Scratch:
    """elements: of the largest weight that a launch of MANY_TOKENS tokens unpacks, 0 for none."""
    return Int4Scratch(
        torch.empty(MAX_PARTS, dtype=torch.float32, device=device),
        torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device),
        torch.empty(elements, dtype=dtype, device=device),
    )


def pack_int4(weight_NK: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K / 2] of numbers 0 to 15. K is a multiple of SPAN."""
    outputs, inputs = weight_NK.shape
    low, high = weight_NK.to(torch.uint8).view(outputs, inputs // SPAN, 2, SPAN // 2).unbind(2)
    return (low | high << 4).view(outputs, inputs // 2)


def unpack_int4(packed_NK2: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K]: what pack_int4 took."""
    outputs, half = packed_NK2.shape
    spans = packed_NK2.view(outputs, -1, SPAN // 2)
    return torch.stack([spans & 15, spans >> 4], 2).view(outputs, 2 * half)


def is_group_size(group: int, inputs: int) -> bool:
    """Whether the kernels take groups of so many inputs."""
    return group > 0 and group % SPAN == 0 and inputs % group == 0


def group_block(group: int) -> int:
    """Inputs that a program takes at once: a power of two, within one group."""
    return next(block for block in (128, 64, 32) if group % block == 0)


def choose_int4_config(tokens: int, outputs: int, blocks: int) -> Int4Config:
    """blocks: of inputs, as many as there are at once."""
    if tokens <= 64:
        rows = max(16, triton.next_power_of_2(tokens))
        programs = triton.cdiv(outputs, 64)
        splits = max(1, min(RESIDENT // programs, MAX_SPLITS, blocks // 2))
        return Int4Config(rows, 64, splits, 4, 4)
    return Int4Config(64, 128, 1, 4, 3)


def dequantize_int4_reference(weight: Int4Weight, out_NK: torch.Tensor) -> None:
    scales_NK, zeros_NK = (
        each.float().T.repeat_interleave(weight.group, 1)
        for each in (weight.scales_GN, weight.zeros_GN)
    )
    out_NK.copy_((unpack_int4(weight.packed_NK2).float() - zeros_NK) * scales_NK)


def dequantize_int4(weight: Int4Weight, out_NK: torch.Tensor, *, pdl: bool = False) -> None:
    """out: contiguous, of any floating-point type."""
    _check(weight)
    block = group_block(weight.group)
    outputs, inputs = weight.outputs, weight.inputs
    if out_NK.shape != (outputs, inputs) or not out_NK.is_contiguous():
        raise ValueError(
            f"out is {tuple(out_NK.shape)}; it must be {(outputs, inputs)}, contiguous"
        )
    _dequantize_int4_kernel[(triton.cdiv(outputs, DEQUANTIZED_ROWS), inputs // block)](
        *weight,
        out_NK,
        OUTPUTS=outputs,
        INPUTS=inputs,
        GROUP=weight.group,
        ROWS=DEQUANTIZED_ROWS,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def int4_linear_reference(
    x_TK: torch.Tensor,
    weight: Int4Weight,
    out_TN: torch.Tensor,
    scratch: Int4Scratch | None,
    *,
    bias_N: torch.Tensor | None = None,
    config: Int4Config | None = None,
    pdl: bool = False,
) -> None:
    whole_NK = torch.empty(weight.outputs, weight.inputs, device=x_TK.device)
    dequantize_int4_reference(weight, whole_NK)
    result = x_TK.float() @ whole_NK.T
    out_TN.copy_(result if bias_N is None else result + bias_N.float())


def int4_linear(
    x_TK: torch.Tensor,
    weight: Int4Weight,
    out_TN: torch.Tensor,
    scratch: Int4Scratch,
    *,
    bias_N: torch.Tensor | None = None,
    config: Int4Config | None = None,
    pdl: bool = False,
) -> None:
    """out = x @ weight.T [+ bias]. Groups are of SPAN inputs or a multiple. config: other tiles
    than the rule's, and these for any number of tokens.
    """
    _check(weight)
    tokens, inputs, outputs = len(x_TK), weight.inputs, weight.outputs
    if x_TK.shape[1] != inputs or out_TN.shape != (tokens, outputs):
        raise ValueError(
            f"x is {tuple(x_TK.shape)}, out {tuple(out_TN.shape)} for {inputs} inputs and "
            f"{outputs} outputs"
        )
    if x_TK.stride(1) != 1 or out_TN.stride(1) != 1:
        raise ValueError("rows must be in one piece")
    if tokens >= MANY_TOKENS and config is None:
        _unpacked_linear(x_TK, weight, out_TN, scratch, bias_N, pdl)
        return
    block = group_block(weight.group)
    chosen = config or choose_int4_config(tokens, outputs, inputs // block)
    grid = (triton.cdiv(outputs, chosen.outputs), triton.cdiv(tokens, chosen.tokens), chosen.splits)
    if chosen.splits > 1:
        assert chosen.splits * tokens * outputs <= len(scratch.parts), (chosen, tokens, outputs)
        assert grid[0] * grid[1] <= len(scratch.counters), grid
    _int4_linear_kernel[grid](
        x_TK,
        *weight,
        bias_N,
        out_TN,
        scratch.parts,
        scratch.counters,
        tokens,
        x_TK.stride(0),
        out_TN.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        GROUP=weight.group,
        TILE_T=chosen.tokens,
        TILE_N=chosen.outputs,
        BLOCK=block,
        SPLITS=chosen.splits,
        PDL=pdl,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        launch_pdl=pdl,
    )


def _unpacked_linear(
    x_TK: torch.Tensor,
    weight: Int4Weight,
    out_TN: torch.Tensor,
    scratch: Int4Scratch,
    bias_N: torch.Tensor | None,
    pdl: bool,
) -> None:
    outputs, inputs = weight.outputs, weight.inputs
    assert outputs * inputs <= len(scratch.weight), (outputs, inputs)
    whole_NK = scratch.weight[: outputs * inputs].view(outputs, inputs)
    dequantize_int4(weight, whole_NK, pdl=pdl)
    if bias_N is None:
        torch.mm(x_TK, whole_NK.t(), out=out_TN)
    else:
        torch.addmm(bias_N, x_TK, whole_NK.t(), out=out_TN)


def _check(weight: Int4Weight) -> None:
    packed, scales, zeros = weight
    if packed.dtype != torch.uint8 or zeros.dtype != torch.uint8:
        raise ValueError(f"packed is {packed.dtype}, zeros {zeros.dtype}; they must be uint8")
    if scales.shape != zeros.shape or scales.shape[1] != weight.outputs:
        raise ValueError(
            f"packed is {tuple(packed.shape)}, scales {tuple(scales.shape)}, zeros "
            f"{tuple(zeros.shape)}"
        )
    if not is_group_size(weight.group, weight.inputs) or weight.inputs % len(scales):
        raise ValueError(
            f"{len(scales)} groups of {weight.inputs} inputs; a group must be a multiple of {SPAN}"
        )
    if not (packed.is_contiguous() and scales.is_contiguous() and zeros.is_contiguous()):
        raise ValueError("the parts of a weight must be contiguous")


@triton.jit
def _whole_numbers(w, dtype: tl.constexpr):
    """uint8 numbers up to 16 in a floating-point type, but for a constant: in 16 bits they are the
    last of a power of two's mantissa, for which no conversion is needed.
    """
    if dtype == tl.float16:
        return (w.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)  # 1024 + w
    elif dtype == tl.bfloat16:
        return (w.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)  # 128 + w
    else:
        return w.to(dtype)


@triton.jit
def _input_of(byte):
    """The input in the low half of a row's byte; that in the high half is 16 further on."""
    return byte // HALF_SPAN * (2 * HALF_SPAN) + byte % HALF_SPAN


@triton.jit(do_not_specialize=["tokens"])
def _int4_linear_kernel(
    x,
    packed,
    scales,
    zeros,
    bias,
    out,
    parts,
    counters,
    tokens,
    x_stride,
    out_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    t = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    split = tl.program_id(2)
    kept = n < OUTPUTS
    real = (t < tokens)[:, None]
    x_rows = x + t.to(tl.int64)[:, None] * x_stride
    packed_rows = packed + n.to(tl.int64)[:, None] * (INPUTS // 2)
    blocks: tl.constexpr = INPUTS // BLOCK
    share: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
    acc = tl.zeros([TILE_T, TILE_N], tl.float32)
    for block in tl.range(split * share, tl.minimum((split + 1) * share, blocks)):
        byte = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        k = _input_of(byte)[None, :]
        group = block * BLOCK // GROUP
        w = tl.load(packed_rows + byte[None, :], mask=kept[:, None], other=0)
        zero = tl.load(zeros + group * OUTPUTS + n, mask=kept, other=0)
        scale = tl.load(scales + group * OUTPUTS + n, mask=kept, other=0.0).to(tl.float32)
        x_low = tl.load(x_rows + k, mask=real, other=0.0)
        x_high = tl.load(x_rows + (k + HALF_SPAN), mask=real, other=0.0)
        zero = _whole_numbers(zero, x_low.dtype)[:, None]
        low = _whole_numbers(w & 15, x_low.dtype) - zero
        high = _whole_numbers(w >> 4, x_low.dtype) - zero
        part = tl.dot(x_low, tl.trans(low), input_precision="ieee")
        part = tl.dot(x_high, tl.trans(high), part, input_precision="ieee")
        acc += part * scale[None, :]

    inside = real & kept[None, :]
    target = out + t.to(tl.int64)[:, None] * out_stride + n[None, :]
    if bias is not None:
        offset = tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)[None, :]
    if SPLITS == 1:
        if bias is not None:
            acc += offset
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        element = t[:, None] * OUTPUTS + n[None, :]
        tl.store(parts + split * tokens * OUTPUTS + element, acc, mask=inside)
        # All threads' parts come before the count; the count is a release, and an acquire for the
        # one that reads them.
        tl.debug_barrier()
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.debug_barrier()
            # The next launch counts from zero again.
            tl.store(counter, 0)
            total = tl.zeros([TILE_T, TILE_N], tl.float32)
            for i in range(SPLITS):
                # Past L1, which may be older than the parts.
                total += tl.load(
                    parts + i * tokens * OUTPUTS + element,
                    mask=inside,
                    other=0.0,
                    cache_modifier=".cg",
                )
            if bias is not None:
                total += offset
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_int4_kernel(
    packed,
    scales,
    zeros,
    out,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = n < OUTPUTS
    byte = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    group = tl.program_id(1) * BLOCK // GROUP
    rows = n.to(tl.int64)[:, None]
    inside = kept[:, None]
    w = tl.load(packed + rows * (INPUTS // 2) + byte[None, :], mask=inside, other=0)
    zero = tl.load(zeros + group * OUTPUTS + n, mask=kept, other=0).to(tl.float32)[:, None]
    scale = tl.load(scales + group * OUTPUTS + n, mask=kept, other=0.0).to(tl.float32)[:, None]
    low = ((w & 15).to(tl.float32) - zero) * scale
    high = ((w >> 4).to(tl.float32) - zero) * scale
    target = out + rows * INPUTS + _input_of(byte)[None, :]
    tl.store(target, low.to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF_SPAN, high.to(out.dtype.element_ty), mask=inside)
