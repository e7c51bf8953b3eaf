"""Products of words by bytes against their reference, bit for bit, and what makes the words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ringcast.kernels.cpu import blocks, int8_word_linear, quantize

needs_avx2 = pytest.mark.skipif(not blocks.available(), reason="this processor has no AVX2")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def row_words(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = x.shape
    q = torch.full((rows, size), 99, dtype=torch.int16)
    scales = torch.full((rows,), float("nan"))
    quantize.row_words_kernel.bind(
        x.dtype,
        rows=np.array([rows], np.int64),
        x=x,
        q=q,
        scales=scales,
        size=size,
        element_bytes=x.itemsize,
    )()
    return q, scales


def product(x: torch.Tensor, weight: quantize.QuantizedWeight, bias=None) -> torch.Tensor:
    """y for x [rows, padded inner] and a weight of bytes, from a NaN-filled buffer."""
    q, row_scales = row_words(x)
    y = torch.full((len(x), len(weight.scales)), float("nan"))
    pairs = quantize.pairs(weight)
    size = int8_word_linear.SCRATCH_BYTES
    int8_word_linear.int8_word_linear_kernel.bind(
        x.dtype,
        rows=np.array([len(x)], np.int64),
        x=q,
        row_scales=row_scales,
        weight=pairs.packed,
        scales=pairs.scales,
        bias=bias,
        y=y,
        inner=x.shape[1],
        outer=y.shape[1],
        scratch=torch.full((torch.get_num_threads(), size), 255, dtype=torch.uint8),
    )()
    return y


def reference(x: torch.Tensor, weight: quantize.QuantizedWeight, bias=None) -> torch.Tensor:
    signed = weight.packed.permute(0, 2, 1, 3).reshape(-1, x.shape[1]).int() - quantize.OFFSET
    return int8_word_linear.int8_word_linear(*quantize.row_words(x), signed, weight.scales, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_words(dtype):
    x = torch.randn(7, 96).to(dtype)
    x[3] = 0
    x[4, :32] *= 1000
    made, scales = row_words(x)
    expected, expected_scales = quantize.row_words(x)
    assert torch.equal(made, expected)
    assert torch.equal(scales, expected_scales)
    assert ((made * scales[:, None] - x.float()).abs() <= 0.51 * scales[:, None]).all()


@needs_avx2
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 70])
@pytest.mark.parametrize(
    ("outer", "inner", "bias"), [(64, 64, False), (33, 50, True), (500, 1500, True)]
)
def test_products(rows, outer, inner, bias):
    x = F.pad(torch.randn(rows, inner), (0, quantize.padded(inner) - inner))
    weight = quantize.quantize(torch.randn(outer, inner), 8)
    b = torch.randn(quantize.padded(outer)) if bias else None
    assert torch.equal(product(x, weight, b), reference(x, weight, b))


@needs_avx2
def test_a_row_is_the_same_alone_and_in_any_batch(threads):
    x, weight = torch.randn(70, 640), quantize.quantize(torch.randn(512, 640), 8)
    x[::3] *= 1000  # neighbours with outliers
    together = product(x, weight)
    for rows in ([0], [69], [1, 2], [5, 4, 3], range(4), range(7, 12), range(9), range(20, 53)):
        assert torch.equal(product(x[list(rows)].contiguous(), weight), together[list(rows)])


@needs_avx2
def test_largest_values_do_not_overflow():
    x, w = torch.ones(2, 16384), torch.ones(64, 16384)
    x[1], w[1] = -1, -1
    y = product(x, quantize.quantize(w, 8))
    torch.testing.assert_close(y, x @ w.T, rtol=1e-4, atol=1.0)


@needs_avx2
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_stays_so(value):
    x = torch.ones(3, 64)
    x[1, 5] = value
    y = product(x, quantize.quantize(torch.randn(64, 64), 8))
    assert not y[1].isfinite().any()
    assert torch.equal(y[0], y[2])
    assert y[0].isfinite().all()
