"""Gated activations, against their reference."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.activation import KINDS, gated_activation, gated_activation_reference

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def compare(gate_up: torch.Tensor, kind: str, **options: bool) -> torch.Tensor:
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    got, want = (
        torch.full((tokens, size), float("nan"), dtype=gate_up.dtype, device=DEVICE)
        for _ in range(2)
    )
    gated_activation(gate_up, got, kind, **options)
    gated_activation_reference(gate_up, want, kind)
    tolerance = TOLERANCE[gate_up.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (4, 33), (3, 1024), (2, 2049)])
def test_gated_activation(tokens, size, kind, dtype):
    compare(2 * torch.randn(tokens, 2 * size, device=DEVICE).to(dtype), kind)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_large_gates_saturate(kind):
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE)
    got = compare(torch.cat([gate, torch.full_like(gate, 2.0)], -1), kind)
    assert got.tolist() == [[0.0, 0.0, 0.0, 200.0, 20000.0]]


def test_an_unknown_kind_and_a_wrong_size_are_refused():
    gate_up, out = torch.zeros(2, 8, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="'relu'; accepted: silu, gelu_tanh"):
        gated_activation(gate_up, out, "relu")
    with pytest.raises(ValueError, match="gate_up"):
        gated_activation(gate_up, out[:, :3], "silu")


@pytest.mark.gpu
def test_rows_beyond_two_billion_elements():
    storage = torch.empty(2**31 + 256, dtype=torch.float16, device=DEVICE)
    gate_up = storage.as_strided((2, 128), (2**31, 1))
    gate_up.copy_(torch.randn(2, 128))
    compare(gate_up, "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_dependent_launch(kind):
    compare(torch.randn(2, 6144, device=DEVICE).bfloat16(), kind, pdl=True)
