"""`batch_linear` by the tensor memory accelerator of Hopper, for steps of 64 tokens and more, whose
time is that of moving blocks into shared memory as much as of reading the weight.

A thread asks for a whole block by a descriptor, where the other kernel has all threads compute
addresses: that leaves registers to tiles of 128 x 128 and more, which read less from the L2 cache
for each product. Gate and up are two products of one block of x.

Splits of the inputs don't leave their sum to whoever comes last, who would read all parts of a
large tile alone. A program counts itself and waits for the others; then each adds up its share of
the tile's tokens, in the order of the splits. None waits for long: after some looks it gives its
share up, and the last to arrive does what was given up. So it ends whatever else runs on the
device, and who adds a share makes no difference to the sum. With SPINS = 0 the last does it all.

    counters, two words of a tile:
    arrivals    low byte: programs that have arrived. From bit 8 on: a bit for each share that was
                given up, in the same word, so that giving up is either before the last arrival or
                after it
    departures  programs that are done; the last sets both words back to zero

Legend: T tokens, K inputs, N rows of the weight; outputs are N, or N / 2 with an activation.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .activation import activated
from .batch_linear_table import Config

LINE_BYTES = 128
LOOKS = 4096  # at the counter, until a share is given up: some milliseconds


def check_tile_linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, config: Config, gated: bool
) -> None:
    """Raises ValueError for what a descriptor can't describe, or a tile can't hold."""
    for name, tensor in (("x", x_TK), ("weight", weight_NK)):
        if tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16:
            raise ValueError(
                f"{name} begins at {tensor.data_ptr():#x}, its rows {tensor.stride(0)} elements "
                "apart; both must be multiples of 16 bytes"
            )
    if config.splits > min(16, config.tokens) or config.splits & (config.splits - 1):
        raise ValueError(
            f"{config} has {config.splits} splits; it must be a power of two, of 16 and of the "
            "tile's tokens at most"
        )
    boxes = (config.rows // (2 if gated else 1), config.tokens)
    if max(boxes) > 256 or min(boxes) < 8:
        raise ValueError(f"{config} has blocks of {boxes} rows; from 8 to 256 are accepted")


def launch_tile_linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_TN: torch.Tensor,
    parts: torch.Tensor,
    counters: torch.Tensor,
    bias_N: torch.Tensor | None,
    activation: str | None,
    add_to_TN: torch.Tensor | None,
    config: Config,
    pdl: bool,
) -> None:
    """What `batch_linear` has checked."""
    gated = activation is not None
    check_tile_linear(x_TK, weight_NK, config, gated)
    rows, inputs = weight_NK.shape
    tokens, block = len(x_TK), config.block
    token_tiles = triton.cdiv(tokens, config.tokens)
    programs = triton.cdiv(rows, config.rows) * token_tiles * config.splits
    taken = config.rows // 2 if gated else config.rows
    _tile_linear_kernel[(programs,)](
        TensorDescriptor(x_TK, list(x_TK.shape), [x_TK.stride(0), 1], [config.tokens, block]),
        TensorDescriptor(weight_NK, [rows, inputs], [inputs, 1], [taken, block]),
        weight_NK,
        bias_N,
        add_to_TN,
        out_TN,
        parts,
        counters,
        tokens,
        out_TN.shape[1],
        inputs,
        0 if add_to_TN is None else add_to_TN.stride(0),
        out_TN.stride(0),
        ACTIVATION=activation,
        ONE_TILE=token_tiles == 1,
        ROWS=taken,
        TOKENS=config.tokens,
        BLOCK=block,
        SPLITS=config.splits,
        STAGES=config.stages,
        LINES=lines_ahead(config, weight_NK.element_size()) if pdl else 0,
        LINE=LINE_BYTES // weight_NK.element_size(),
        SWAP=config.swap,
        SPINS=LOOKS if programs <= _multiprocessors(x_TK.device) else 0,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def lines_ahead(config: Config, itemsize: int) -> int:
    """Cache lines of a row to ask for ahead: a power of two."""
    lines = config.prefetch * config.block * itemsize // LINE_BYTES
    return 1 << lines.bit_length() - 1 if lines else 0


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Programs that run at once for certain; one after the other where Triton interprets."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def ask_for_lines(first_of_row, start, inputs, LINES: tl.constexpr, LINE: tl.constexpr):
    """Into the L2 cache, LINES cache lines of each row."""
    k = tl.minimum(start + tl.arange(0, LINES) * LINE, inputs - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [(first_of_row + k[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def add_product(y, w, values, SWAP: tl.constexpr):
    if SWAP:
        y = tl.dot(w, values.T, y, input_precision="tf32x3")
    else:
        y = tl.dot(values, w.T, y, input_precision="tf32x3")
    return y


@triton.jit
def _finish(
    y,
    up,
    bias,
    add_to,
    out,
    token,
    n,
    tokens,
    outputs,
    add_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
):
    """What comes after the product: y and up are of tokens `token` and outputs `n`."""
    real = n < outputs
    if bias is not None:
        y += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        if bias is not None:
            up += tl.load(bias + outputs + n, mask=real, other=0.0).to(tl.float32)[None, :]
        y = activated(y, ACTIVATION) * up
    inside = (token < tokens)[:, None] & real[None, :]
    row = token.to(tl.int64)[:, None]
    if add_to is not None:
        before = tl.load(add_to + row * add_stride + n[None, :], mask=inside, other=0.0)
        y += before.to(tl.float32)
    tl.store(out + row * out_stride + n[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _finish_share(
    places,
    share,
    bias,
    add_to,
    out,
    first_token,
    n,
    tokens,
    outputs,
    add_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A share of a tile's tokens: its sum, in the order of the splits."""
    count: tl.constexpr = TOKENS // SPLITS
    weights: tl.constexpr = 1 if ACTIVATION is None else 2
    size: tl.constexpr = TOKENS * ROWS
    i = share * count + tl.arange(0, count)
    within = places + i[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    y = tl.zeros([count, ROWS], tl.float32)
    up = tl.zeros([count, ROWS], tl.float32)
    for other in tl.static_range(SPLITS):
        y += tl.load(within + other * weights * size, cache_modifier=".cg")
        if ACTIVATION is not None:
            up += tl.load(within + (other * weights + 1) * size, cache_modifier=".cg")
    _finish(
        y,
        up,
        bias,
        add_to,
        out,
        first_token + i,
        n,
        tokens,
        outputs,
        add_stride,
        out_stride,
        ACTIVATION,
    )


@triton.jit(do_not_specialize=["tokens"])
def _tile_linear_kernel(
    x,
    weight,
    weight_start,
    bias,
    add_to,
    out,
    parts,
    counters,
    tokens,
    outputs,
    inputs,
    add_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    ONE_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    SWAP: tl.constexpr,
    SPINS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Programs that share a block of the weight are side by side, and then those of one result.
    program = tl.program_id(0)
    token_tile = 0
    token_tiles = 1
    if not ONE_TILE:
        token_tiles = tl.cdiv(tokens, TOKENS)
        token_tile = program % token_tiles
        program = program // token_tiles
    split = program % SPLITS
    row_tile = program // SPLITS

    first_row, first_token = row_tile * ROWS, token_tile * TOKENS
    blocks = tl.cdiv(inputs, BLOCK)
    length = tl.cdiv(blocks, SPLITS)
    first = split * length
    last = tl.minimum(first + length, blocks)
    n = first_row + tl.arange(0, ROWS)
    if LINES:
        row = tl.minimum(n, outputs - 1).to(tl.int64)[:, None]
        ask_for_lines(weight_start + row * inputs, first * BLOCK, inputs, LINES, LINE)
        if ACTIVATION is not None:
            ups = weight_start + (row + outputs) * inputs
            ask_for_lines(ups, first * BLOCK, inputs, LINES, LINE)
    if PDL:
        tl.extra.cuda.gdc_wait()

    y = tl.zeros([ROWS, TOKENS] if SWAP else [TOKENS, ROWS], tl.float32)
    up = tl.zeros([ROWS, TOKENS] if SWAP else [TOKENS, ROWS], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        values = x.load([first_token, block * BLOCK])
        w = weight.load([first_row, block * BLOCK])
        y = add_product(y, w, values, SWAP)
        if ACTIVATION is not None:
            w_up = weight.load([outputs + first_row, block * BLOCK])
            up = add_product(up, w_up, values, SWAP)
    if SWAP:
        y = y.T
        up = up.T

    if SPLITS == 1:
        token = first_token + tl.arange(0, TOKENS)
        _finish(
            y,
            up,
            bias,
            add_to,
            out,
            token,
            n,
            tokens,
            outputs,
            add_stride,
            out_stride,
            ACTIVATION,
        )
    else:
        weights: tl.constexpr = 1 if ACTIVATION is None else 2
        size: tl.constexpr = TOKENS * ROWS
        tile = row_tile * token_tiles + token_tile
        places = parts + tile.to(tl.int64) * (SPLITS * weights * size)
        own = tl.arange(0, TOKENS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        own += split * weights * size
        tl.store(places + own, y)
        if ACTIVATION is not None:
            tl.store(places + own + size, up)
        # All threads' parts come before the count; the count is a release, and an acquire for those
        # that read them, past L1.
        tl.debug_barrier()
        counter = counters + 2 * tile
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        is_last = before & 255 == SPLITS - 1
        arrived = (before & 255) + 1
        looks = 0
        while (arrived < SPLITS) & (looks < SPINS):
            arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu") & 255
            looks += 1
        if arrived < SPLITS:
            late = tl.atomic_or(counter, 256 << split, sem="acq_rel", scope="gpu")
            arrived = late & 255
        tl.debug_barrier()
        # What the last one found given up, and its own share; others, their own in time.
        shares = tl.where(arrived == SPLITS, 1 << split, 0)
        shares = tl.where(is_last, before >> 8 | shares, shares)
        for share in tl.range(SPLITS):
            if (shares >> share) & 1:
                _finish_share(
                    places,
                    share,
                    bias,
                    add_to,
                    out,
                    first_token,
                    n,
                    tokens,
                    outputs,
                    add_stride,
                    out_stride,
                    ACTIVATION,
                    ROWS,
                    TOKENS,
                    SPLITS,
                )
        done = tl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu")
        if done == SPLITS - 1:
            # The next launch counts from zero again.
            tl.store(counter, 0)
            tl.store(counter + 1, 0)
