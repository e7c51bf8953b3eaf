"""Products with bfloat16 weights that are widened: against the reference, and the same bits in any
batch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ringcast.kernels.cpu import blocks, tiles, wide_linear

pytestmark = pytest.mark.skipif(not blocks.available(), reason="this processor has no AVX2")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
    """float32 [rows, outer] from a NaN-filled buffer; what is beyond `outer` must be zeros."""
    (rows, inner), outer = x.shape, len(weight)
    width = tiles.padded(outer)
    x = F.pad(x, (0, tiles.padded(inner) - inner))
    y = torch.full((rows, width), float("nan"))
    wide_linear.wide_linear_kernel.bind(
        torch.float32,
        rows=np.array([rows], np.int64),
        x=x,
        weight=tiles.pack(weight),
        bias=None if bias is None else F.pad(bias, (0, width - outer)),
        y=y,
        inner=x.shape[1],
        outer=width,
    )()
    assert (y[:, outer:] == 0).all()
    return y[:, :outer]


@pytest.mark.parametrize("rows", [*range(1, 14), 70])
@pytest.mark.parametrize(
    ("inner", "outer", "bias"),
    [(32, 32, False), (50, 33, True), (161, 100, True), (2500, 500, True)],
)
def test_against_the_reference(rows, inner, outer, bias):
    x, weight = torch.randn(rows, inner), torch.randn(outer, inner).bfloat16()
    b = torch.randn(outer) if bias else None
    expected = wide_linear.wide_linear(x, weight, b)
    torch.testing.assert_close(product(x, weight, b), expected, rtol=1e-5, atol=3e-4)


def test_every_bit_of_a_weight_counts():
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    weight = torch.where(weight.isfinite(), weight, 0).view(2048, 32)
    for column in (0, 1, 31):
        x = F.one_hot(torch.tensor([column]), 32).float()
        assert torch.equal(product(x, weight)[0], weight[:, column].float() + 0.0)


def test_a_row_is_the_same_alone_and_in_any_batch(threads):
    x, weight = torch.randn(70, 320), torch.randn(500, 320).bfloat16()
    x[::3] *= 1000
    together = product(x, weight)
    for rows in ([0], [69], [1, 2], [5, 4, 3], range(4), range(7, 12), range(9), range(20, 53)):
        assert torch.equal(product(x[list(rows)].contiguous(), weight), together[list(rows)])
