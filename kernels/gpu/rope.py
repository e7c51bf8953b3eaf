"""Between the QKV product and attention: norms of query and key heads (where the model has them),
rotary position embedding (Su et al., 2021), and the write of keys and values into the paged cache.
One program per token and some heads, whichever of q, k and v they are.

Legend: T tokens, N = (heads + 2 kv_heads) D, Q = heads D, D head size, P positions, D2 = D / 2.
Caches are [num_blocks, kv_heads, block_size, D], contiguous in the last three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .paged import saturated

DECODE_TOKENS = 64  # up to here the device has room for more programs, each of fewer heads
DECODE_ELEMENTS = 512  # heads x head size in one program
PREFILL_ELEMENTS = 2048


def rope_and_cache_reference(
    qkv_TN: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_TQ: torch.Tensor,
    heads: int,
    kv_heads: int,
    *,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: bool = False,
) -> None:
    tokens, size = qkv_TN.shape[0], k_cache.shape[3]
    qkv = qkv_TN.float().view(tokens, heads + 2 * kv_heads, size)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    cos = cos_PD2[positions_T.long()][:, None]
    sin = sin_PD2[positions_T.long()][:, None]
    q_TQ.copy_(_rotated(_normed(q, q_weight_D, eps), cos, sin).reshape(tokens, -1))
    k = _rotated(_normed(k, k_weight_D, eps), cos, sin)
    real = slots_T >= 0
    block = slots_T[real].long() // k_cache.shape[2]
    offset = slots_T[real].long() % k_cache.shape[2]
    k_cache[block, :, offset] = saturated(k[real] * (1.0 / k_scale), k_cache.dtype)
    v_cache[block, :, offset] = saturated(v[real] * (1.0 / v_scale), v_cache.dtype)


def _normed(x_THD: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight_D is None:
        return x_THD
    return x_THD * torch.rsqrt(x_THD.square().mean(-1, keepdim=True) + eps) * weight_D


def _rotated(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x_THD.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rope_and_cache(
    qkv_TN: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_TQ: torch.Tensor,
    heads: int,
    kv_heads: int,
    *,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """Rotated queries to `q`, rotated keys and values to the cache.

    qkv: rows of [q heads | k heads | v heads], each of D. positions, slots: int32; a slot is
    block * block_size + offset, and for slot -1 nothing goes to the cache. cos, sin: float32 tables
    by position; halves of a head are rotated (x[:D/2] with x[D/2:]). q_weight, k_weight: float32,
    both or neither, for an RMSNorm of each query and key head before its rotation. The cache gets
    keys / k_scale and values / v_scale, saturated where it has 8 bits.
    """
    tokens, size = qkv_TN.shape[0], k_cache.shape[3]
    _check(qkv_TN, cos_PD2, sin_PD2, k_cache, v_cache, q_TQ, heads, kv_heads)
    if (q_weight_D is None) != (k_weight_D is None):
        raise ValueError("q_weight and k_weight come together or not at all")
    half_block = triton.next_power_of_2(size // 2)
    elements = DECODE_ELEMENTS if tokens <= DECODE_TOKENS else PREFILL_ELEMENTS
    group = max(1, elements // (2 * half_block))
    _rope_and_cache_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, group))](
        qkv_TN,
        positions_T,
        slots_T,
        cos_PD2,
        sin_PD2,
        q_weight_D,
        k_weight_D,
        k_cache,
        v_cache,
        q_TQ,
        qkv_TN.stride(0),
        q_TQ.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        BLOCK_SIZE=k_cache.shape[2],
        GROUP=group,
        HALF_BLOCK=half_block,
        PDL=pdl,
        num_warps=max(1, elements // 512),
        launch_pdl=pdl,
    )


def _check(
    qkv_TN: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_TQ: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> None:
    tokens, size = qkv_TN.shape[0], k_cache.shape[3]
    if size % 2:
        raise ValueError(f"head size is {size}; halves are rotated, so it must be even")
    if qkv_TN.shape[1] != (heads + 2 * kv_heads) * size or q_TQ.shape != (tokens, heads * size):
        raise ValueError(
            f"qkv is {tuple(qkv_TN.shape)}, q {tuple(q_TQ.shape)} for {heads} query heads and "
            f"{kv_heads} key heads of {size}"
        )
    if qkv_TN.stride(1) != 1 or q_TQ.stride(1) != 1:
        raise ValueError("rows must be in one piece")
    for name, table in (("cos", cos_PD2), ("sin", sin_PD2)):
        if table.shape[1] != size // 2 or not table.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(table.shape)}; it must be whole rows of {size // 2}"
            )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        block_size = cache.shape[2]
        if cache.shape[1] != kv_heads or cache.stride()[1:] != (block_size * size, size, 1):
            raise ValueError(
                f"{name} is {tuple(cache.shape)} of strides {cache.stride()}; it must be "
                f"[blocks, {kv_heads}, block_size, {size}] with blocks in one piece"
            )


@triton.jit
def _rope_and_cache_kernel(
    qkv,
    positions,
    slots,
    cos_table,
    sin_table,
    q_weight,
    k_weight,
    k_cache,
    v_cache,
    q_out,
    qkv_stride,
    q_stride,
    k_stride,
    v_stride,
    eps,
    k_factor,
    v_factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    d = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (d < HALF) & (head < HEADS + 2 * KV_HEADS)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS

    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    source = qkv + token * qkv_stride + head * (2 * HALF) + d
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_table + position * HALF + d, mask=d < HALF, other=0.0)
    sin = tl.load(sin_table + position * HALF + d, mask=d < HALF, other=0.0)

    if q_weight is not None:
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        factor = tl.rsqrt(squares / (2 * HALF) + eps)
        for_query = inside & is_query
        for_key = inside & (head >= HEADS)
        first_scale = tl.load(q_weight + d, mask=for_query, other=0.0)
        second_scale = tl.load(q_weight + HALF + d, mask=for_query, other=0.0)
        first_scale += tl.load(k_weight + d, mask=for_key, other=0.0)
        second_scale += tl.load(k_weight + HALF + d, mask=for_key, other=0.0)
        first = tl.where(is_value, first, first * factor * first_scale)
        second = tl.where(is_value, second, second * factor * second_scale)

    left = tl.where(is_value, first, first * cos - second * sin)
    right = tl.where(is_value, second, second * cos + first * sin)

    target = q_out + token * q_stride + head * (2 * HALF) + d
    mask = inside & is_query
    tl.store(target, left.to(q_out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, right.to(q_out.dtype.element_ty), mask=mask)

    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    cached = inside & (slot >= 0)
    kv_head = head - HEADS
    target = k_cache + block * k_stride + (kv_head * BLOCK_SIZE + offset) * (2 * HALF) + d
    mask = cached & (head >= HEADS) & (head < HEADS + KV_HEADS)
    left *= tl.where(is_value, v_factor, k_factor)
    right *= tl.where(is_value, v_factor, k_factor)
    tl.store(target, left.to(k_cache.dtype.element_ty), mask=mask)
    tl.store(target + HALF, right.to(k_cache.dtype.element_ty), mask=mask)
    kv_head = head - HEADS - KV_HEADS
    target = v_cache + block * v_stride + (kv_head * BLOCK_SIZE + offset) * (2 * HALF) + d
    mask = cached & is_value
    tl.store(target, left.to(v_cache.dtype.element_ty), mask=mask)
    tl.store(target + HALF, right.to(v_cache.dtype.element_ty), mask=mask)
