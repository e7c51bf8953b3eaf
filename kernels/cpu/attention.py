"""Attention of any number of sequences over the paged cache, prefill and decode alike, for any
element type.

The queries of one key head form a matrix of rows (token, query head of the group). Sixteen rows of
one sequence and one key head are a piece of work, and one chunk. For each piece there are three
passes: the scores of all keys that any of its rows sees, their softmax row by row, and the weighted
sum of values. The scores are kept whole in scratch (16 rows by the context), which makes the
softmax exact and saves rescaling the sum as online softmax must.

The causal mask is a range per row: a query at position p sees the keys from p - window + 1 (or 0)
to p. Cache slots outside of it may hold anything, NaN too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit

from .openmp import FLAGS, UNLIMITED, Chunks, Kernel, thread_number
from .rope import read_cache
from .scalars import exp, largest, narrow, pointer, prefetch, widen

F32 = np.float32(0)
I32 = np.int32(0)
ROWS = 16  # of one piece of work

# items: address of the number of (sequence, 16 rows) pieces, item_sequence and item_row int32
# [items]. starts int32 [B + 1]: where a sequence's tokens begin; context int32 [B]: its tokens in
# the cache, these included; rows int32 [B]: its row of tables int32 [.., table_width]. q, keys,
# values: see rope.py. out [tokens, ...] of out_bytes a token. window: 0 for none. scratch:
# scratch_bytes for each thread (see below).
FIELDS = (
    "items item_sequence item_row starts context rows tables table_width sequences q keys values "
    "out out_bytes capacity blocks block_size kv_heads group head_size window scratch "
    "scratch_bytes width"
)


def paged_attention(
    q_KRD: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    starts: list[int],
    context: list[int],
    tables: list[list[int]],
    group: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Reference. q is [kv heads, tokens x group, head size]; returns float32 [tokens, kv heads x
    group x head size].
    """
    outputs = []
    for s, blocks in enumerate(tables):
        keys, values = read_cache(key_cache, value_cache, torch.tensor(blocks), context[s])
        q = q_KRD[:, starts[s] * group : starts[s + 1] * group].float()
        length = starts[s + 1] - starts[s]
        position = torch.arange(context[s] - length, context[s]).repeat_interleave(group)[:, None]
        token = torch.arange(context[s])[None]
        seen = (token <= position) & (token > position - window if window else token >= 0)
        scores = torch.einsum("krd,tkd->krt", q, keys) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out = torch.einsum("krt,tkd->krd", weights, values)
        outputs.append(out.unflatten(1, (length, group)).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def pieces(arguments: dict[str, Any]) -> Chunks:
    """One chunk for each piece and key head."""
    return Chunks(arguments["items"], arguments["kv_heads"], UNLIMITED)


def scratch_bytes(max_model_len: int, head_size: int) -> tuple[int, int]:
    """Bytes of scratch for each thread, and the width of its rows of scores."""
    width = max_model_len + 2 * 256  # a block of at most 256 tokens may stick out at either end
    width = -(-width // 32) * 32
    return ROWS * width * 8 + ROWS * head_size * 4 + 32 * head_size, width


# Inlined: a process that compiles kernels would otherwise call the copy that was compiled alone,
# one that reads them from the cache the copy in the kernel; the two add up in different orders.
@njit(fastmath=True, error_model="numpy", forceinline=True)
def softmax(scores, weights, first, last, end, scale):
    """Unnormalised weights of scores[first:last], zero elsewhere up to `end`; returns their sum."""
    seen, chosen = scores[first:last], weights[first:last]
    most = seen[0]
    for i in range(seen.shape[0]):
        most = largest(most, seen[i])
    total = np.float32(0)
    for i in range(seen.shape[0]):
        weight = exp((seen[i] - most) * scale)
        total += weight
        chosen[i] = narrow(weight, chosen[i])
    for i in range(first):
        weights[i] = narrow(np.float32(0), weights[i])
    for i in range(last, end):
        weights[i] = narrow(np.float32(0), weights[i])
    return total


@njit(error_model="numpy")
def sub_block(cache, table, token, head, heads, head_bytes, block_size, token_bytes):
    """The address of the 16 tokens from `token` on in a cache."""
    block = np.int64(table[token // block_size])
    return cache + (block * heads + head) * head_bytes + (token % block_size) * token_bytes


@njit(error_model="numpy")
def fetch(place, row_bytes, rows, stride):
    """Ask for a sub-block, so that it has come when its turn does."""
    if row_bytes == stride:
        row_bytes, rows = row_bytes * rows, 1
    for row in range(rows):
        for byte in range(0, row_bytes, 64):
            prefetch(place + row * stride + byte)


@njit(fastmath=FLAGS, error_model="numpy")
def write(sums, scale, out):
    for d in range(sums.shape[0]):
        out[d] = narrow(sums[d] * scale, out[d])


@njit(fastmath=FLAGS, error_model="numpy")
def _score(q, keys, scores):
    """scores[r, t] = q[r] . keys[:, t] for one block; keys [head size, block size]."""
    for r in range(q.shape[0]):
        row = scores[r]
        for t in range(keys.shape[1]):
            row[t] = np.float32(0)
        for d in range(keys.shape[0]):
            value, key = widen(q[r, d]), keys[d]
            for t in range(keys.shape[1]):
                row[t] += value * widen(key[t])


@njit(fastmath=FLAGS, error_model="numpy")
def _sum(weights, values, out):
    """out[r] += weights[r, t] values[t] over the tokens of one block."""
    for t in range(values.shape[0]):
        value = values[t]
        for r in range(out.shape[0]):
            weight, row = weights[r, t], out[r]
            for d in range(values.shape[1]):
                row[d] += weight * widen(value[d])


def _paged_attention(p, chunk, chunks):
    a = carray(p, 1)[0]
    size, heads, group, block_size = a.head_size, a.kv_heads, a.group, a.block_size
    items = carray(pointer(a.items, a.items), (1,))[0]
    item_sequence = carray(pointer(a.item_sequence, I32), (items,))
    item_row = carray(pointer(a.item_row, I32), (items,))
    starts = carray(pointer(a.starts, I32), (a.sequences + 1,))
    context = carray(pointer(a.context, I32), (a.sequences,))
    rows = carray(pointer(a.rows, I32), (a.sequences,))
    q = carray(pointer(a.q, a.element), (heads, a.capacity * group, size))
    keys = carray(pointer(a.keys, a.cached), (a.blocks, heads, size, block_size))
    values = carray(pointer(a.values, a.cached), (a.blocks, heads, block_size, size))
    scratch = a.scratch + np.int64(thread_number()) * a.scratch_bytes
    scores = carray(pointer(scratch, F32), (16, a.width))
    weights = carray(pointer(scratch + 16 * a.width * 4, F32), (16, a.width))
    sums = carray(pointer(scratch + 16 * a.width * 8, F32), (16, size))
    head, item = chunk % heads, chunk // heads
    s = np.int64(item_sequence[item])
    start, length = np.int64(starts[s]), np.int64(starts[s + 1] - starts[s])
    table = carray(pointer(a.tables + np.int64(rows[s]) * a.table_width * 4, I32), (a.table_width,))
    first_row = np.int64(item_row[item])
    last_row = min(first_row + 16, length * group)
    before = np.int64(context[s]) - length
    end = before + (last_row - 1) // group + 1
    begin = max(before + first_row // group - a.window + 1, 0) if a.window else 0
    first_block, last_block = begin // block_size, (end - 1) // block_size + 1
    base = first_block * block_size
    queries = q[head, start * group + first_row : start * group + last_row]
    for b in range(first_block, last_block):
        place = b * block_size - base
        _score(queries, keys[table[b], head], scores[:, place : place + block_size])
    for r in range(last_row - first_row):
        position = before + (first_row + r) // group
        low = max(position - a.window + 1, 0) - base if a.window else 0
        total = softmax(scores[r], weights[r], low, position + 1 - base, end - base, a.scale)
        for i in range(end - base):
            weights[r, i] /= total
        for d in range(size):
            sums[r, d] = np.float32(0)
    for b in range(first_block, last_block):
        place = b * block_size - base
        inside = min(end - base - place, block_size)
        skip = max(begin - base - place, 0)
        _sum(
            weights[: last_row - first_row, place + skip : place + inside],
            values[table[b], head, skip:inside],
            sums[: last_row - first_row],
        )
    for r in range(last_row - first_row):
        t, g = start + (first_row + r) // group, (first_row + r) % group
        out = carray(pointer(a.out + t * a.out_bytes, a.element), (heads * group * size,))
        for d in range(size):
            out[(head * group + g) * size + d] = narrow(sums[r, d], out[0])


paged_attention_kernel = Kernel(_paged_attention, FIELDS, "scale", pieces, has_cache=True)
