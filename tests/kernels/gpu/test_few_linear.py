"""The linear layer for one token, with all that it takes in, against its reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.few_linear import few_linear, few_linear_reference
from ringcast.kernels.gpu.few_linear_table import (
    MOST_PER_THREAD,
    PROGRAMS,
    TUNED,
    Config,
    configuration,
    per_thread,
    rule,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KINDS = [None, "silu", "gelu_tanh"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def random_weight(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, inputs, device=DEVICE) / inputs**0.5).to(dtype)


def compare(rows, inputs, dtype, *, activation=None, parts=(), **options) -> None:
    """Both functions on random inputs; `parts` names the optional ones to give."""
    outputs = rows // 2 if activation else rows
    optional = {
        "bias_N": random(rows, dtype=dtype),
        "norm_weight_K": random(inputs),
        "residual_1K": random(1, inputs, dtype=dtype),
        "add_to_1N": random(1, outputs, dtype=dtype),
    }
    inputs_of_both = {name: optional[name] for name in parts} | {"activation": activation}
    x, weight = random(1, inputs, dtype=dtype), random_weight(rows, inputs, dtype)
    got, want = (
        torch.full((1, outputs + 16), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)
    )
    few_linear(x, weight, got[:, :outputs], **inputs_of_both, **options)
    few_linear_reference(x, weight, want[:, :outputs], **inputs_of_both)
    assert got[:, outputs:].isnan().all()
    got, want = got[:, :outputs], want[:, :outputs]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        (),
        ("norm_weight_K",),
        ("norm_weight_K", "residual_1K"),
        ("add_to_1N",),
        ("bias_N", "norm_weight_K", "residual_1K", "add_to_1N"),
    ],
)
def test_all_that_it_takes_in(parts, activation, dtype):
    compare(12, 96, dtype, activation=activation, parts=parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs"), [(2, 1), (6, 17), (14, 576), (6, 1025), (4, 5000), (2, 14336)]
)
def test_odd_sizes(rows, inputs, dtype):
    for activation in (None, "silu"):
        compare(rows, inputs, dtype, activation=activation, parts=("bias_N", "norm_weight_K"))


@pytest.mark.parametrize("config", [Config(4, 2, 64), Config(1, 8, 16), Config(8, 4, 32)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_configuration_gives_the_same(config, activation):
    everything = ("bias_N", "norm_weight_K", "residual_1K", "add_to_1N")
    for inputs in (64, 72):
        compare(10, inputs, torch.float32, activation=activation, parts=everything, config=config)


def test_it_adds_in_place():
    x, weight, stream = random(1, 64), random_weight(10, 64, torch.float32), random(1, 10)
    want = torch.full_like(stream, float("nan"))
    few_linear_reference(x, weight, want, add_to_1N=stream)
    few_linear(x, weight, stream, add_to_1N=stream)
    torch.testing.assert_close(stream, want)


def test_results_of_another_type():
    x, weight = random(1, 64, dtype=torch.float16), random_weight(10, 64, torch.float16)
    got, want = (torch.full((1, 10), float("nan"), device=DEVICE) for _ in range(2))
    few_linear(x, weight, got)
    few_linear_reference(x, weight, want)
    torch.testing.assert_close(got, want)


def test_what_cant_be_computed_is_refused():
    x, weight, out = random(1, 32), random(6, 32), random(1, 6)
    with pytest.raises(ValueError, match=r"out is .* it must be \(1, 3\)"):
        few_linear(x, weight, out, activation="silu")
    with pytest.raises(ValueError, match="'relu'; accepted"):
        few_linear(x, weight, out, activation="relu")
    with pytest.raises(ValueError, match="5 rows"):
        few_linear(x, weight[:5], out[:, :2], activation="silu")
    with pytest.raises(ValueError, match=r"x is .* it must be \(1, 32\)"):
        few_linear(random(2, 32), weight, out)
    with pytest.raises(ValueError, match="contiguous"):
        few_linear(x, random(32, 6).T, out)
    with pytest.raises(ValueError, match="no norm_weight"):
        few_linear(x, weight, out, residual_1K=x.clone())
    with pytest.raises(ValueError, match="other programs still read"):
        few_linear(x, random(32, 32), x)


SIZES = [1, 17, 576, 1024, 3072, 4096, 5632, 14336, 28672]


@pytest.mark.parametrize("gated", [False, True])
def test_the_rule_holds_for_any_shape(gated):
    for rows, inputs in itertools.product([2, 576, 6144, 151936], SIZES):
        config = configuration(rows, inputs, gated)
        assert config.block & (config.block - 1) == 0
        assert 2 <= config.warps <= 8
        assert per_thread(config, inputs, gated) <= MOST_PER_THREAD
        outputs = rows // 2 if gated else rows
        assert config.rows == 1 or outputs // config.rows >= PROGRAMS


def test_few_outputs_get_a_program_each_and_many_share():
    assert rule(1024, 2048) == Config(rows=1, warps=4, block=2048)
    assert rule(151936, 1024) == Config(rows=4, warps=2, block=1024)
    assert rule(4096, 14336).block == 2048  # which divides 14336


def test_the_table_comes_before_the_rule(monkeypatch):
    monkeypatch.setitem(TUNED, (24, 96, True), Config(1, 8, 32))
    assert configuration(24, 96, True) == Config(1, 8, 32)
    assert configuration(24, 96, False) != Config(1, 8, 32)
    compare(24, 96, torch.float32, activation="silu")


@pytest.mark.gpu
def test_weights_beyond_two_billion_elements():
    weight = torch.zeros(2**18 + 3, 8192, dtype=torch.float16, device=DEVICE)
    weight[-1] = random_weight(1, 8192, torch.float16)
    x = random(1, 8192, dtype=torch.float16)
    got = torch.full((1, weight.shape[0]), float("nan"), dtype=torch.float16, device=DEVICE)
    few_linear(x, weight, got)
    want = x.float() @ weight[-1].float()
    torch.testing.assert_close(got[0, -1:].float(), want, rtol=4e-3, atol=4e-3)
    assert not got[0, :-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pdl", [False, True])
def test_layers_in_a_graph(pdl, dtype):
    """Eight feed-forward layers, where each launch reads what the one before it wrote."""
    layers = [
        (random(1024), random_weight(6144, 1024, dtype), random_weight(1024, 3072, dtype))
        for _ in range(8)
    ]
    start = random(1, 1024, dtype=dtype)
    stream, inner = start.clone(), torch.full((1, 3072), float("nan"), dtype=dtype, device=DEVICE)

    def step(function, stream, **options):
        for norm, gate_up, down in layers:
            function(stream, gate_up, inner, norm_weight_K=norm, activation="silu", **options)
            function(inner, down, stream, add_to_1N=stream, **options)

    want = start.clone()
    step(few_linear_reference, want)
    step(few_linear, stream, pdl=pdl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(few_linear, stream, pdl=pdl)
    first = None
    for _ in range(50):
        stream.copy_(start)
        inner.fill_(float("nan"))
        graph.replay()
        first = stream.clone() if first is None else first
        torch.testing.assert_close(stream, first, rtol=0, atol=0)
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(first, want, rtol=tolerance, atol=tolerance)
