"""RMSNorm and its residual addition, against their references."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.norm import (
    MAX_HIDDEN,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(1, 64), (5, 576), (3, 1025), (2, MAX_HIDDEN)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def poison(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), SHAPES)
def test_rms_norm(tokens, size, dtype):
    x, weight = 3 * random(tokens, size, dtype=dtype), random(size)
    got, want = (poison(tokens, size, dtype=dtype) for _ in range(2))
    rms_norm(x, weight, got, 1e-5)
    rms_norm_reference(x, weight, want, 1e-5)
    assert_close(got, want)


def test_eps_counts_for_a_row_of_almost_nothing():
    x = 1e-3 * random(1, 64)
    got, want = (poison(1, 64, dtype=x.dtype) for _ in range(2))
    rms_norm(x, torch.ones(64, device=DEVICE), got, 1e-3)
    rms_norm_reference(x, torch.ones(64, device=DEVICE), want, 1e-3)
    assert_close(got, want)
    assert got.abs().max() < 0.2


def test_a_norm_in_place():
    x, weight = random(3, 100), random(100)
    want = poison(3, 100, dtype=x.dtype)
    rms_norm_reference(x, weight, want, 1e-6)
    rms_norm(x, weight, x, 1e-6)
    assert_close(x, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("update_norm", [False, True])
@pytest.mark.parametrize(("tokens", "size"), SHAPES)
def test_add_rms_norm(tokens, size, update_norm, dtype):
    x, residual = random(tokens, size, dtype=dtype), random(tokens, size, dtype=dtype)
    weight = random(size)
    extra = {"update_weight_H": random(size)} if update_norm else {}
    got, want = (poison(tokens, size, dtype=dtype) for _ in range(2))
    summed = residual.clone()
    add_rms_norm(x, residual, weight, got, 1e-6, **extra)
    add_rms_norm_reference(x, summed, weight, want, 1e-6, **extra)
    assert_close(residual, summed)
    assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_rows_are_compact_and_the_residual_is_kept(dtype):
    x, residual = random(6, 96, dtype=dtype), random(6, 96, dtype=dtype)
    x[2], residual[2] = float("nan"), float("nan")  # not chosen, so not read
    before, weight = residual.clone(), random(96)
    index = torch.tensor([5, 0, -1, 3], dtype=torch.int32, device=DEVICE)
    got, want = (poison(4, 96, dtype=dtype) for _ in range(2))
    add_rms_norm(x, residual, weight, got, 1e-6, update_weight_H=weight, index_S=index)
    add_rms_norm_reference(
        x, before.clone(), weight, want, 1e-6, update_weight_H=weight, index_S=index
    )
    assert_close(got, want)
    assert not got[2].any()
    torch.testing.assert_close(residual, before, rtol=0, atol=0, equal_nan=True)


def test_rows_may_be_parts_of_wider_ones():
    wide, weight = random(4, 200), random(64)
    out = poison(4, 300, dtype=wide.dtype)
    want = poison(4, 64, dtype=wide.dtype)
    rms_norm(wide[:, 36:100], weight, out[:, 7:71], 1e-6)
    rms_norm_reference(wide[:, 36:100], weight, want, 1e-6)
    assert_close(out[:, 7:71], want)
    assert out[:, :7].isnan().all()
    assert out[:, 71:].isnan().all()


def test_what_doesnt_fit_is_refused():
    with pytest.raises(ValueError, match="at most 16384"):
        rms_norm(random(1, MAX_HIDDEN + 1), random(MAX_HIDDEN + 1), random(1, MAX_HIDDEN + 1), 1e-6)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(random(1, 64), random(32), random(1, 64), 1e-6)
    with pytest.raises(ValueError, match="4 to write"):
        add_rms_norm(random(4, 64), random(4, 64), random(64), random(3, 64), 1e-6)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(random(4, 64), random(3, 64), random(64), random(4, 64), 1e-6)


@pytest.mark.gpu
def test_rows_beyond_two_billion_elements():
    storage = torch.empty(2**31 + 256, dtype=torch.float16, device=DEVICE)
    x = storage.as_strided((2, 128), (2**31, 1))
    x.copy_(random(2, 128))
    weight, want = random(128), poison(2, 128, dtype=x.dtype)
    rms_norm_reference(x, weight, want, 1e-6)
    rms_norm(x, weight, x, 1e-6)
    assert_close(x, want)
    residual, small = x.clone(), random(2, 128, dtype=x.dtype)
    add_rms_norm_reference(small, residual, weight, want, 1e-6)
    add_rms_norm(small, x, weight, small, 1e-6)
    assert_close(x, residual)
    assert_close(small, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_of_dependent_launches_in_a_graph(dtype):
    x, weight = random(3, 1024, dtype=dtype), random(1024)
    residual = random(3, 1024, dtype=dtype)
    out, state, start = poison(3, 1024, dtype=dtype), residual.clone(), residual.clone()

    def step(add, norm, stream, normed, **pdl):
        norm(x, weight, normed, 1e-6, **pdl)
        for _ in range(16):
            add(normed, stream, weight, normed, 1e-6, **pdl)

    step(add_rms_norm, rms_norm, state, out, pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(add_rms_norm, rms_norm, state, out, pdl=True)
    want = poison(3, 1024, dtype=dtype)
    plain = start.clone()
    step(add_rms_norm, rms_norm, plain, want)
    for _ in range(20):
        state.copy_(start)
        graph.replay()
        torch.testing.assert_close(state, plain, rtol=0, atol=0)
        torch.testing.assert_close(out, want, rtol=0, atol=0)
