"""What happens between the query-key-value product and attention, in one pass over it.

Queries and keys are normalised (models that have it: RMSNorm over each head), rotated by their
positions (RoFormer, Su et al., 2021; halves, not neighbours, form the pairs), and written with the
values to where attention reads them:

    q       [kv heads, tokens x group, head size]: queries of one key head are rows of one matrix
    keys    [blocks, kv heads, head size / pair, block size, pair]
    values  [blocks, kv heads, block size / pair, head size, pair]

`pair` is 1, or 2 for matrix tiles, which take the right-hand matrix in pairs of rows.
Legend: T tokens, G query heads per key head (group), K key heads, D head size.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from .openmp import FLAGS, Kernel, thread_number
from .scalars import narrow, pointer

F32 = np.float32(0)
I32 = np.int32(0)


def rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Reference of the rotation. cos and sin are [T, D / 2]."""
    first, second = x_THD.float().chunk(2, -1)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def write_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Reference of the cache's layout. key_cache [B, K, D / pair, S, pair], value_cache [B, K, S /
    pair, D, pair].
    """
    pair, block_size = key_cache.shape[-1], key_cache.shape[3]
    block, offset = slots_T // block_size, slots_T % block_size
    for t in range(len(slots_T)):
        key_cache[block[t], :, :, offset[t]] = (
            k_TKD[t].unflatten(-1, (-1, pair)).to(key_cache.dtype)
        )
        value_cache[block[t], :, offset[t] // pair, :, offset[t] % pair] = v_TKD[t].to(
            value_cache.dtype
        )


def read_cache(
    key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first `length` tokens of a block table, float32 [length, K, D]."""
    keys = key_cache[blocks].float().permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
    values = value_cache[blocks].float().permute(0, 2, 4, 1, 3).flatten(0, 2)
    return keys[:length], values[:length]


@njit(fastmath=FLAGS, error_model="numpy")
def _head(x, weight, has_norm, eps, cos, sin, out):
    """Normalise and rotate one head's vector, into float32 scratch."""
    half = cos.shape[0]
    scale = np.float32(1)
    if has_norm:
        total = np.float32(0)
        for d in range(2 * half):
            total += x[d] * x[d]
        scale = np.float32(1) / np.sqrt(total / np.float32(2 * half) + eps)
        for d in range(2 * half):
            out[d] = x[d] * scale * weight[d]
    else:
        for d in range(2 * half):
            out[d] = x[d]
    for d in range(half):
        first, second = out[d], out[d + half]
        out[d] = first * cos[d] - second * sin[d]
        out[d + half] = second * cos[d] + first * sin[d]


@njit(fastmath=FLAGS, error_model="numpy")
def _write_key(vector, slot):
    """slot [head size / pair, pair] of the key cache."""
    for i in range(slot.shape[0]):
        for j in range(slot.shape[1]):
            slot[i, j] = narrow(vector[i * slot.shape[1] + j], slot[0, 0])


@njit(fastmath=FLAGS, error_model="numpy")
def _write(vector, out):
    for d in range(out.shape[0]):
        out[d] = narrow(vector[d], out[0])


def _rope_and_cache(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    size, half, heads, group, pair = a.head_size, a.head_size // 2, a.kv_heads, a.group, a.pair
    qkv = carray(pointer(a.qkv, F32), (rows, a.stride))
    cos = carray(pointer(a.cos, F32), (rows, half))
    sin = carray(pointer(a.sin, F32), (rows, half))
    slots = carray(pointer(a.slots, I32), (rows,))
    q_weight = carray(pointer(a.q_weight, F32), (size,))
    k_weight = carray(pointer(a.k_weight, F32), (size,))
    q = carray(pointer(a.q, a.element), (heads, a.capacity * group, size))
    keys = carray(pointer(a.keys, a.cached), (a.blocks, heads, size // pair, a.block_size, pair))
    values = carray(
        pointer(a.values, a.cached), (a.blocks, heads, a.block_size // pair, size, pair)
    )
    scratch = carray(pointer(a.scratch + np.int64(thread_number()) * size * 4, F32), (size,))
    for t in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        vectors = qkv[t, : heads * (group + 2) * size].reshape((heads * (group + 2), size))
        block, offset = slots[t] // a.block_size, slots[t] % a.block_size
        for head in range(heads):
            for g in range(group):
                _head(
                    vectors[head * group + g],
                    q_weight,
                    a.q_weight != 0,
                    a.eps,
                    cos[t],
                    sin[t],
                    scratch,
                )
                _write(scratch, q[head, t * group + g])
            _head(
                vectors[heads * group + head],
                k_weight,
                a.k_weight != 0,
                a.eps,
                cos[t],
                sin[t],
                scratch,
            )
            _write_key(scratch, keys[block, head, :, offset])
            vector = vectors[heads * (group + 1) + head]
            _write(vector, values[block, head, offset // pair, :, offset % pair])


# qkv float32 [rows, stride]: all query heads, then key heads, then value heads. cos, sin float32
# [rows, head_size / 2]. slots int32 [rows]: block * block_size + offset. q_weight, k_weight float32
# [head_size] or 0. capacity: tokens that q has room for. scratch: head_size float32 for each
# thread.
rope_and_cache = Kernel(
    _rope_and_cache,
    "rows qkv stride cos sin slots q_weight k_weight q keys values capacity blocks block_size "
    "kv_heads group head_size pair scratch",
    "eps",
    has_cache=True,
)
