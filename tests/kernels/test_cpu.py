"""Every CPU kernel but attention against its reference: odd sizes, NaN-filled outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels.cpu_inputs import DTYPES, assert_close, count, nans, needs_tiles

from ringcast.kernels.cpu import activation, embedding, linear, norm, tiles


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
