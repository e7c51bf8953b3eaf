"""Attention of any number of query tokens per sequence over the paged cache: prefill chunks,
after a prefix that is cached or not, and decode rows beside them.

A program has one tile: some consecutive tokens of one sequence by the query heads of one key head,
TILE_ROWS rows in all, so that the group shares what is read of K and V. Its loop over keys is cut
in up to three: tiles that the window's lower edge crosses, tiles that every row sees whole (no
mask is computed there), and tiles that the diagonal crosses. The host lists the tiles, those with
most keys first, so that the last to run are short.

A graph has room for the tiles of as many sequences as a step may have, which few steps have: each
launched in vain would cost a microsecond of a multiprocessor's time. So there are programs for as
many tiles as the tokens fill, and some more; beyond these a program takes several, short ones.

On Hopper whole tiles of keys and values come by descriptors (the tensor memory accelerator), which
leaves registers and instructions to what is done with them. The others don't: what lies past a
sequence's end must not be read.

Shapes: see paged.py; T tokens, Q = heads x D, N tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .architecture import Architecture, architecture_of
from .paged import (
    attend,
    attention_reference,
    block_size_of,
    cached_tokens,
    capped,
    score_scales,
    weigh,
)
from .prefill_table import TUNED

TILE_ROWS = 256
HOPPER = (9, 0)
MOST_DESCRIBED_TOKENS = 64  # of a tile that comes by a descriptor
MOST_DESCRIBED_HEADS = 16  # of a group
SPARE_TILES = 16  # which have programs of their own, beyond those that the tokens fill


class PrefillConfig(NamedTuple):
    """Keys that are read at once, warps, stages of the pipeline, rows of the tiles as planned,
    programs that share such a tile, and whether whole tiles of keys come by descriptors.
    """

    tile: int
    warps: int
    stages: int
    rows: int = TILE_ROWS
    programs: int = 1
    descriptors: bool = False


def tile_tokens(group: int, rows: int = TILE_ROWS) -> int:
    """Query tokens of a tile: in four equal parts, if so many fit, for programs that share it."""
    return 4 * (rows // 4 // group) or max(1, rows // group)


def plan_tiles(
    lengths: np.ndarray,
    group: int,
    context: np.ndarray | None = None,
    rows: int = TILE_ROWS,
) -> np.ndarray:
    """The tiles of a step: int32 [2, 1 + N] of (sequence, first query token in it), behind
    (N, 0).

    lengths: query tokens of each sequence, may be 0. group: query heads of a key head. Tiles come
    in the order of the keys that they see, most first; without the context they are taken to see
    what lies before them among the query tokens only. rows: as the launch's configuration has them.
    """
    tokens = tile_tokens(group, rows)
    counts = -(-lengths.astype(np.int64) // tokens)
    sequence = np.repeat(np.arange(len(lengths)), counts)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    seen = np.minimum(first + tokens, lengths[sequence])
    if context is not None:
        seen = seen + (context - lengths)[sequence]
    order = np.argsort(-seen, kind="stable")
    tiles = np.zeros((2, 1 + len(order)), np.int32)
    tiles[0, 0] = len(order)
    tiles[:, 1:] = sequence[order], first[order]
    return tiles


def choose_prefill_config(
    head_size: int,
    element_size: int,
    windowed: bool,
    described: bool,
    architecture: Architecture | None,
) -> PrefillConfig:
    """described: whether keys can come by descriptors. architecture: whose table is looked up; what
    it hasn't got goes by a rule, measured on an H200 for 16-bit types: wider rows take smaller
    tiles, as shared memory holds K, V and Q.
    """
    if found := TUNED.get(architecture, {}).get((head_size, element_size, windowed, described)):
        return PrefillConfig(*found)
    row_bytes = triton.next_power_of_2(head_size) * element_size
    if row_bytes <= 256:
        if described:
            # Two programs on a multiprocessor: one computes weights while the other multiplies.
            return PrefillConfig(64, 4, 3, programs=4, descriptors=True)
        return PrefillConfig(64, 16, 3)
    if row_bytes <= 512:
        return PrefillConfig(64 // (element_size // 2), 8, 2, programs=2)
    return PrefillConfig(16, 4, 2, programs=8)


def can_describe(cache: torch.Tensor, dtype: torch.dtype, group: int) -> bool:
    """Whether tiles of a cache can come by descriptors: on Hopper, or interpreted, if a tile lies
    in a block and needs no conversion, and small programs have room for a group of query heads.

    dtype: the queries'.
    """
    _, _, block_size, head_size = cache.shape
    if (architecture_of(cache.device) or HOPPER) < HOPPER:
        return False
    return (
        cache.dtype == dtype
        and dtype.itemsize == 2
        and group <= MOST_DESCRIBED_HEADS
        and block_size >= MOST_DESCRIBED_TOKENS
        and head_size == triton.next_power_of_2(head_size)
        and cache.data_ptr() % 16 == 0
        and cache.stride(0) * dtype.itemsize % 16 == 0
    )


@triton.jit
def key_ranges(first_position, last_position, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Where the three loops of a tile of queries begin and end: begin, whole_begin, whole_end, end.

    All are multiples of TILE but the end, and in order.
    """
    end = last_position + 1
    begin = 0
    whole_begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
        whole_begin = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), TILE) * TILE
    whole_end = tl.maximum((first_position + 1) // TILE * TILE, whole_begin)
    return begin, whole_begin, whole_end, end


@triton.jit
def attend_whole(
    q,
    k_blocks,
    v_blocks,
    kv_head,
    table,
    begin,
    end,
    most,
    total,
    acc,
    scale,
    cap_scale,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`attend` without a mask, by descriptors of [1, 1, TILE, D] of the caches."""
    block = tl.load(table + begin // BLOCK, mask=begin < end, other=0)
    for first in tl.range(begin, end, TILE):
        k = k_blocks.load([block, kv_head, first % BLOCK, 0]).reshape(TILE, D)
        v = v_blocks.load([block, kv_head, first % BLOCK, 0]).reshape(TILE, D)
        block = tl.load(table + (first + TILE) // BLOCK, mask=first + TILE < end, other=0)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if CAPPED:
            scores = capped(scores, cap_scale)
        weights, most, total, acc = weigh(scores, most, total, acc, scale, False)
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
    return most, total, acc


@triton.jit
def _attend_tile(
    q,
    k_cache,
    v_cache,
    k_blocks,
    v_blocks,
    table,
    out,
    kv_head,
    start,
    length,
    cached,
    first_token,
    tile_end,
    q_stride,
    out_stride,
    block_stride,
    scale,
    cap_scale,
    v_scale,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a program's tokens, first_token and those behind it, of one sequence."""
    last_token = tl.minimum(tl.minimum(first_token + TOKENS, tile_end), length) - 1
    row = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    token = first_token + row // GROUP
    inside = ((row < TOKENS * GROUP) & (token <= last_token))[:, None] & (d < D)[None, :]
    token = tl.minimum(token, last_token)
    column = ((kv_head * GROUP + row % GROUP) * D)[:, None] + d[None, :]
    global_row = (start + token).to(tl.int64)[:, None]
    queries = tl.load(q + global_row * q_stride + column, mask=inside, other=0.0)

    highs = cached + token
    lows = highs - WINDOW + 1
    begin, whole_begin, whole_end, end = key_ranges(
        cached + first_token, cached + last_token, TILE, WINDOW
    )
    k_cache += kv_head * BLOCK * D
    v_cache += kv_head * BLOCK * D
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for part in tl.static_range(3):
        # The window's edge, whole tiles, the diagonal. Without a window there is no such edge.
        if part > 0 or WINDOW > 0:
            if part == 0:
                part_begin, part_end = begin, tl.minimum(whole_begin, end)
            elif part == 1:
                part_begin, part_end = whole_begin, whole_end
            else:
                part_begin, part_end = whole_end, end
            if part == 1 and k_blocks is not None:
                most, total, acc = attend_whole(
                    queries,
                    k_blocks,
                    v_blocks,
                    kv_head,
                    table,
                    part_begin,
                    part_end,
                    most,
                    total,
                    acc,
                    scale,
                    cap_scale,
                    BLOCK,
                    TILE,
                    D,
                    CAPPED,
                    PRECISION,
                )
            else:
                most, total, acc = attend(
                    queries,
                    k_cache,
                    v_cache,
                    table,
                    part_begin,
                    part_end,
                    lows,
                    highs,
                    most,
                    total,
                    acc,
                    block_stride,
                    scale,
                    cap_scale,
                    BLOCK,
                    TILE,
                    D,
                    DP,
                    part != 1,
                    WINDOW > 0,
                    CAPPED,
                    PRECISION,
                )
    result = (acc * v_scale / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + global_row * out_stride + column, result, mask=inside)


@triton.jit(do_not_specialize=["tile_stride"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    k_blocks,
    v_blocks,
    tables,
    rows,
    starts,
    contexts,
    tiles,
    out,
    tile_stride,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    scale,
    cap_scale,
    v_scale,
    HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pieces = tl.load(tiles) * (HEADS * PROGRAMS)
    # What is the same for all pieces is cheaper to compute again than to keep in registers.
    for piece in tl.range(
        tl.program_id(0), pieces, tl.num_programs(0), num_stages=1, disable_licm=True
    ):
        kv_head, part = piece % HEADS, piece // HEADS
        tile = tiles + 1 + part // PROGRAMS
        sequence, tile_token = tl.load(tile), tl.load(tile + tile_stride)
        first_token = tile_token + part % PROGRAMS * TOKENS
        start = tl.load(starts + sequence)
        length = tl.load(starts + sequence + 1) - start
        context = tl.load(contexts + sequence)
        if (first_token < tl.minimum(length, tile_token + TILE_TOKENS)) & (context > 0):
            table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
            _attend_tile(
                q,
                k_cache,
                v_cache,
                k_blocks,
                v_blocks,
                table,
                out,
                kv_head,
                start,
                length,
                context - length,
                first_token,
                tile_token + TILE_TOKENS,
                q_stride,
                out_stride,
                block_stride,
                scale,
                cap_scale,
                v_scale,
                GROUP,
                TOKENS,
                ROWS,
                D,
                DP,
                BLOCK,
                TILE,
                WINDOW,
                CAPPED,
                PRECISION,
            )


def prefill_attention(
    q_TQ: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_RB: torch.Tensor,
    rows_S: torch.Tensor,
    starts_S1: torch.Tensor,
    context_S: torch.Tensor,
    tiles: torch.Tensor,
    out_TQ: torch.Tensor,
    *,
    scale: float,
    kv_heads: int,
    window: int = 0,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: PrefillConfig | None = None,
    pdl: bool = False,
) -> None:
    """Writes out_TQ: causal attention of each sequence's tokens, the last ones of its context.

    starts_S1: where each sequence's tokens begin in q, and the end. context_S: tokens in the cache,
    these included. tiles: `plan_tiles` on the device, padded with anything. Rows that belong to no
    tile, or to a sequence of context 0, are not written. window: tokens that are seen, the
    token itself included (0: all). The cache holds keys / k_scale and values / v_scale.
    """
    block_size, head_size = block_size_of(k_cache, v_cache, kv_heads), k_cache.shape[3]
    group = q_TQ.shape[1] // head_size // kv_heads
    assert len(tiles) == 2, tiles.shape
    assert tiles.dtype == torch.int32, tiles.dtype
    assert tiles.is_contiguous()
    described = can_describe(k_cache, q_TQ.dtype, group)
    config = config or choose_prefill_config(
        head_size, q_TQ.element_size(), window > 0, described, architecture_of(q_TQ.device)
    )
    score_scale, cap_scale = score_scales(scale * k_scale, soft_cap)
    rows = config.rows // config.programs
    tokens = max(1, rows // group)
    programs = triton.cdiv(tile_tokens(group, config.rows), tokens)
    places = min(tiles.shape[1] - 1, len(q_TQ) // tile_tokens(group, config.rows) + SPARE_TILES)
    blocks: list[TensorDescriptor | None] = [None, None]
    if config.descriptors:
        box = [1, 1, config.tile, head_size]
        blocks = [TensorDescriptor(x, [*x.shape], [*x.stride()], box) for x in (k_cache, v_cache)]
    _prefill_kernel[(max(1, places) * programs * kv_heads,)](
        q_TQ,
        k_cache,
        v_cache,
        *blocks,
        tables_RB,
        rows_S,
        starts_S1,
        context_S,
        tiles,
        out_TQ,
        tiles.stride(0),
        q_TQ.stride(0),
        out_TQ.stride(0),
        tables_RB.stride(0),
        k_cache.stride(0),
        score_scale,
        cap_scale,
        v_scale,
        HEADS=kv_heads,
        PROGRAMS=programs,
        GROUP=group,
        TILE_TOKENS=tile_tokens(group, config.rows),
        TOKENS=tokens,
        ROWS=max(rows, triton.next_power_of_2(group)),
        D=head_size,
        DP=max(16, triton.next_power_of_2(head_size)),
        BLOCK=block_size,
        TILE=config.tile,
        WINDOW=window,
        CAPPED=soft_cap > 0,
        PRECISION="tf32x3" if q_TQ.dtype == torch.float32 else "ieee",
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )


def prefill_attention_reference(
    q_TQ: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_RB: torch.Tensor,
    rows_S: torch.Tensor,
    starts_S1: torch.Tensor,
    context_S: torch.Tensor,
    tiles: torch.Tensor | None,
    out_TQ: torch.Tensor,
    *,
    scale: float,
    kv_heads: int,
    window: int = 0,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: PrefillConfig | None = None,
    pdl: bool = False,
) -> None:
    starts = starts_S1.tolist()
    for s, (row, context) in enumerate(zip(rows_S.tolist(), context_S.tolist(), strict=True)):
        if context and starts[s + 1] > starts[s]:
            keys, values = (cached_tokens(x, tables_RB[row], context) for x in (k_cache, v_cache))
            q_THD = q_TQ[starts[s] : starts[s + 1]].unflatten(1, (-1, k_cache.shape[3]))
            result = attention_reference(
                q_THD, keys * k_scale, values * v_scale, scale, window, soft_cap
            )
            out_TQ[starts[s] : starts[s + 1]] = result.flatten(1).to(out_TQ.dtype)
