"""Quantised linears: packed weights against their references, kernels against theirs and each
other, bit for bit where the arithmetic is exact.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ringcast.kernels.cpu import (
    blocks,
    int4_linear,
    int8_linear,
    linear,
    quantize,
    tiles,
    vectors,
)

KERNELS = {
    8: {
        "plain": int8_linear.int8_plain_linear,
        "vector": int8_linear.int8_vector_linear,
        "tile": int8_linear.int8_tile_linear,
    },
    4: {
        "plain": int4_linear.int4_plain_linear,
        "block": int4_linear.int4_block_linear,
        "vector": int4_linear.int4_vector_linear,
        "tile": int4_linear.int4_tile_linear,
    },
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def usable(bits: int) -> list:
    names = ["plain", "block"] if bits == 4 and blocks.available() else ["plain"]
    if vectors.products_available():
        names.append("vector")
        if tiles.bytes_available():
            names.append("tile")
    return [KERNELS[bits][name] for name in names]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def quantize_rows(x: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    rows, size = x.shape
    made = {
        "q": torch.full((rows, size), 99, dtype=torch.int8),
        "scales": torch.full((rows, size // group), float("nan")),
        "sums": torch.full((rows, size // group), -7, dtype=torch.int32),
        "totals": torch.full((rows, size // group), float("nan")),
    }
    sizes = {"size": size, "group": group, "element_bytes": x.itemsize}
    quantize.quantize_rows_kernel.bind(
        x.dtype, rows=np.array([rows], np.int64), x=x, **sizes, **made
    )()
    return made


def split_rows(x: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, size = x.shape
    made = {
        "q": torch.full((rows, 2, size), 99, dtype=torch.int8),
        "scales": torch.full((rows,), float("nan")),
        "sums": torch.full((rows, 2), -7, dtype=torch.int32),
    }
    sizes = {"size": size, "element_bytes": x.itemsize}
    number = np.array([rows], np.int64)
    quantize.split_rows_kernel.bind(x.dtype, rows=number, x=x, **sizes, **made)()
    return made


def product(kernel, x: torch.Tensor, weight: quantize.QuantizedWeight, bias=None) -> torch.Tensor:
    """y of a kernel for x [rows, padded inner], from a NaN-filled buffer."""
    outer, inner = len(weight.scales), x.shape[1]
    bits = 8 if weight.groups is None else 4
    rows = split_rows(x) if bits == 8 else quantize_rows(x, quantize.GROUP)
    y = torch.full((len(x), outer), float("nan"))
    arguments = {
        "rows": np.array([len(x)], np.int64),
        "x": rows["q"],
        "row_scales": rows["scales"],
        "weight": weight.packed,
        "scales": weight.scales,
        "bias": bias,
        "y": y,
        "inner": inner,
        "outer": outer,
        "configurations": linear.CONFIGURATIONS if bits == 8 else int4_linear.CONFIGURATIONS,
    }
    size = int8_linear.SCRATCH_BYTES if bits == 8 else int4_linear.scratch_bytes(inner)
    arguments["scratch"] = torch.full((torch.get_num_threads(), size), 255, dtype=torch.uint8)
    if bits == 8:
        arguments["sums"] = rows["sums"]
    else:
        arguments |= {"totals": rows["totals"], "groups": weight.groups, "scratch_bytes": size}
    kernel.bind(x.dtype, **arguments)()
    return y


def reference(x: torch.Tensor, weight: quantize.QuantizedWeight, bias=None) -> torch.Tensor:
    outer, inner = len(weight.scales), x.shape[1]
    if weight.groups is None:
        q, scales, _ = quantize.split_rows(x)
        u = weight.packed.permute(0, 2, 1, 3).reshape(outer, inner)
        return int8_linear.int8_linear(q, scales, u, weight.scales, bias)
    q, scales, _ = quantize.quantize_rows(x, quantize.GROUP)
    return int4_linear.int4_linear(q, scales, quantize.dequantize(weight, outer, inner), bias)


def padded(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, quantize.padded(x.shape[1]) - x.shape[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 96])
def test_quantize_rows(dtype, group):
    x = torch.randn(7, 96).to(dtype)
    x[3] = 0
    x[4, :32] *= 1000
    made = quantize_rows(x, group)
    q, scales, sums = quantize.quantize_rows(x, group)
    assert torch.equal(made["q"], q)
    assert torch.equal(made["scales"], scales)
    assert torch.equal(made["sums"], sums)
    assert torch.equal(made["totals"], scales * sums)
    back = q.unflatten(1, (-1, group)) * scales[..., None]
    assert ((back.flatten(1) - x.float()).abs() <= 0.5001 * scales.amax(1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_rows(dtype):
    x = torch.randn(7, 96).to(dtype)
    x[3] = 0
    x[4, :32] *= 1000
    made = split_rows(x)
    q, scales, sums = quantize.split_rows(x)
    assert torch.equal(made["q"], q)
    assert torch.equal(made["scales"], scales)
    assert torch.equal(made["sums"], sums)
    back = (q[:, 0] + q[:, 1] * quantize.LOW) * scales[:, None]
    assert ((back - x.float()).abs() <= 0.51 / 254 * scales[:, None]).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_stays_so(value, bits):
    x = torch.ones(3, 64)
    x[1, 5] = value
    weight = quantize.quantize(torch.randn(64, 64), bits)
    y = product(KERNELS[bits]["plain"], x, weight)
    assert not y[1].isfinite().any()
    assert torch.equal(y[0], y[2])
    assert y[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (33, 50), (64, 128), (100, 161)])
def test_quantize_weight(dtype, outer, inner, threads):
    weight = torch.randn(outer, inner).to(dtype)
    weight[0] = 0
    u, scales = quantize.quantize_bytes(weight)
    made = quantize.quantize(weight, 8)
    expected = (u.float() - quantize.OFFSET) * scales[:, None]
    assert torch.equal(quantize.dequantize(made, outer, inner), expected)
    q, scales, steps, bases = quantize.quantize_halves(F.pad(weight, (0, -inner % 32)))
    values = q.unflatten(1, (-1, 32)) * steps[..., None] + bases[..., None]
    expected = values.flatten(1)[:, :inner] * scales[:, None]
    made = quantize.quantize(weight, 4)
    assert torch.equal(quantize.dequantize(made, outer, inner), expected)
    groups = F.pad(weight.float(), (0, -inner % 32)).unflatten(1, (-1, 32))
    half_steps = (groups.amax(2) - groups.amin(2)) / 30
    limit = half_steps.repeat_interleave(32, 1)[:, :inner] * 1.01 + 1e-3 * scales[:, None]
    assert ((expected - weight.float()).abs() <= limit).all()
    assert (quantize.dequantize(made, quantize.padded(outer), 1)[outer:] == 0).all()


def test_weights_that_have_four_bits_are_kept():
    """As those of a GGUF file with groups of 32 (Q4_1) are."""
    steps = torch.rand(64, 6, 1) + 0.1
    q = torch.randint(0, 16, (64, 6, 32))
    q[..., 0], q[..., 1] = 0, 15
    weight = (q * steps - 8 * steps).flatten(1)
    made = quantize.dequantize(quantize.quantize(weight, 4), 64, 192)
    assert (made - weight).abs().max() < 2e-3 * weight.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [*range(1, 10), 16, 17, 33, 70])
@pytest.mark.parametrize(
    ("outer", "inner", "bias"), [(64, 64, False), (33, 50, True), (500, 1500, True)]
)
def test_products(bits, rows, outer, inner, bias):
    x = padded(torch.randn(rows, inner).bfloat16())
    weight = quantize.quantize(torch.randn(outer, inner).bfloat16(), bits)
    b = torch.randn(quantize.padded(outer)) if bias else None
    expected, results = reference(x, weight, b), [product(k, x, weight, b) for k in usable(bits)]
    assert all(torch.equal(results[0], y) for y in results)
    if bits == 8:
        assert torch.equal(results[0], expected)
    else:
        torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("bits", "name"), [(bits, name) for bits, kernels in KERNELS.items() for name in kernels]
)
def test_a_row_is_the_same_alone_and_in_any_batch(bits, name, threads):
    kernel = KERNELS[bits][name]
    if kernel not in usable(bits):
        pytest.skip("this processor has no such instructions")
    x = torch.randn(70, 320).bfloat16()
    x[::3] *= 1000  # neighbours with outliers
    x[1, 7] = 1e6
    weight = quantize.quantize(torch.randn(96, 320), bits)
    together = product(kernel, x, weight)
    for rows in ([0], [1], [69], [5, 4, 3], range(9), range(20, 53)):
        assert torch.equal(
            product(kernel, x[list(rows)].contiguous(), weight), together[list(rows)]
        )


@pytest.mark.parametrize("bits", [8, 4])
def test_largest_values_do_not_overflow(bits):
    """Sums of 8 bits reach inner * 127 * 255."""
    x, w = torch.ones(2, 16384), torch.ones(64, 16384)
    x[1], w[1] = -1, -1
    weight = quantize.quantize(w, bits)
    for kernel in usable(bits):
        y = product(kernel, x, weight)
        torch.testing.assert_close(y, x @ w.T, rtol=1e-3, atol=1.0)
