"""QK-norm, rotary position embedding, cache write and decode attention in one launch, for few
sequences, where the gaps between launches cost more than what is in them.

A program has one sequence, one key head with all its query heads, and one split of the context. How
many splits are launched is fixed by the host (a CUDA graph keeps its grid); how many have tokens
each program computes from the context. They are merged as the parts of decode_attention.py.

Each program norms and rotates the query heads of its key head by itself. The one whose split has
the sequence's last token also makes that token's key and value, writes them to the cache, and takes
them into its sum from registers; no program reads from the cache what another one writes.

Shapes: see decode_attention.py; N = (heads + 2 kv_heads) x D.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .decode_attention import (
    DecodeScratch,
    check_scratch,
    decode_attention_reference,
    group_elements,
    shape_constants,
    write_or_merge,
)
from .paged import attend, block_size_of, score_scales
from .rope import rope_and_cache_reference

# Programs that the 132 multiprocessors of an H200 hold at once, four each.
RESIDENT = 528
MAX_SPLITS = 64
SHORTEST_SPLIT = 64  # tokens


class SplitConfig(NamedTuple):
    """How a launch is cut: splits of `shortest` tokens or more, read `tile` tokens at a time."""

    splits: int
    shortest: int
    tile: int
    warps: int
    stages: int


def choose_split_config(
    sequences: int, kv_heads: int, longest: int, window: int, row_bytes: int
) -> SplitConfig:
    """The configuration for contexts up to `longest`, and keys of row_bytes bytes; measured on an
    H200.
    """
    span = min(longest, window) if window else longest
    programs = sequences * kv_heads
    most = min(RESIDENT // programs, max(16, 128 // programs), MAX_SPLITS)
    splits = max(1, min(most, -(-span // SHORTEST_SPLIT)))
    if programs * splits <= RESIDENT // 2:
        tile, warps, stages = 64, 4, 4
    else:
        tile, warps, stages = 32, 2, 3
    # A tile of keys is at most 16 KiB, so that a multiprocessor has room for several programs.
    tile = max(16, min(tile, 1 << (16384 // row_bytes).bit_length() - 1))
    return SplitConfig(splits, SHORTEST_SPLIT, tile, warps, stages)


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
def _rotated(x, inside, weight, cos, sin, eps, D: tl.constexpr, DP: tl.constexpr):
    """Float32 [rows, DP]: heads normed (where there is a weight) and rotated; 0 where not inside.

    x [rows, DP] points to the heads' elements; cos and sin to the position's row.
    """
    d = tl.arange(0, DP)
    in_first_half = d < D // 2
    to_partner = tl.where(in_first_half, D // 2, -(D // 2))
    angle = tl.where(in_first_half, d, d - D // 2)
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x + to_partner[None, :], mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=d < D, other=0.0)
    sine = tl.load(sin + angle, mask=d < D, other=0.0)
    if weight is not None:
        factor = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= factor * tl.load(weight + d, mask=d < D, other=0.0)[None, :]
        partner *= factor * tl.load(weight + d + to_partner, mask=d < D, other=0.0)[None, :]
    sine = tl.where(in_first_half, -sine, sine)
    return value * cosine[None, :] + partner * sine[None, :]


@triton.jit(do_not_specialize=["splits", "shortest"])
def _fused_decode_kernel(
    qkv,
    positions,
    slots,
    cos,
    sin,
    q_weight,
    k_weight,
    k_cache,
    v_cache,
    tables,
    rows,
    contexts,
    out,
    parts,
    lses,
    counters,
    qkv_stride,
    out_stride,
    table_stride,
    block_stride,
    eps,
    scale,
    k_factor,
    v_factor,
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
    element, inside = group_elements(kv_head, GROUP, ROWS, D, DP)
    if split < active:
        element_type = k_cache.dtype.element_ty
        row = tl.load(rows + sequence).to(tl.int64)
        position = tl.load(positions + sequence).to(tl.int64)
        slot = tl.load(slots + sequence).to(tl.int64)
        cos += position * (D // 2)
        sin += position * (D // 2)
        qkv += sequence.to(tl.int64) * qkv_stride
        d = tl.arange(0, DP)
        new_key = qkv + HEADS * D + kv_head * D + d
        q = _rotated(qkv + element, inside, q_weight, cos, sin, eps, D, DP)
        q = q.to(qkv.dtype.element_ty)
        new_k = _rotated(new_key[None, :], (d < D)[None, :], k_weight, cos, sin, eps, D, DP)
        new_k = (new_k * k_factor).to(element_type)
        new_v = tl.load(new_key + (HEADS // GROUP) * D, mask=d < D, other=0.0)[None, :]
        new_v = (new_v.to(tl.float32) * v_factor).to(element_type)
        k_cache += kv_head * BLOCK * D
        v_cache += kv_head * BLOCK * D

        has_last = split == active - 1
        target = slot // BLOCK * block_stride + slot % BLOCK * D + d[None, :]
        written = (d < D)[None, :] & has_last & (slot >= 0)
        tl.store(k_cache + target, new_k, mask=written)
        tl.store(v_cache + target, new_v, mask=written)

        new_score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
        new_values = tl.zeros([ROWS, DP], tl.float32) + new_v.to(tl.float32)
        cached_end = tl.minimum(end, context - 1)
        most, total, acc = attend(
            q,
            k_cache,
            v_cache,
            tables + row * table_stride,
            begin,
            cached_end,
            tl.full([ROWS], 0, tl.int32) + low,
            tl.full([ROWS], 0, tl.int32) + cached_end - 1,
            tl.where(has_last, new_score, float("-inf")),
            tl.where(has_last, tl.full([ROWS], 1.0, tl.float32), 0.0),
            tl.where(has_last, new_values, 0.0),
            block_stride,
            scale,
            0.0,
            BLOCK,
            TILE,
            D,
            DP,
            True,
            WINDOW > 0,
            False,
            "ieee",
        )
        write_or_merge(
            most,
            total,
            acc * v_scale,
            out,
            parts + sequence * (2 * splits * HEADS * D),
            lses + sequence * (2 * splits * HEADS),
            counters + sequence * (HEADS // GROUP) + kv_head,
            kv_head,
            0,
            split,
            active,
            HEADS,
            GROUP,
            ROWS,
            D,
            DP,
            GROUP_P,
            MERGED,
        )
    elif context == 0 and split == 0:
        zeros = tl.zeros([ROWS, DP], out.dtype.element_ty)
        tl.store(out + element, zeros, mask=inside)


def fused_decode_attention(
    qkv_SN: torch.Tensor,
    positions_S: torch.Tensor,
    slots_S: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_RB: torch.Tensor,
    rows_S: torch.Tensor,
    context_S: torch.Tensor,
    out_SQ: torch.Tensor,
    scratch: DecodeScratch,
    *,
    heads: int,
    kv_heads: int,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    scale: float,
    window: int = 0,
    longest: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: SplitConfig | None = None,
    pdl: bool = False,
) -> None:
    """`rope_and_cache` and `decode_attention` in one: writes out_SQ and the cache at slots_S.

    slots_S must be where the tables have each sequence's last token; -1 writes nothing. cos and
    sin: float32 [positions, D / 2]. A sequence of context 0 is padding: zeros in out, no write.
    k_scale, v_scale: as of the two.
    """
    sequences, head_size = len(qkv_SN), k_cache.shape[3]
    block_size = block_size_of(k_cache, v_cache, kv_heads)
    assert head_size % 2 == 0, head_size
    assert qkv_SN.shape[1] == (heads + 2 * kv_heads) * head_size, qkv_SN.shape
    assert cos_PD2.stride() == sin_PD2.stride() == (head_size // 2, 1)
    config = config or choose_split_config(
        sequences,
        kv_heads,
        longest or tables_RB.shape[1] * block_size,
        window,
        head_size * k_cache.element_size(),
    )
    check_scratch(scratch, sequences, heads, sequences * config.splits)
    _fused_decode_kernel[(kv_heads, sequences, config.splits)](
        qkv_SN,
        positions_S,
        slots_S,
        cos_PD2,
        sin_PD2,
        q_weight_D,
        k_weight_D,
        k_cache,
        v_cache,
        tables_RB,
        rows_S,
        context_S,
        out_SQ,
        *scratch,
        qkv_SN.stride(0),
        out_SQ.stride(0),
        tables_RB.stride(0),
        k_cache.stride(0),
        eps,
        score_scales(scale * k_scale, 0.0)[0],
        1.0 / k_scale,
        1.0 / v_scale,
        v_scale,
        config.splits,
        config.shortest,
        **shape_constants(heads, kv_heads, head_size),
        BLOCK=block_size,
        TILE=config.tile,
        WINDOW=window,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )


def fused_decode_attention_reference(
    qkv_SN: torch.Tensor,
    positions_S: torch.Tensor,
    slots_S: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_RB: torch.Tensor,
    rows_S: torch.Tensor,
    context_S: torch.Tensor,
    out_SQ: torch.Tensor,
    scratch: DecodeScratch | None,
    *,
    heads: int,
    kv_heads: int,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    scale: float,
    window: int = 0,
    longest: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: SplitConfig | None = None,
    pdl: bool = False,
) -> None:
    q_SQ = torch.empty_like(out_SQ)
    rope_and_cache_reference(
        qkv_SN,
        positions_S,
        slots_S,
        cos_PD2,
        sin_PD2,
        k_cache,
        v_cache,
        q_SQ,
        heads,
        kv_heads,
        q_weight_D=q_weight_D,
        k_weight_D=k_weight_D,
        eps=eps,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    decode_attention_reference(
        q_SQ,
        k_cache,
        v_cache,
        tables_RB,
        rows_S,
        context_S,
        None,
        out_SQ,
        scratch,
        scale=scale,
        kv_heads=kv_heads,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
    )
