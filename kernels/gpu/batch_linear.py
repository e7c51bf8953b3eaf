"""A linear layer for a batch of decoding sequences, with what comes after it in the same launch:
bias, gated activation, residual addition.

With so few tokens the time is that of reading the weight, so each element of it is read once, by a
program that has all tokens (or, of many tokens, by programs that run side by side and find it in
the L2 cache). To fill all multiprocessors the inputs are split too: each split leaves its part in
scratch and counts itself, and the last to arrive adds the parts in the order of the splits, so that
a result never depends on who was last. It also sets the counter back to zero.

The weight doesn't depend on earlier kernels: under programmatic dependent launch a program asks for
its first blocks before it waits. Every program waits for the kernel before it reads x, scratch or
add_to, or writes anything, so that to wait for one is to wait for all before it.

Legend: T tokens, K inputs, N rows of the weight; outputs are N, or N / 2 with an activation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .activation import activate, activated, check_kind
from .batch_linear_table import MOST_SPLITS, Config, configuration, rule
from .tile_linear import LINE_BYTES, add_product, ask_for_lines, launch_tile_linear, lines_ahead

# Float32 elements of scratch for split launches, at most. A weight of many rows isn't split.
MOST_PARTS = 1 << 23
MOST_TILES = 4096


class BatchLinearScratch(NamedTuple):
    """What the splits of a launch tell each other; any launches of one stream may share it."""

    parts: torch.Tensor
    counters: torch.Tensor


def batch_linear_scratch(
    max_tokens: int, max_outputs: int, device: torch.device | str
) -> BatchLinearScratch:
    """For launches of up to max_tokens tokens and weights of up to max_outputs rows."""
    padded = -(-max_tokens // 256) * 256 if max_tokens > 128 else 128
    parts = min(MOST_SPLITS * padded * (-(-max_outputs // 128) * 128), MOST_PARTS)
    return BatchLinearScratch(
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.zeros(MOST_TILES, dtype=torch.int32, device=device),
    )


def batch_linear_reference(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_TN: torch.Tensor,
    scratch: BatchLinearScratch | None,
    *,
    bias_N: torch.Tensor | None = None,
    activation: str | None = None,
    add_to_TN: torch.Tensor | None = None,
    config: Config | None = None,
    pdl: bool = False,
) -> None:
    y = x_TK.float() @ weight_NK.float().T
    if bias_N is not None:
        y = y + bias_N.float()
    if activation is not None:
        gate, up = y.chunk(2, -1)
        y = activate(gate, activation) * up
    if add_to_TN is not None:
        y = y + add_to_TN.float()
    out_TN.copy_(y)


def batch_linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_TN: torch.Tensor,
    scratch: BatchLinearScratch,
    *,
    bias_N: torch.Tensor | None = None,
    activation: str | None = None,
    add_to_TN: torch.Tensor | None = None,
    config: Config | None = None,
    pdl: bool = False,
) -> None:
    """out = [add_to +] [activation](x @ weight.T [+ bias]), added up in float32.

    activation: "silu" or "gelu_tanh"; rows of the weight (and of the bias) are [gate | up] and
    out = act(gate) * up. add_to may be out. Rows of x, add_to and out may be apart. config: other
    than the table's.
    """
    rows, inputs = weight_NK.shape
    tokens, gated = x_TK.shape[0], activation is not None
    _check(x_TK, weight_NK, out_TN, bias_N, activation, add_to_TN)
    how = (rows, inputs, gated, tokens, x_TK.element_size())
    chosen = config or configuration(*how) or rule(*how)
    token_tiles = triton.cdiv(tokens, chosen.tokens)
    tiles = triton.cdiv(rows, chosen.rows) * token_tiles
    _check_scratch(scratch, chosen, tiles)
    if chosen.tma:
        launch_tile_linear(
            x_TK,
            weight_NK,
            out_TN,
            *scratch,
            bias_N,
            activation,
            add_to_TN,
            chosen,
            pdl,
        )
        return
    _batch_linear_kernel[(tiles * chosen.splits,)](
        x_TK,
        weight_NK,
        bias_N,
        add_to_TN,
        out_TN,
        scratch.parts,
        scratch.counters,
        tokens,
        out_TN.shape[1],
        inputs,
        x_TK.stride(0),
        0 if add_to_TN is None else add_to_TN.stride(0),
        out_TN.stride(0),
        ACTIVATION=activation,
        ONE_TILE=token_tiles == 1,
        EVEN=_is_even(chosen, inputs),
        ROWS=chosen.rows,
        TOKENS=chosen.tokens,
        BLOCK=chosen.block,
        SPLITS=chosen.splits,
        STAGES=chosen.stages,
        LINES=lines_ahead(chosen, weight_NK.element_size()) if pdl else 0,
        LINE=LINE_BYTES // weight_NK.element_size(),
        SWAP=chosen.swap,
        PDL=pdl,
        num_warps=chosen.warps,
        launch_pdl=pdl,
    )


def _is_even(config: Config, inputs: int) -> bool:
    """Whether no block that is loaded ends past the inputs."""
    if config.stages > 1:
        return inputs % config.block == 0
    if config.splits * config.block < inputs:
        raise ValueError(f"{config} has one block a split, too few for {inputs} inputs")
    return config.splits * config.block == inputs


def _check(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_TN: torch.Tensor,
    bias_N: torch.Tensor | None,
    activation: str | None,
    add_to_TN: torch.Tensor | None,
) -> None:
    rows, inputs = weight_NK.shape
    tokens, outputs = x_TK.shape[0], rows
    if activation is not None:
        check_kind(activation)
        if rows % 2:
            raise ValueError(f"the weight has {rows} rows; [gate | up] is an even number")
        outputs = rows // 2
    expected = (
        ("x", x_TK, (tokens, inputs)),
        ("out", out_TN, (tokens, outputs)),
        ("bias", bias_N, (rows,)),
        ("add_to", add_to_TN, (tokens, outputs)),
    )
    for name, tensor, shape in expected:
        if tensor is not None and (tensor.shape != shape or tensor.stride(-1) != 1):
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} of strides {tensor.stride()}; "
                f"it must be {shape}, its rows in one piece"
            )
    if not weight_NK.is_contiguous():
        raise ValueError(f"weight is of strides {weight_NK.stride()}; it must be contiguous")
    if x_TK.dtype != weight_NK.dtype:
        raise ValueError(f"x is {x_TK.dtype}, weight {weight_NK.dtype}")
    if x_TK.data_ptr() == out_TN.data_ptr():
        raise ValueError("out is x, which other programs still read")


def _check_scratch(scratch: BatchLinearScratch, config: Config, tiles: int) -> None:
    if config.splits == 1:
        return
    needed = tiles * config.splits * config.rows * config.tokens
    words = tiles * (2 if config.tma else 1)
    if needed > len(scratch.parts) or words > len(scratch.counters):
        raise ValueError(
            f"{config} needs {needed} elements and {words} counters of scratch, "
            f"which has {len(scratch.parts)} and {len(scratch.counters)}"
        )


@triton.jit
def _block(places, k, start, inputs, EVEN: tl.constexpr, present=None):
    """Inputs start + k of some rows, those `present`; zeros past the last input."""
    if EVEN and present is None:
        block = tl.load(places + start)
    elif EVEN:
        block = tl.load(places + start, mask=present, other=0.0)
    elif present is None:
        block = tl.load(places + start, mask=k < inputs - start, other=0.0)
    else:
        block = tl.load(places + start, mask=present & (k < inputs - start), other=0.0)
    return block


@triton.jit
def _write(
    y,
    bias,
    add_to,
    out,
    row,
    token,
    row_tile,
    tokens,
    outputs,
    add_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """What comes after the product: y is [ROWS, TOKENS], of the weight's rows `row`."""
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    if ACTIVATION is None:
        n = row_tile * ROWS + tl.arange(0, ROWS)
    else:
        n = row_tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
        pairs = tl.permute(tl.reshape(y, [2, ROWS // 2, TOKENS]), [1, 2, 0])
        gate, up = tl.split(pairs)
        y = activated(gate, ACTIVATION) * up
    inside = (n < outputs)[:, None] & (token < tokens)[None, :]
    row_of_token = token.to(tl.int64)[None, :]
    if add_to is not None:
        before = tl.load(add_to + row_of_token * add_stride + n[:, None], mask=inside, other=0.0)
        y += before.to(tl.float32)
    places = out + row_of_token * out_stride + n[:, None]
    tl.store(places, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _batch_linear_kernel(
    x,
    weight,
    bias,
    add_to,
    out,
    parts,
    counters,
    tokens,
    outputs,
    inputs,
    x_stride,
    add_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    ONE_TILE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Programs that share a block of the weight are side by side, and then those of one result.
    program = tl.program_id(0)
    token_tile = 0
    if not ONE_TILE:
        token_tiles = tl.cdiv(tokens, TOKENS)
        token_tile = program % token_tiles
        program = program // token_tiles
    split = program % SPLITS
    row_tile = program // SPLITS

    # Past the last row it is read again, so that no load needs a mask for it.
    i = tl.arange(0, ROWS)
    if ACTIVATION is None:
        row = tl.minimum(row_tile * ROWS + i, outputs - 1)
    else:
        half: tl.constexpr = ROWS // 2
        row = tl.minimum(row_tile * half + i % half, outputs - 1) + i // half * outputs
    first_of_row = weight + row.to(tl.int64)[:, None] * inputs
    blocks = tl.cdiv(inputs, BLOCK)
    length = tl.cdiv(blocks, SPLITS)
    first = split * length
    last = tl.minimum(first + length, blocks)
    k = tl.arange(0, BLOCK)[None, :]
    w_places = first_of_row + k
    if LINES:
        ask_for_lines(first_of_row, first * BLOCK, inputs, LINES, LINE)
    if STAGES == 1:
        w = _block(w_places, k, first * BLOCK, inputs, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()

    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    present = (token < tokens)[:, None]
    x_places = x + token.to(tl.int64)[:, None] * x_stride + k
    y = tl.zeros([ROWS, TOKENS] if SWAP else [TOKENS, ROWS], tl.float32)
    if STAGES == 1:
        values = _block(x_places, k, first * BLOCK, inputs, EVEN, present)
        y = add_product(y, w, values, SWAP)
    else:
        for block in tl.range(first, last, num_stages=STAGES):
            w = _block(w_places, k, block * BLOCK, inputs, EVEN)
            values = _block(x_places, k, block * BLOCK, inputs, EVEN, present)
            y = add_product(y, w, values, SWAP)
    if not SWAP:
        y = tl.trans(y)

    if SPLITS == 1:
        _write(
            y,
            bias,
            add_to,
            out,
            row,
            token,
            row_tile,
            tokens,
            outputs,
            add_stride,
            out_stride,
            ACTIVATION,
            ROWS,
            TOKENS,
        )
    else:
        size: tl.constexpr = ROWS * TOKENS
        tile = row_tile
        if not ONE_TILE:
            tile = row_tile * tl.cdiv(tokens, TOKENS) + token_tile
        places = parts + tile * SPLITS * size + i[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        tl.store(places + split * size, y)
        # All threads' parts come before the count; the count is a release, and an acquire for the
        # one that reads them, past L1.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.debug_barrier()
            # The next launch counts from zero again.
            tl.store(counters + tile, 0)
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(places + other * size, cache_modifier=".cg")
            _write(
                total,
                bias,
                add_to,
                out,
                row,
                token,
                row_tile,
                tokens,
                outputs,
                add_stride,
                out_stride,
                ACTIVATION,
                ROWS,
                TOKENS,
            )
