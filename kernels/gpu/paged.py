"""What the attention kernels share: a block's address, one pass over tiles of keys and values, and
the plain-torch attention that they are held against.

The cache of one layer is `[blocks, kv_heads, block_size, D]` for K and the same for V, and a row of
a block table names the blocks of a sequence. A program holds the query rows of one key head (token
by query head of its group), and walks over the tokens of one sequence TILE at a time with online
softmax: for each row the largest score so far, the sum of the weights and the weighted sum of
values, all in float32 and in powers of two.

A cache of 8 bits (float8_e4m3fn) holds keys / k_scale and values / v_scale, saturated. They are
cast to the queries' type before each product; k_scale is a factor of the scores, v_scale one of the
result.

Slots of a block that a sequence doesn't use may hold anything, NaN too: their scores are replaced,
and their values are never read.

Shapes: S sequences, R rows of the batch, B blocks of a row, D head size, DP the next power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def look_up(table, first, end, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """int64 block of the tile at token `first`; or of each token, where a tile spans blocks.

    Tokens from `end` on are in the null block, so that nothing past a table's entries is read.
    """
    tokens = first
    if TILE > BLOCK:
        tokens = first + tl.arange(0, TILE)
    return tl.load(table + tokens // BLOCK, mask=tokens < end, other=0).to(tl.int64)


@triton.jit
def tile_offsets(
    block,
    first,
    block_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """A tile's offset in the cache, and that of its [TILE, DP] elements from there."""
    tokens = tl.arange(0, TILE)
    d = tl.arange(0, DP)[None, :]
    if TILE <= BLOCK:
        base = block * block_stride + (first % BLOCK) * D
        offsets = tokens[:, None] * D + d
    else:
        base = 0
        offsets = (block * block_stride + ((first + tokens) % BLOCK) * D)[:, None] + d
    return base, offsets


@triton.jit
def capped(scores, cap_scale):
    """tanh of the scores, in powers of two."""
    return 1.0 - 2.0 / (tl.exp2(scores * cap_scale) + 1.0)


@triton.jit
def weigh(scores, most, total, acc, scale, MASKED: tl.constexpr):
    """One turn of online softmax: the weights of new `scores`, and the rest with the new scores'
    origin. With MASKED a row may have seen nothing yet.
    """
    new_most = tl.maximum(most, tl.max(scores, 1) * scale)
    origin = new_most
    if MASKED:
        # exp2(-inf - 0), not exp2(-inf + inf).
        origin = tl.where(new_most == float("-inf"), 0.0, new_most)
    weights = tl.exp2(scores * scale - origin[:, None])
    shrink = tl.exp2(most - origin)
    return weights, new_most, total * shrink + tl.sum(weights, 1), acc * shrink[:, None]


@triton.jit
def attend(
    q,
    k_cache,
    v_cache,
    table,
    begin,
    end,
    lows,
    highs,
    most,
    total,
    acc,
    block_stride,
    scale,
    cap_scale,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the tokens begin..end of one sequence to `most` and `total` [rows] and `acc` [rows, DP].

    begin is a multiple of TILE. q is [rows, DP], zero past D; k_cache and v_cache point to the key
    head's first element. With MASKED a row sees the tokens lows <= t <= highs (lows only with
    WINDOWED), and none past `end`; without it each row sees whole tiles. The scores are q k^T x
    scale, or with CAPPED tanh(q k^T x cap_scale) x scale; scale has log2(e) in it and is positive.
    """
    block = look_up(table, begin, end, BLOCK, TILE)
    for first in tl.range(begin, end, TILE):
        base, offsets = tile_offsets(block, first, block_stride, BLOCK, TILE, D, DP)
        # One tile ahead: a look-up in the same turn as the loads that need it would take half of
        # the pipeline's stages.
        block = look_up(table, first + TILE, end, BLOCK, TILE)
        if D == DP:
            k = tl.load(k_cache + base + offsets)
        else:
            k = tl.load(k_cache + base + offsets, mask=tl.arange(0, DP)[None, :] < D, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if CAPPED:
            scores = capped(scores, cap_scale)
        if MASKED:
            tokens = first + tl.arange(0, TILE)
            seen = tokens[None, :] <= highs[:, None]
            if WINDOWED:
                seen &= tokens[None, :] >= lows[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        weights, most, total, acc = weigh(scores, most, total, acc, scale, MASKED)
        if MASKED:
            inside = (first + tl.arange(0, TILE) < end)[:, None] & (tl.arange(0, DP)[None, :] < D)
            v = tl.load(v_cache + base + offsets, mask=inside, other=0.0)
        elif D == DP:
            v = tl.load(v_cache + base + offsets)
        else:
            v = tl.load(v_cache + base + offsets, mask=tl.arange(0, DP)[None, :] < D, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
    return most, total, acc


def score_scales(scale: float, soft_cap: float) -> tuple[float, float]:
    """`attend`'s scale and cap_scale: exp2 for exp, and tanh(x) = 1 - 2 / (exp2(2x log2 e) + 1)."""
    if soft_cap:
        return soft_cap * LOG2E, 2 * LOG2E * scale / soft_cap
    return scale * LOG2E, 0.0


def block_size_of(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_heads: int) -> int:
    """The caches' block size, once their layout is what the kernels take for granted."""
    _, heads, block_size, head_size = k_cache.shape
    assert k_cache.shape == v_cache.shape
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride()[1:] == (block_size * head_size, head_size, 1)
    assert heads == kv_heads
    assert block_size >= 16, block_size
    assert block_size & (block_size - 1) == 0, block_size
    return block_size


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In a cache's type. What 8 bits can't hold becomes the largest that they can, as the device's
    conversion has it.
    """
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)
    return x.to(dtype)


def cached_tokens(cache: torch.Tensor, table_B: torch.Tensor, context: int) -> torch.Tensor:
    """Float32 [context, kv_heads, D]: the keys or values of one sequence, in order."""
    block_size = cache.shape[2]
    blocks = table_B[: -(-context // block_size)].long()
    return cache[blocks].transpose(1, 2).flatten(0, 1)[:context].float()


def attention_reference(
    q_THD: torch.Tensor,
    keys_CKD: torch.Tensor,
    values_CKD: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """Float32 [T, H, D] for the last T of a sequence's C tokens, each seeing itself and those
    before it, `window` in all (0: no bound)."""
    context, group = len(keys_CKD), q_THD.shape[1] // keys_CKD.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys_CKD, values_CKD))
    position = torch.arange(context - len(q_THD), context, device=q_THD.device)[:, None]
    token = torch.arange(context, device=q_THD.device)[None]
    seen = token <= position
    if window:
        seen &= token > position - window
    scores = torch.einsum("thd,chd->htc", q_THD.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("htc,chd->thd", weights, values)
