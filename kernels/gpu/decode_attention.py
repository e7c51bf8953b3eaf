"""Attention of one query token per sequence over the paged cache.

A program has one sequence, one key head with all its query heads, and one split of the context.
Splits are there to fill the GPU when sequences are few. How many are launched is fixed by the host
(a CUDA graph keeps its grid); how many have tokens each program computes from the context. A
sequence that needs one split is written out by it. Of several, each leaves its part in scratch and
counts itself; the last to arrive merges the parts, writes out, and sets the counter back to zero,
so that there is no second launch.

Shapes: see paged.py; Q = heads x D; P parts of scratch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .paged import (
    attend,
    attention_reference,
    block_size_of,
    cached_tokens,
    score_scales,
)

# Programs that the 132 multiprocessors of an H200 hold at once, four each.
RESIDENT = 528
MAX_SPLITS = 64
# Sequences x splits, where there is more than one split.
MAX_PARTS = 1024
# Tokens of a split: where sequences are few, and where splits only even out their lengths.
SHORTEST_SPLIT = 64
LONG_SPLIT = 2048
# Elements of the parts that are merged at once.
MERGED_ELEMENTS = 8192


class DecodeScratch(NamedTuple):
    """What the splits of a launch tell each other; any launches of one stream may share it."""

    parts_PQ: torch.Tensor
    lse_PH: torch.Tensor
    counters_N: torch.Tensor


class DecodeConfig(NamedTuple):
    """How a launch is cut: splits of `shortest` tokens or more, read `tile` tokens at a time."""

    splits: int
    shortest: int
    tile: int
    warps: int
    stages: int


def decode_scratch(
    max_sequences: int, heads: int, head_size: int, device: torch.device | str
) -> DecodeScratch:
    """Scratch for launches of up to max_sequences sequences."""
    parts = min(max_sequences * MAX_SPLITS, MAX_PARTS)
    return DecodeScratch(
        torch.empty(parts, heads * head_size, dtype=torch.float32, device=device),
        torch.empty(parts, heads, dtype=torch.float32, device=device),
        torch.zeros(max_sequences * heads, dtype=torch.int32, device=device),
    )


def choose_decode_config(
    sequences: int, kv_heads: int, longest: int, window: int, row_bytes: int
) -> DecodeConfig:
    """The configuration for a capacity of `sequences`, contexts up to `longest`, and keys of
    row_bytes bytes; measured on an H200.
    """
    span = min(longest, window) if window else longest
    programs = sequences * kv_heads
    if programs < RESIDENT:
        most = min(RESIDENT // programs, max(16, 128 // programs), MAX_SPLITS)
        splits, shortest = min(most, -(-span // SHORTEST_SPLIT)), SHORTEST_SPLIT
    else:
        splits, shortest = -(-span // LONG_SPLIT), LONG_SPLIT
    splits = max(1, min(splits, MAX_SPLITS, MAX_PARTS // sequences))
    if programs * splits <= RESIDENT // 2:
        tile, warps, stages = 64, 4, 4
    elif programs <= 2 * RESIDENT:
        tile, warps, stages = 32, 2, 3
    else:
        tile, warps, stages = 32, 2, 2
    # A tile of keys is at most 16 KiB, so that a multiprocessor has room for several programs.
    tile = max(16, min(tile, 1 << (16384 // row_bytes).bit_length() - 1))
    return DecodeConfig(splits, shortest, tile, warps, stages)


@triton.jit
def split_range(context, splits, split, shortest, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first token that is seen; begin and end of this split; and how many splits have tokens.

    begin is a multiple of TILE, at or before the first token seen.
    """
    low = 0
    if WINDOW:
        low = tl.maximum(context - WINDOW, 0)
    start = low // TILE * TILE
    length = tl.maximum(tl.cdiv(context - start, splits), shortest)
    length = tl.cdiv(length, TILE) * TILE
    begin = start + split * length
    return low, begin, tl.minimum(begin + length, context), tl.cdiv(context - start, length)


@triton.jit
def group_elements(
    kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """[ROWS, DP] offsets of one key head's query heads in a token's row, and which are real."""
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, DP)[None, :]
    return (kv_head * GROUP + row) * D + d, (row < GROUP) & (d < D)


@triton.jit
def write_or_merge(
    most,
    total,
    acc,
    out,
    parts,
    lses,
    counters,
    sequence,
    kv_head,
    split,
    splits,
    active,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP_P: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Writes the rows of one key head to `out` (the sequence's row), alone or as the last of
    `active` splits to arrive.
    """
    element, inside = group_elements(kv_head, GROUP, ROWS, D, DP)
    result = acc / total[:, None]
    if not SPLIT:
        tl.store(out + element, result.to(out.dtype.element_ty), mask=inside)
    else:
        if active == 1:
            tl.store(out + element, result.to(out.dtype.element_ty), mask=inside)
        else:
            part = sequence * splits + split
            tl.store(parts + part * HEADS * D + element, result, mask=inside)
            head = kv_head * GROUP + tl.arange(0, ROWS)
            lse = most + tl.log2(total)
            tl.store(lses + part * HEADS + head, lse, mask=tl.arange(0, ROWS) < GROUP)
            # All threads' parts come before the count; the count is a release, and an acquire
            # for the one that reads them.
            tl.debug_barrier()
            counter = counters + sequence * (HEADS // GROUP) + kv_head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == active - 1:
                tl.debug_barrier()
                # The next launch counts from zero again.
                tl.store(counter, 0)
                merge_parts(
                    out,
                    parts + sequence * splits * HEADS * D,
                    lses + sequence * splits * HEADS,
                    kv_head,
                    active,
                    HEADS,
                    GROUP,
                    D,
                    DP,
                    GROUP_P,
                    MERGED,
                )


@triton.jit
def merge_parts(
    out,
    parts,
    lses,
    kv_head,
    active,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    GROUP_P: tl.constexpr,
    MERGED: tl.constexpr,
):
    """out = the parts' mean, weighted by 2 ** lse. Read past L1, which may be older than they."""
    row = tl.arange(0, GROUP_P)
    head = kv_head * GROUP + row
    element, inside = group_elements(kv_head, GROUP, GROUP_P, D, DP)
    most = tl.full([GROUP_P], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, DP], tl.float32)
    for first in range(0, active, MERGED):
        part = first + tl.arange(0, MERGED)
        present = (part < active)[:, None] & (row < GROUP)[None, :]
        lse = tl.load(
            lses + part[:, None] * HEADS + head[None, :],
            mask=present,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        values = tl.load(
            parts + (part * HEADS * D)[:, None, None] + element[None, :, :],
            mask=(part < active)[:, None, None] & inside[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_most = tl.maximum(most, tl.max(lse, 0))
        # Rows past the group have no part at all: neither -inf + inf here, nor 0 / 0 below.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(lse - base[None, :])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        most = new_most
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + element, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "shortest"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    rows,
    contexts,
    out,
    parts,
    lses,
    counters,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    scale,
    cap_scale,
    v_scale,
    splits,
    shortest,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP_P: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts + sequence)
    low, begin, end, active = split_range(context, splits, split, shortest, TILE, WINDOW)
    out += sequence.to(tl.int64) * out_stride
    if split < active:
        element, inside = group_elements(kv_head, GROUP, ROWS, D, DP)
        q_rows = q + sequence.to(tl.int64) * q_stride + element
        row = tl.load(rows + sequence).to(tl.int64)
        most, total, acc = attend(
            tl.load(q_rows, mask=inside, other=0.0),
            k_cache + kv_head * BLOCK * D,
            v_cache + kv_head * BLOCK * D,
            tables + row * table_stride,
            begin,
            end,
            tl.full([ROWS], 0, tl.int32) + low,
            tl.full([ROWS], 0, tl.int32) + end - 1,
            tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, DP], tl.float32),
            block_stride,
            scale,
            cap_scale,
            BLOCK,
            TILE,
            D,
            DP,
            True,
            WINDOW > 0,
            CAPPED,
            "ieee",
        )
        write_or_merge(
            most,
            total,
            acc * v_scale,
            out,
            parts,
            lses,
            counters,
            sequence,
            kv_head,
            split,
            splits,
            active,
            HEADS,
            GROUP,
            ROWS,
            D,
            DP,
            SPLIT,
            GROUP_P,
            MERGED,
        )
    elif context == 0 and split == 0:
        element, inside = group_elements(kv_head, GROUP, ROWS, D, DP)
        zeros = tl.zeros([ROWS, DP], out.dtype.element_ty)
        tl.store(out + element, zeros, mask=inside)


def shape_constants(heads: int, kv_heads: int, head_size: int) -> dict[str, int]:
    """The constants of a kernel that follow from the model's heads."""
    group = heads // kv_heads
    padded, size = triton.next_power_of_2(group), triton.next_power_of_2(head_size)
    return {
        "HEADS": heads,
        "GROUP": group,
        "ROWS": max(16, padded),
        "D": head_size,
        "DP": max(16, size),
        "GROUP_P": padded,
        "MERGED": max(1, MERGED_ELEMENTS // (padded * size)),
    }


def decode_attention(
    q_SQ: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_RB: torch.Tensor,
    rows_S: torch.Tensor,
    context_S: torch.Tensor,
    out_SQ: torch.Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    kv_heads: int,
    window: int = 0,
    soft_cap: float = 0.0,
    longest: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: DecodeConfig | None = None,
    pdl: bool = False,
) -> None:
    """Writes out_SQ: attention of each sequence's last token, whose key and value are cached.

    A sequence of context 0 is padding, and its row of out becomes zero. window: tokens that are
    seen, the last included (0: all). longest: the host's bound of context_S, from which splits are
    chosen (the tables' width otherwise); a longer context is right, but slow. The cache holds
    keys / k_scale and values / v_scale.
    """
    sequences, (_, width), head_size = len(q_SQ), tables_RB.shape, k_cache.shape[3]
    block_size = block_size_of(k_cache, v_cache, kv_heads)
    heads = q_SQ.shape[1] // head_size
    config = config or choose_decode_config(
        sequences,
        kv_heads,
        longest or width * block_size,
        window,
        head_size * k_cache.element_size(),
    )
    check_scratch(scratch, sequences, heads, config.splits)
    score_scale, cap_scale = score_scales(scale * k_scale, soft_cap)
    _decode_kernel[(kv_heads, sequences, config.splits)](
        q_SQ,
        k_cache,
        v_cache,
        tables_RB,
        rows_S,
        context_S,
        out_SQ,
        *scratch,
        q_SQ.stride(0),
        out_SQ.stride(0),
        tables_RB.stride(0),
        k_cache.stride(0),
        score_scale,
        cap_scale,
        v_scale,
        config.splits,
        config.shortest,
        **shape_constants(heads, kv_heads, head_size),
        BLOCK=block_size,
        TILE=config.tile,
        WINDOW=window,
        CAPPED=soft_cap > 0,
        SPLIT=config.splits > 1,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )


def check_scratch(scratch: DecodeScratch, sequences: int, heads: int, splits: int) -> None:
    """Whether a launch's parts have their place."""
    assert sequences * heads <= len(scratch.counters_N), (sequences, heads)
    assert splits == 1 or sequences * splits <= len(scratch.parts_PQ), (sequences, splits)
    assert scratch.lse_PH.shape[1] == heads, heads


def decode_attention_reference(
    q_SQ: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_RB: torch.Tensor,
    rows_S: torch.Tensor,
    context_S: torch.Tensor,
    out_SQ: torch.Tensor,
    scratch: DecodeScratch | None,
    *,
    scale: float,
    kv_heads: int,
    window: int = 0,
    soft_cap: float = 0.0,
    longest: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: DecodeConfig | None = None,
    pdl: bool = False,
) -> None:
    out_SQ.zero_()
    for s, (row, context) in enumerate(zip(rows_S.tolist(), context_S.tolist(), strict=True)):
        if context:
            keys, values = (cached_tokens(x, tables_RB[row], context) for x in (k_cache, v_cache))
            q_THD = q_SQ[s].unflatten(0, (-1, k_cache.shape[3]))[None]
            result = attention_reference(
                q_THD, keys * k_scale, values * v_scale, scale, window, soft_cap
            )
            out_SQ[s] = result.flatten().to(out_SQ.dtype)
