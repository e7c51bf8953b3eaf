"""Attention of one query token per sequence over the paged cache.

A program is a worker of one key head, with all its query heads: it goes through the sequences that
its plan gives it (decode_plan.py), or its part of them. A sequence that one worker has is written
out by it. Of several, each leaves its part in scratch and counts itself; the last to arrive merges
the parts, writes out, and sets the counter back to zero, so that there is no second launch.

Shapes: see paged.py; Q = heads x D; P parts of scratch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .decode_plan import DecodeConfig, plan_size
from .paged import (
    attend,
    attention_reference,
    block_size_of,
    cached_tokens,
    score_scales,
)

# Elements of the parts that are merged at once.
MERGED_ELEMENTS = 8192


class DecodeScratch(NamedTuple):
    """What the workers (or splits) of a launch tell each other. Launches of one stream share it."""

    parts_PQ: torch.Tensor
    lse_PH: torch.Tensor
    counters_N: torch.Tensor


def decode_scratch(
    max_sequences: int, heads: int, head_size: int, workers: int, device: torch.device | str
) -> DecodeScratch:
    """Scratch for launches of up to max_sequences sequences and so many workers (or splits)."""
    return DecodeScratch(
        torch.empty(2 * workers, heads * head_size, dtype=torch.float32, device=device),
        torch.empty(2 * workers, heads, dtype=torch.float32, device=device),
        torch.zeros(max_sequences * heads, dtype=torch.int32, device=device),
    )


@triton.jit
def part_of(first, number):
    """Where in scratch a sequence's part is, of which the worker `first` has number 0.

    Each worker has two places: for a sequence that others began, and one that others will end.
    """
    return 2 * (first + number) + tl.where(number == 0, 1, 0)


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
    counter,
    kv_head,
    first,
    number,
    count,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    GROUP_P: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Writes the rows of one key head to `out` (the sequence's row), alone or as the last of
    `count` parts to arrive. number: this part's; first: the worker of the first one. counter: of
    the sequence and the key head.
    """
    element, inside = group_elements(kv_head, GROUP, ROWS, D, DP)
    result = acc / total[:, None]
    if count == 1:
        tl.store(out + element, result.to(out.dtype.element_ty), mask=inside)
    else:
        part = part_of(first, number)
        tl.store(parts + part * HEADS * D + element, result, mask=inside)
        head = kv_head * GROUP + tl.arange(0, ROWS)
        lse = most + tl.log2(total)
        tl.store(lses + part * HEADS + head, lse, mask=tl.arange(0, ROWS) < GROUP)
        # All threads' parts come before the count; the count is a release, and an acquire for the
        # one that reads them.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == count - 1:
            tl.debug_barrier()
            # The next launch counts from zero again.
            tl.store(counter, 0)
            merge_parts(
                out, parts, lses, kv_head, first, count, HEADS, GROUP, D, DP, GROUP_P, MERGED
            )


@triton.jit
def merge_parts(
    out,
    parts,
    lses,
    kv_head,
    first,
    count,
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
    for number in range(0, count, MERGED):
        numbers = number + tl.arange(0, MERGED)
        part = part_of(first, numbers)
        present = (numbers < count)[:, None] & (row < GROUP)[None, :]
        lse = tl.load(
            lses + part[:, None] * HEADS + head[None, :],
            mask=present,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        values = tl.load(
            parts + (part * HEADS * D)[:, None, None] + element[None, :, :],
            mask=(numbers < count)[:, None, None] & inside[None, :, :],
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


@triton.jit
def _sequence(starts, contexts, rows, sequence, last):
    """Its place in the plan, its context and its row of the batch."""
    real = sequence < last
    start = tl.load(starts + sequence, mask=real, other=0)
    context = tl.load(contexts + sequence, mask=real, other=0)
    return start, context, tl.load(rows + sequence, mask=real, other=0)


@triton.jit
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    rows,
    contexts,
    plan,
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
    WORKERS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP_P: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    worker = tl.program_id(1)
    # These are the step's inputs, which no kernel writes. Those of a sequence are loaded while the
    # one before is attended to.
    length = tl.load(plan)
    first = tl.load(plan + 1 + worker)
    last = tl.load(plan + 1 + WORKERS + worker)
    starts = plan + 1 + 2 * WORKERS
    start, context, row = _sequence(starts, contexts, rows, first, last)
    element, inside = group_elements(kv_head, GROUP, ROWS, D, DP)
    k_cache += kv_head * BLOCK * D
    v_cache += kv_head * BLOCK * D
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for number in tl.range(0, last - first, num_stages=1):
        sequence = first + number
        next_start, next_context, next_row = _sequence(starts, contexts, rows, sequence + 1, last)
        low = 0
        if WINDOW:
            low = tl.maximum(context - WINDOW, 0)
        begin = low // TILE
        tiles = tl.maximum(tl.cdiv(context, TILE) - begin, 1)
        own = tl.maximum(worker * length - start, 0)  # the first of its tiles that are this one's
        until = tl.minimum(worker * length + length - start, tiles)
        end = tl.minimum((begin + until) * TILE, context)
        most, total, acc = attend(
            tl.load(q + sequence.to(tl.int64) * q_stride + element, mask=inside, other=0.0),
            k_cache,
            v_cache,
            tables + row.to(tl.int64) * table_stride,
            (begin + own) * TILE,
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
        total = tl.where(context == 0, 1.0, total)  # padding: zeros
        opener = start // length
        write_or_merge(
            most,
            total,
            acc * v_scale,
            out + sequence.to(tl.int64) * out_stride,
            parts,
            lses,
            counters + sequence * (HEADS // GROUP) + kv_head,
            kv_head,
            opener,
            worker - opener,
            (start + tiles - 1) // length - opener + 1,
            HEADS,
            GROUP,
            ROWS,
            D,
            DP,
            GROUP_P,
            MERGED,
        )
        start, context, row = next_start, next_context, next_row


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
    plan: torch.Tensor,
    out_SQ: torch.Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    kv_heads: int,
    config: DecodeConfig,
    window: int = 0,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """Writes out_SQ: attention of each sequence's last token, whose key and value are cached.

    plan: int32, what plan_decode makes of context_S and `config`, which no kernel before this one
    may write; sequences that are not in it are left out. A sequence of context 0 is padding, and
    its row of out becomes zero. window: tokens that are seen, the last included (0: all). The cache
    holds keys / k_scale and values / v_scale.
    """
    sequences, head_size = len(q_SQ), k_cache.shape[3]
    block_size = block_size_of(k_cache, v_cache, kv_heads)
    heads = q_SQ.shape[1] // head_size
    assert len(plan) >= plan_size(sequences, config), (len(plan), sequences, config)
    check_scratch(scratch, sequences, heads, config.workers)
    score_scale, cap_scale = score_scales(scale * k_scale, soft_cap)
    _decode_kernel[(kv_heads, config.workers)](
        q_SQ,
        k_cache,
        v_cache,
        tables_RB,
        rows_S,
        context_S,
        plan,
        out_SQ,
        *scratch,
        q_SQ.stride(0),
        out_SQ.stride(0),
        tables_RB.stride(0),
        k_cache.stride(0),
        score_scale,
        cap_scale,
        v_scale,
        WORKERS=config.workers,
        **shape_constants(heads, kv_heads, head_size),
        BLOCK=block_size,
        TILE=config.tile,
        WINDOW=window,
        CAPPED=soft_cap > 0,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )


def check_scratch(scratch: DecodeScratch, sequences: int, heads: int, workers: int) -> None:
    """Whether a launch's parts have their place."""
    assert sequences * heads <= len(scratch.counters_N), (sequences, heads)
    assert 2 * workers <= len(scratch.parts_PQ), (sequences, workers)
    assert scratch.lse_PH.shape[1] == heads, heads


def decode_attention_reference(
    q_SQ: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_RB: torch.Tensor,
    rows_S: torch.Tensor,
    context_S: torch.Tensor,
    plan: torch.Tensor | None,
    out_SQ: torch.Tensor,
    scratch: DecodeScratch | None,
    *,
    scale: float,
    kv_heads: int,
    config: DecodeConfig | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
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
