"""Linear layers of 8 bits: activations quantised row by row, products, and one token's own way."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES
from kernels.gpu.paged_cache import poisoned, randn

from ringcast.kernels.gpu.few_linear import few_linear, few_linear_reference
from ringcast.kernels.gpu.fp8_linear import (
    FP8,
    fp8_linear,
    fp8_linear_reference,
    quantize_rows,
    quantize_rows_reference,
    quantize_weight,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def both(x: torch.Tensor, **options) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(q, scale) of the kernel and of the reference, in a wider buffer of NaN."""
    tokens, inputs = x.shape
    results = []
    for function in (quantize_rows, quantize_rows_reference):
        q = poisoned(tokens, inputs + 16, dtype=torch.float32).to(FP8)
        scale = poisoned(tokens, 1, dtype=torch.float32)
        function(x, q[:, :inputs], scale, **options)
        assert q[:, inputs:].float().isnan().all()
        results.append((q[:, :inputs], scale))
    return results


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("inputs", [1, 16, 100, 1536])
def test_rows_are_quantised_each_by_itself(inputs, dtype):
    x = randn(5, inputs, dtype=dtype) * torch.tensor([[1], [0], [300], [0.001], [1]], device=DEVICE)
    (q, scale), (want_q, want_scale) = both(x.to(dtype))
    torch.testing.assert_close(scale, want_scale)
    assert (q.float() != want_q.float()).float().mean() <= 0.005  # a tie, if at all
    torch.testing.assert_close(q.float() * scale, x.to(dtype).float(), rtol=1 / 16, atol=1e-4)
    assert q[2].float().abs().max() == 448
    assert not q[1].float().any()


def test_a_fixed_scale_saturates():
    x = torch.tensor([[1.0, 100.0, -1000.0, 0.3], [0.0, 0.5, 2.0, 3.0]], device=DEVICE)
    (q, scale), (want_q, want_scale) = both(x, fixed_scale_1=torch.tensor([0.5], device=DEVICE))
    assert torch.equal(q.float(), want_q.float())
    assert torch.equal(scale, want_scale)
    assert scale[:, 0].tolist() == [0.5, 0.5]
    assert q[0].float().tolist() == [2.0, 192.0, -448.0, 0.625]


def test_a_weight_has_a_scale_for_each_output():
    weight = randn(6, 64, dtype=torch.float32) * torch.logspace(-3, 3, 6, device=DEVICE)[:, None]
    q, scale = quantize_weight(weight)
    torch.testing.assert_close(q.float() * scale[:, None], weight, rtol=1 / 16, atol=1e-6)
    assert (q.float().abs().amax(-1) == 448).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_products(tokens, bias):
    q, scale = (torch.empty(tokens, size, device=DEVICE) for size in (96, 1))
    q = q.to(FP8)
    quantize_rows_reference(randn(tokens, 96, dtype=torch.float32), q, scale)
    weight, scale_N = quantize_weight(randn(48, 96, dtype=torch.float32))
    bias_N = randn(48, dtype=torch.bfloat16) if bias else None
    got, want = (poisoned(tokens, 48, dtype=torch.bfloat16) for _ in range(2))
    fp8_linear(q, scale, weight, scale_N, got, bias_N)
    fp8_linear_reference(q, scale, weight, scale_N, want, bias_N)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_one_token_reads_weights_of_eight_bits(activation, dtype):
    weight, scale = quantize_weight(randn(12, 96, dtype=torch.float32) / 10)
    x, out = randn(1, 96, dtype=dtype), 6 if activation else 12
    options = {
        "scale_N": scale,
        "bias_N": randn(12, dtype=dtype),
        "norm_weight_K": randn(96, dtype=torch.float32),
        "add_to_1N": randn(1, out, dtype=dtype),
        "activation": activation,
    }
    got, want = (poisoned(1, out, dtype=dtype) for _ in range(2))
    few_linear(x, weight, got, **options)
    few_linear_reference(x, weight, want, **options)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_what_cant_be_computed_is_refused():
    x, scale = randn(2, 32, dtype=torch.float32), poisoned(2, 1, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"q \(2, 31\)"):
        quantize_rows(x, x[:, :31].to(FP8), scale)
    with pytest.raises(ValueError, match="in one piece"):
        quantize_rows(x, x.T.contiguous().T.to(FP8), scale)
    weight, scale_N = quantize_weight(x)
    with pytest.raises(ValueError, match=r"scale is \(1,\)"):
        few_linear(x[:1], weight, poisoned(1, 2, dtype=torch.float32), scale_N=scale_N[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("inputs", [576, 4096, 28672])
def test_rows_of_models(inputs, pdl):
    x = randn(300, inputs, dtype=torch.bfloat16)
    (q, scale), (want_q, want_scale) = both(x, pdl=pdl)
    torch.testing.assert_close(scale, want_scale)
    assert (q.float() != want_q.float()).float().mean() <= 0.001


@pytest.mark.gpu
def test_rows_beyond_two_billion_elements():
    x = torch.zeros(2**15 + 2, 65536, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = 3.0
    q = torch.empty_like(x, dtype=FP8)
    scale = poisoned(len(x), 1, dtype=torch.float32)
    quantize_rows(x, q, scale)
    assert (q[-1].float() == 448).all()
    assert not q[-2].float().any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 17, 128, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (6144, 4096), (4096, 14336)])
def test_products_of_models(outputs, inputs, tokens):
    x = randn(tokens, inputs, dtype=torch.bfloat16)
    q, scale = torch.empty_like(x, dtype=FP8), poisoned(tokens, 1, dtype=torch.float32)
    quantize_rows(x, q, scale)
    weight, scale_N = quantize_weight(randn(outputs, inputs, dtype=torch.float32) / inputs**0.5)
    bias_N = randn(outputs, dtype=torch.bfloat16)
    got, want = (poisoned(tokens, outputs, dtype=torch.bfloat16) for _ in range(2))
    fp8_linear(q, scale, weight, scale_N, got, bias_N)
    fp8_linear_reference(q, scale, weight, scale_N, want, bias_N)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=3e-2)
