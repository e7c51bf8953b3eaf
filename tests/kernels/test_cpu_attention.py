"""Rotation, KV cache and attention of processors against their references: odd sizes, NaN-filled
outputs, garbage in unused cache slots.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels.cpu_inputs import DTYPES, assert_close, count, nans, needs_tiles

from ringcast.kernels.cpu import attention, norm, rope
from ringcast.kernels.cpu import tile_attention as tile_attention_module
from ringcast.kernels.cpu import vector_attention as vector_attention_module

# Of activations and of the KV cache.
PAIRS = [*((each, each) for each in DTYPES), (torch.float32, torch.bfloat16)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def cache(
    blocks: int, heads: int, size: int, block_size: int, pair: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    return [
        nans(blocks, heads, size // pair, block_size, pair, dtype=dtype),
        nans(blocks, heads, block_size // pair, size, pair, dtype=dtype),
    ]


@pytest.mark.parametrize(
    ("dtype", "cached", "pair"),
    [*((*pair, 1) for pair in PAIRS), (torch.bfloat16, torch.bfloat16, 2)],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache(dtype, cached, pair, normed):
    rows, heads, group, size, block_size, blocks = 5, 3, 2, 8, 4, 6
    qkv = torch.randn(rows, heads * (group + 2) * size + 2)
    cos, sin = torch.randn(rows, size // 2), torch.randn(rows, size // 2)
    slots = np.array([5, 6, 20, 4, 23], np.int32)
    q_weight, k_weight = (torch.randn(size), torch.randn(size)) if normed else (None, None)
    q = nans(heads, 7 * group, size, dtype=dtype)
    keys, values = cache(blocks, heads, size, block_size, pair, cached)
    rope.rope_and_cache.bind(
        dtype,
        cached,
        rows=count(rows),
        qkv=qkv,
        stride=qkv.stride(0),
        cos=cos,
        sin=sin,
        slots=slots,
        q_weight=q_weight,
        k_weight=k_weight,
        q=q,
        keys=keys,
        values=values,
        capacity=7,
        blocks=blocks,
        block_size=block_size,
        kv_heads=heads,
        group=group,
        head_size=size,
        pair=pair,
        scratch=torch.empty(64 * size),
        eps=1e-6,
    )()
    split = qkv[:, : heads * (group + 2) * size].unflatten(1, (-1, size))
    q_in, k_in, v_in = split.split([heads * group, heads, heads], 1)
    if normed:
        q_in, k_in = (
            norm.add_rms_norm(q_in, None, q_weight, 1e-6),
            norm.add_rms_norm(k_in, None, k_weight, 1e-6),
        )
    expected_q = (
        rope.rotate(q_in, cos, sin).unflatten(1, (heads, group)).transpose(0, 1).flatten(1, 2)
    )
    assert_close(q[:, : rows * group], expected_q, dtype, 4)
    assert q[:, rows * group :].isnan().all()
    expected_keys, expected_values = cache(blocks, heads, size, block_size, pair, cached)
    rope.write_cache(
        expected_keys, expected_values, rope.rotate(k_in, cos, sin), v_in, torch.from_numpy(slots)
    )
    for actual, expected in ((keys, expected_keys), (values, expected_values)):
        assert torch.equal(actual.isnan(), expected.isnan())
        assert_close(actual.nan_to_num(), expected.nan_to_num(), cached, 4)


def test_the_cache_rounds_to_even_and_keeps_what_is_no_number():
    """Values are written as they are, so any bits of a float32 can be."""
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, -0x800000, 0x7FFFFFFF]
    bits += [0x7F800001, -1, 1, -0x80000000, 0x00018000]
    v = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    size = len(bits)
    qkv, cos = torch.cat([torch.zeros(2 * size), v]), torch.ones(size // 2)
    keys, values = cache(1, 1, size, 16, 1, torch.bfloat16)
    rope.rope_and_cache.bind(
        torch.float32,
        torch.bfloat16,
        rows=count(1),
        qkv=qkv,
        stride=3 * size,
        cos=cos,
        sin=0 * cos,
        slots=np.zeros(1, np.int32),
        q_weight=None,
        k_weight=None,
        q=torch.empty(size),
        keys=keys,
        values=values,
        capacity=1,
        blocks=1,
        block_size=16,
        kv_heads=1,
        group=1,
        head_size=size,
        pair=1,
        scratch=torch.empty(64 * size),
        eps=1e-6,
    )()
    got, expected = values[0, 0, 0, :, 0], v.bfloat16()
    assert torch.equal(got.isnan(), v.isnan())
    numbers = ~v.isnan()
    assert torch.equal(got[numbers].view(torch.int16), expected[numbers].view(torch.int16))


def attend(
    kernel,
    dtype,
    cached,
    pair,
    lengths,
    context,
    group,
    heads,
    size,
    block_size,
    window,
    last=None,
    **more,
):
    """Run an attention kernel and its reference on random sequences whose blocks are shuffled."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    tokens, width = int(starts[-1]), max(-(-c // block_size) for c in context) + 1
    blocks = width * len(lengths) + 1
    keys, values = cache(blocks, heads, size, block_size, pair, cached)
    order = (torch.randperm(blocks - 1) + 1).tolist()
    tables = np.zeros((2 * len(lengths), width), np.int32)
    rows = np.arange(1, 2 * len(lengths), 2, dtype=np.int32)
    used = []
    for s, total in enumerate(context):
        mine = [order.pop() for _ in range(-(-total // block_size))]
        tables[rows[s], : len(mine)] = mine
        used.append(mine)
        slots = torch.tensor(
            [mine[t // block_size] * block_size + t % block_size for t in range(total)]
        )
        k, v = torch.randn(total, heads, size), torch.randn(total, heads, size)
        rope.write_cache(keys, values, k.to(cached), v.to(cached), slots)
    q = nans(heads, (tokens + 3) * group, size, dtype=dtype)
    q[:, : tokens * group] = torch.randn(heads, tokens * group, size).to(dtype)
    if last is not None:  # the queries of the last token
        q[:, (tokens - 1) * group : tokens * group] = last
    pieces = [(s, r) for s, n in enumerate(lengths) for r in range(0, n * group, 16)]
    items = np.array(pieces, np.int32).T.copy()
    out = nans(tokens, heads * group * size + 4, dtype=dtype)
    per_thread, scores = attention.scratch_bytes(max(context), size)
    kernel.bind(
        dtype,
        cached,
        items=count(len(pieces)),
        item_sequence=items[0],
        item_row=items[1],
        starts=starts,
        context=np.array(context, np.int32),
        rows=rows,
        tables=tables,
        table_width=width,
        sequences=len(lengths),
        q=q,
        keys=keys,
        values=values,
        out=out,
        out_bytes=out.stride(0) * out.itemsize,
        capacity=tokens + 3,
        blocks=blocks,
        block_size=block_size,
        kv_heads=heads,
        group=group,
        head_size=size,
        window=window,
        scratch=torch.full((per_thread * 64,), 0x7F, dtype=torch.uint8),
        scratch_bytes=per_thread,
        width=scores,
        scale=size**-0.5,
        **more,
    )()
    expected = attention.paged_attention(
        q, keys, values, starts.tolist(), context, used, group, size**-0.5, window
    )
    assert out[:, heads * group * size :].isnan().all()
    return out[:, : heads * group * size], expected


SEQUENCES = [
    ([1], [1]),
    ([1, 1, 1], [70, 16, 33]),
    ([40, 1, 17, 5], [40, 64, 50, 37]),
    ([23], [151]),
]


@pytest.mark.parametrize(("dtype", "cached"), PAIRS)
@pytest.mark.parametrize(("lengths", "context"), SEQUENCES)
@pytest.mark.parametrize("shape", [(3, 2, 6, 16, 0), (1, 3, 16, 5, 0), (4, 1, 10, 8, 20)])
def test_paged_attention(dtype, cached, lengths, context, shape):
    kernel = attention.paged_attention_kernel
    out, expected = attend(kernel, dtype, cached, 1, lengths, context, *shape)
    assert_close(out, expected, dtype, 3)


@pytest.mark.parametrize(("dtype", "cached"), PAIRS)
@pytest.mark.parametrize(("lengths", "context"), SEQUENCES)
@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 64, 16, 0),
        (1, 3, 32, 16, 9),
        (5, 2, 96, 32, 0),
        (8, 1, 128, 64, 33),
        (4, 1, 32, 48, 17),
    ],
)
def test_vector_attention(dtype, cached, lengths, context, shape):
    kernel = vector_attention_module.vector_attention
    out, expected = attend(kernel, dtype, cached, 1, lengths, context, *shape)
    assert_close(out, expected, dtype, 4)


@pytest.mark.parametrize("window", [0, 21])
def test_rows_of_vector_attention_are_the_same_alone_and_among_others(window):
    """A query of a prompt's middle, computed with 1 to 40 others: cut anywhere, the bits are the
    same.
    """
    kernel, found = vector_attention_module.vector_attention, []
    for length in (1, 2, 3, 4, 5, 6, 40):
        torch.manual_seed(1)
        shape = [length], [77], 1, 2, 32, 16, window
        query = torch.randn(2, 1, 32)
        out, _ = attend(kernel, torch.float32, torch.bfloat16, 1, *shape, last=query)
        found.append(out[-1])
    assert all(torch.equal(row, found[0]) for row in found)


@needs_tiles
@pytest.mark.parametrize(("lengths", "context"), SEQUENCES)
@pytest.mark.parametrize(
    ("group", "heads", "size", "block_size", "window"),
    [
        (3, 2, 64, 16, 0),
        (1, 3, 32, 16, 9),
        (5, 2, 96, 32, 0),
        (8, 1, 128, 64, 33),
        (4, 1, 256, 16, 17),
    ],
)
def test_tile_attention(lengths, context, group, heads, size, block_size, window):
    out, expected = attend(
        tile_attention_module.tile_attention,
        torch.bfloat16,
        torch.bfloat16,
        2,
        lengths,
        context,
        group,
        heads,
        size,
        block_size,
        window,
        configurations=tile_attention_module.CONFIGURATIONS,
    )
    assert_close(out, expected, torch.bfloat16, 2)
