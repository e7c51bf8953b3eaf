"""Every CPU kernel against its reference: random inputs, odd sizes, NaN-filled outputs, garbage in
unused cache slots.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from ringcast.kernels.cpu import activation, attention, embedding, linear, norm, openmp, rope, tiles
from ringcast.kernels.cpu import tile_attention as tile_attention_module
from ringcast.kernels.cpu import vector_attention as vector_attention_module

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of activations and of the KV cache.
PAIRS = [*((each, each) for each in DTYPES), (torch.float32, torch.bfloat16)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
needs_tiles = pytest.mark.skipif(not tiles.available(), reason="this processor has no matrix tiles")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def count(n: int) -> np.ndarray:
    return np.array([n], np.int64)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> None:
    limit = TOLERANCE[dtype] * scale
    torch.testing.assert_close(actual.float(), expected.float(), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "inner", "outer", "bias"), [(1, 7, 3, False), (3, 40, 29, True), (4, 65, 8, False)]
)
def test_row_linear(dtype, rows, inner, outer, bias):
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    b, y = torch.randn(outer) if bias else None, nans(rows, outer)
    arguments = {"rows": count(rows), "x": x, "weight": weight, "bias": b, "y": y}
    linear.row_linear.bind(dtype, **arguments, inner=inner, outer=outer)()
    assert_close(y, linear.linear(x, weight, b), torch.float32, 10)


@needs_tiles
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 70])
@pytest.mark.parametrize(
    ("inner", "outer", "bias"), [(32, 32, False), (50, 33, True), (2500, 500, True)]
)
def test_tile_linear(rows, inner, outer, bias):
    x, weight = torch.randn(rows, inner).bfloat16(), torch.randn(outer, inner).bfloat16()
    k, n = tiles.padded(inner), tiles.padded(outer)
    x_padded = torch.zeros(rows, k, dtype=torch.bfloat16)
    x_padded[:, :inner] = x
    b = torch.zeros(n)
    b[:outer] = torch.randn(outer)
    y = nans(rows, n)
    linear.tile_linear.bind(
        torch.bfloat16,
        rows=count(rows),
        x=x_padded,
        weight=tiles.pack(weight),
        bias=b if bias else None,
        y=y,
        inner=k,
        outer=n,
        configurations=linear.CONFIGURATIONS,
    )()
    expected = linear.linear(x, weight, b[:outer] if bias else None)
    torch.testing.assert_close(y[:, :outer], expected, rtol=1e-4, atol=1e-3)
    assert (y[:, outer:] == 0).all()


def test_pack_is_undone_by_unpack():
    weight = torch.randn(45, 70).bfloat16()
    assert torch.equal(tiles.unpack(tiles.pack(weight), 45, 70), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "size", "update"),
    [(1, 33, "plain"), (5, 48, "none"), (37, 100, "plain"), (1, 33, "norm"), (37, 100, "norm")],
)
def test_add_rms_norm(dtype, rows, size, update):
    hidden, weight = torch.randn(rows, size), torch.randn(size)
    change = torch.randn(rows, size + 5) if update != "none" else None
    change_weight = torch.randn(size) if update == "norm" else None
    expected_hidden = hidden.clone()
    expected = norm.add_rms_norm(
        expected_hidden,
        None if change is None else change[:, :size],
        weight,
        1e-5,
        change_weight,
    )
    out = nans(rows, size + 3, dtype=dtype)
    norm.add_rms_norm_kernel.bind(
        dtype,
        rows=count(rows),
        index=None,
        hidden=hidden,
        update=change,
        update_weight=change_weight,
        weight=weight,
        out=out,
        size=size,
        update_stride=size + 5,
        out_bytes=out.stride(0) * out.itemsize,
        eps=1e-5,
    )()
    if update == "norm":
        torch.testing.assert_close(hidden, expected_hidden, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(hidden, expected_hidden)
    assert_close(out[:, :size], expected, dtype, 2)
    assert out[:, size:].isnan().all()


def test_add_rms_norm_of_some_rows():
    hidden, update, weight = torch.randn(9, 16), torch.randn(9, 16), torch.randn(16)
    index, out = np.array([7, 0, 8], np.int32), nans(3, 16)
    expected = norm.add_rms_norm(hidden.clone(), update, weight, 1e-6)[[7, 0, 8]]
    norm.add_rms_norm_kernel.bind(
        torch.float32,
        rows=count(3),
        index=index,
        hidden=hidden,
        update=update,
        update_weight=None,
        weight=weight,
        out=out,
        size=16,
        update_stride=16,
        out_bytes=64,
        eps=1e-6,
    )()
    assert_close(out, expected, torch.float32, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 67), (6, 40), (2, 800)])
@pytest.mark.parametrize(
    ("kernel", "reference"),
    [
        (activation.silu_mul_kernel, activation.silu_mul),
        (activation.gelu_mul_kernel, activation.gelu_mul),
    ],
    ids=["silu", "gelu"],
)
def test_gated_activation(dtype, rows, size, kernel, reference):
    gate_up = torch.randn(rows, 2 * size + 3) * 10
    gate_up[0, 0] = -1e9  # exp must not overflow
    out = nans(rows, size + 1, dtype=dtype)
    kernel.bind(
        dtype,
        rows=count(rows),
        gate_up=gate_up,
        out=out,
        size=size,
        stride=2 * size + 3,
        out_bytes=(size + 1) * out.itemsize,
    )()
    assert_close(out[:, :size], reference(gate_up[:, : 2 * size]), dtype, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scale", "first"), [(1.0, 0), (2.5, 0), (2.5, 5), (1.0, 76)])
def test_embedding(dtype, scale, first):
    weight, ids = torch.randn(77, 50).to(dtype), np.array([76, 0, 5, 81, 31], np.int32)
    ids -= 5 * (first == 0)
    ids = np.maximum(ids, 0)
    expected = embedding.embedding(torch.from_numpy(ids).long(), weight, scale, first)
    has_zeros = (expected == 0).all(1).any()
    assert has_zeros == (first > 0)
    tables = [(embedding.row_embedding, weight, dtype)]
    if dtype == torch.bfloat16:
        tables.append((embedding.tile_embedding, tiles.pack(weight), dtype))
        tables.append((embedding.tile_embedding, tiles.pack(weight), torch.float32))
        tables.append((embedding.bfloat16_embedding, weight, torch.float32))
    for kernel, table, element in tables:
        out = nans(5, 50)
        kernel.bind(
            element,
            rows=count(5),
            token_ids=ids,
            weight=table,
            out=out,
            first=first,
            vocabulary=77,
            size=50,
            scale=scale,
        )()
        assert torch.equal(out, expected)


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


def test_exp_is_within_two_units_in_the_last_place():
    # silu(gate) * up with gate = -x and up = -1 / x is 1 / (1 + exp(x)).
    x = torch.linspace(-60, 60, 4001)
    x = x[x != 0]
    out = nans(1, len(x))
    activation.silu_mul_kernel.bind(
        torch.float32,
        rows=count(1),
        gate_up=torch.cat([-x, -1 / x]),
        out=out,
        size=len(x),
        stride=2 * len(x),
        out_bytes=0,
    )()
    torch.testing.assert_close(out[0].double(), 1 / (1 + x.double().exp()), rtol=6e-7, atol=0)


def test_a_tape_runs_its_launches_in_order_on_all_threads():
    x, weights = torch.randn(2, 64), [torch.randn(64, 64) / 8 for _ in range(20)]
    buffers = [x, *(nans(2, 64) for _ in weights)]
    rows = count(2)
    openmp.Tape(
        linear.row_linear.bind(
            torch.float32, rows=rows, x=a, weight=w, bias=None, y=b, inner=64, outer=64
        )
        for a, w, b in zip(buffers, weights, buffers[1:], strict=False)
    )()
    expected = x
    for weight in weights:
        expected = linear.linear(expected, weight)
    assert_close(buffers[-1], expected, torch.float32, 50)


def test_a_launch_with_a_missing_argument_is_refused():
    with pytest.raises(AssertionError, match="_row_embedding"):
        embedding.row_embedding.bind(torch.float32, rows=count(1))


def test_more_threads_than_cores_do_every_chunk_once():
    before = torch.get_num_threads()
    torch.set_num_threads(2 * (os.cpu_count() or 1) + 1)
    try:
        rows = count(0)
        hidden, update, out = torch.zeros(37, 3), torch.ones(37, 3), nans(37, 3)
        add = norm.add_rms_norm_kernel.bind(
            torch.float32,
            rows=rows,
            index=None,
            hidden=hidden,
            update=update,
            update_weight=None,
            weight=torch.ones(3),
            out=out,
            size=3,
            update_stride=3,
            out_bytes=12,
            eps=1e-6,
        )
        tape = openmp.Tape([add] * 30)
        tape()
        assert not hidden.any()  # no rows, no work
        rows[0] = 37
        for _ in range(20):
            tape()
        assert (hidden == 600).all()  # each launch has added 1 once
    finally:
        torch.set_num_threads(before)
