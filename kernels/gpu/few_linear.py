"""A linear layer for one token, with what comes before and after it in the same launch: RMSNorm
before; bias, gated activation and residual addition after. A decode step of a small model at batch
1 is launch gaps and matrix-vector products, and this leaves four of these launches a layer.

Each program takes some rows of the weight and reads them once. The norm costs no second pass:
rsqrt(mean(x^2) + eps) is one factor of the whole product, so each program sums the squares beside
the products. The weight doesn't depend on earlier kernels: under programmatic dependent launch its
first block is on its way before the kernel ahead has ended. Every program waits for that kernel,
so that to wait for one is to wait for all before it.

No program reads what another of the same launch writes. `add_to` may be `out`, since each program
adds to the elements that it writes; `x` and `residual` may not be.

Legend: K inputs, N rows of the weight; outputs are N, or N / 2 with an activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .activation import activate, activated, check_kind
from .few_linear_table import Config, configuration

EIGHT = tl.constexpr(8)  # elements of 16 bits in a load of 16 bytes


def few_linear_reference(
    x_1K: torch.Tensor,
    weight_NK: torch.Tensor,
    out_1N: torch.Tensor,
    *,
    scale_N: torch.Tensor | None = None,
    bias_N: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    residual_1K: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    add_to_1N: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    x = x_1K.float()
    if residual_1K is not None:
        x = (x + residual_1K.float()).to(x_1K.dtype).float()
    if norm_weight_K is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_weight_K
    y = x @ weight_NK.float().T
    if scale_N is not None:
        y = y * scale_N
    if bias_N is not None:
        y = y + bias_N.float()
    if activation is not None:
        gate, up = y.chunk(2, -1)
        y = activate(gate, activation) * up
    if add_to_1N is not None:
        y = y + add_to_1N.float()
    out_1N.copy_(y)


def few_linear(
    x_1K: torch.Tensor,
    weight_NK: torch.Tensor,
    out_1N: torch.Tensor,
    *,
    scale_N: torch.Tensor | None = None,
    bias_N: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    residual_1K: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    add_to_1N: torch.Tensor | None = None,
    pdl: bool = False,
    config: Config | None = None,
) -> None:
    """out = [add_to +] [activation](norm(x [+ residual]) @ weight.T [* scale] [+ bias]).

    scale: float32, of each row of a weight of 8 bits (float8_e4m3fn); activations keep their bits.
    norm_weight: float32; RMSNorm comes first. residual: added to x before the norm, and not
    written. activation: "silu" or "gelu_tanh"; rows of the weight (and of the bias) are [gate | up]
    and out = act(gate) * up. config: other than the table's.
    """
    rows, inputs = weight_NK.shape
    _check(
        x_1K, weight_NK, out_1N, scale_N, bias_N, norm_weight_K, residual_1K, activation, add_to_1N
    )
    chosen = config or configuration(rows, inputs, activation is not None)
    outputs = out_1N.shape[1]
    _few_linear_kernel[(triton.cdiv(outputs, chosen.rows),)](
        x_1K,
        residual_1K,
        norm_weight_K,
        weight_NK,
        scale_N,
        bias_N,
        add_to_1N,
        out_1N,
        eps,
        OUTPUTS=outputs,
        INPUTS=inputs,
        ACTIVATION=activation,
        ROWS=chosen.rows,
        BLOCK=chosen.block,
        PDL=pdl,
        num_warps=chosen.warps,
        launch_pdl=pdl,
    )


def _check(
    x_1K: torch.Tensor,
    weight_NK: torch.Tensor,
    out_1N: torch.Tensor,
    scale_N: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    residual_1K: torch.Tensor | None,
    activation: str | None,
    add_to_1N: torch.Tensor | None,
) -> None:
    rows, inputs = weight_NK.shape
    outputs = rows
    if activation is not None:
        check_kind(activation)
        if rows % 2:
            raise ValueError(f"the weight has {rows} rows; [gate | up] is an even number")
        outputs = rows // 2
    if residual_1K is not None and norm_weight_K is None:
        raise ValueError("a residual is added before the norm, and there is no norm_weight")
    expected = (
        ("x", x_1K, (1, inputs)),
        ("out", out_1N, (1, outputs)),
        ("scale", scale_N, (rows,)),
        ("bias", bias_N, (rows,)),
        ("norm_weight", norm_weight_K, (inputs,)),
        ("residual", residual_1K, (1, inputs)),
        ("add_to", add_to_1N, (1, outputs)),
        ("weight", weight_NK, (rows, inputs)),
    )
    for name, tensor, shape in expected:
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} of strides {tensor.stride()}; "
                f"it must be {shape}, contiguous"
            )
    for name, tensor in (("x", x_1K), ("residual", residual_1K)):
        if tensor is not None and tensor.data_ptr() == out_1N.data_ptr():
            raise ValueError(f"out is {name}, which other programs still read")


@triton.jit
def _weight_block(
    first,
    n,
    start: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[ROWS, BLOCK] of the weight whose first row is at `first`. Masked only where it must be."""
    k = start + tl.arange(0, BLOCK)
    places = first + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    if OUTPUTS % ROWS == 0 and start + BLOCK <= INPUTS:
        return tl.load(places, eviction_policy="evict_first")
    mask = (n < OUTPUTS)[:, None] & (k < INPUTS)[None, :]
    return tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector_block(vector, start: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    k = start + tl.arange(0, BLOCK)[None, :]
    if start + BLOCK <= INPUTS:
        return tl.load(vector + k)
    return tl.load(vector + k, mask=k < INPUTS, other=0.0)


@triton.jit
def _by_eight(products, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of what one thread holds side by side, so that it keeps an eighth as many."""
    return tl.sum(tl.reshape(products, [ROWS, BLOCK // EIGHT, EIGHT]), axis=2)


@triton.jit
def _few_linear_kernel(
    x,
    residual,
    norm_weight,
    weight,
    scale,
    bias,
    add_to,
    out,
    eps,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = n < OUTPUTS
    up_weight = weight + OUTPUTS * INPUTS
    blocks: tl.constexpr = (INPUTS + BLOCK - 1) // BLOCK

    w = _weight_block(weight, n, 0, OUTPUTS, INPUTS, ROWS, BLOCK)
    if ACTIVATION is not None:
        w_up = _weight_block(up_weight, n, 0, OUTPUTS, INPUTS, ROWS, BLOCK)
    if norm_weight is not None:
        scales = _vector_block(norm_weight, 0, INPUTS, BLOCK)
    if scale is not None:
        factors = tl.load(scale + n, mask=kept, other=0.0)
        if ACTIVATION is not None:
            up_factors = tl.load(scale + OUTPUTS + n, mask=kept, other=0.0)
    if bias is not None:
        offset = tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)
        if ACTIVATION is not None:
            up_offset = tl.load(bias + OUTPUTS + n, mask=kept, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if add_to is not None:
        before = tl.load(add_to + n, mask=kept, other=0.0).to(tl.float32)

    squares = tl.zeros([1, BLOCK // EIGHT], tl.float32)
    total = tl.zeros([ROWS, BLOCK // EIGHT], tl.float32)
    up_total = tl.zeros([ROWS, BLOCK // EIGHT], tl.float32)
    for block in tl.static_range(blocks):
        values = _vector_block(x, block * BLOCK, INPUTS, BLOCK)
        if residual is not None:
            added = _vector_block(residual, block * BLOCK, INPUTS, BLOCK)
            values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        # The next block is asked for before this one is waited for.
        w_now = w
        if ACTIVATION is not None:
            w_up_now = w_up
        if norm_weight is not None:
            scales_now = scales
        if block + 1 < blocks:
            w = _weight_block(weight, n, (block + 1) * BLOCK, OUTPUTS, INPUTS, ROWS, BLOCK)
            if ACTIVATION is not None:
                w_up = _weight_block(
                    up_weight, n, (block + 1) * BLOCK, OUTPUTS, INPUTS, ROWS, BLOCK
                )
            if norm_weight is not None:
                scales = _vector_block(norm_weight, (block + 1) * BLOCK, INPUTS, BLOCK)
        values = values.to(tl.float32)
        if norm_weight is not None:
            squares += _by_eight(values * values, 1, BLOCK)
            values *= scales_now
        total += _by_eight(values * w_now.to(tl.float32), ROWS, BLOCK)
        if ACTIVATION is not None:
            up_total += _by_eight(values * w_up_now.to(tl.float32), ROWS, BLOCK)

    # Each sum over warps is a trip through shared memory, so all are made in one.
    if norm_weight is not None:
        squares = tl.broadcast_to(squares, [ROWS, BLOCK // EIGHT])
    if ACTIVATION is None:
        if norm_weight is None:
            y = tl.sum(total, axis=1)
        else:
            y, square = tl.split(tl.sum(tl.join(total, squares), axis=1))
            y *= tl.rsqrt(square / INPUTS + eps)
    else:
        if norm_weight is None:
            y, up = tl.split(tl.sum(tl.join(total, up_total), axis=1))
        else:
            pairs = tl.join(tl.join(total, up_total), tl.join(squares, squares))
            both, square = tl.split(tl.sum(pairs, axis=1))
            y, up = tl.split(both)
            square, _ = tl.split(square)
            factor = tl.rsqrt(square / INPUTS + eps)
            y *= factor
            up *= factor
        if scale is not None:
            up *= up_factors
        if bias is not None:
            up += up_offset
    if scale is not None:
        y *= factors
    if bias is not None:
        y += offset
    if ACTIVATION is not None:
        y = activated(y, ACTIVATION) * up
    if add_to is not None:
        y += before
    tl.store(out + n, y.to(out.dtype.element_ty), mask=kept)
