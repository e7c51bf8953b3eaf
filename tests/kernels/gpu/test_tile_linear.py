"""The linear layer by descriptors against the reference of the other one: tiles beyond every edge,
splits that wait for each other or don't, and what can't be described."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.gpu.devices import DTYPES
from kernels.gpu.test_batch_linear import compare, poisoned, random, random_weight, scratch_for

from ringcast.kernels.gpu import tile_linear
from ringcast.kernels.gpu.batch_linear import batch_linear, batch_linear_reference
from ringcast.kernels.gpu.batch_linear_table import Config

SMALL = Config(32, 16, 32, 2, warps=4, stages=2, prefetch=1, swap=False, tma=True)
LARGE = [
    Config(128, 128, 64, 1, 8, 4, 4, True, True),
    Config(128, 128, 64, 4, 8, 3, 4, False, True),
    Config(64, 256, 64, 2, 8, 3, 0, False, True),
    Config(256, 64, 64, 8, 8, 4, 4, True, True),
    Config(64, 64, 128, 8, 4, 3, 16, True, True),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
def test_all_that_it_takes_in(activation, dtype):
    parts = ("bias_N", "add_to_TN")
    compare(3, 24, 64, dtype, activation=activation, parts=parts, config=SMALL)
    compare(3, 24, 64, dtype, activation=activation, config=SMALL._replace(splits=1, swap=True))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    ("tokens", "rows", "inputs"), [(1, 2, 8), (16, 32, 64), (17, 34, 72), (35, 70, 200)]
)
def test_odd_sizes(tokens, rows, inputs, activation):
    for splits, swap in ((1, False), (4, True)):
        config = SMALL._replace(splits=splits, swap=swap)
        compare(tokens, rows, inputs, torch.float32, activation=activation, config=config)


@pytest.mark.parametrize("splits", [2, pytest.param(8, marks=pytest.mark.slow), 16])
def test_any_number_of_splits(splits):
    """Seven blocks of inputs: splits of unlike lengths, and some without any."""
    compare(19, 40, 208, torch.float32, parts=("add_to_TN",), config=SMALL._replace(splits=splits))


def test_splits_may_look_before_they_give_up(monkeypatch):
    """Under the interpreter no other comes while one looks: all but the last give up."""
    monkeypatch.setattr(tile_linear, "LOOKS", 3)
    monkeypatch.setattr(tile_linear, "_multiprocessors", lambda device: 132)
    compare(19, 40, 208, torch.float32, activation="silu", config=SMALL._replace(splits=4))


def test_it_adds_in_place_and_shares_scratch_with_the_other():
    x, weight, stream = random(20, 64), random_weight(40, 64, torch.float32), random(20, 40)
    scratch = scratch_for(20, 40)
    for config in (SMALL, SMALL._replace(tma=False), SMALL._replace(splits=4)):
        want = torch.full_like(stream, float("nan"))
        batch_linear_reference(x, weight, want, None, add_to_TN=stream)
        batch_linear(x, weight, stream, scratch, add_to_TN=stream, config=config)
        torch.testing.assert_close(stream, want, rtol=1e-5, atol=1e-5)
        assert not scratch.counters.any()


def test_what_cant_be_computed_is_refused():
    x, weight, out, scratch = random(3, 64), random(64, 64), random(3, 64), scratch_for(3, 64)

    def product(x, weight, **changes):
        batch_linear(x, weight, out, scratch, config=SMALL._replace(**changes))

    with pytest.raises(ValueError, match=r"x begins at .* 65 elements apart; both must be multi"):
        product(random(3, 65)[:, :64], weight)
    with pytest.raises(ValueError, match="x begins at"):
        product(random(3, 72)[:, 1:65], weight)
    with pytest.raises(ValueError, match=r"weight begins at .* 63 elements apart"):
        product(random(3, 64)[:, :63], random(64, 63))
    with pytest.raises(ValueError, match="3 splits; it must be a power of two"):
        product(x, weight, splits=3)
    with pytest.raises(ValueError, match=r"blocks of \(512, 16\) rows; from 8 to 256"):
        product(x, weight, rows=512, splits=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", LARGE, ids=str)
def test_large_shapes(config, dtype):
    for tokens, (rows, inputs) in itertools.product(
        [2, config.tokens, 2 * config.tokens - 5], [(1024, 3072), (6144, 1024), (1000, 2056)]
    ):
        for activation, parts in ((None, ("add_to_TN",)), ("silu", ("bias_N",))):
            options = {"activation": activation, "parts": parts, "config": config}
            compare(tokens, rows, inputs, dtype, **options)
            compare(tokens, rows, inputs, dtype, **options, pdl=True)


@pytest.mark.gpu
@pytest.mark.parametrize("looks", [0, 1, 4096])
@pytest.mark.parametrize("config", LARGE, ids=str)
def test_layers_in_a_graph(config, looks, monkeypatch):
    """Each launch reads what the one before it wrote: each of 50 replays gives the same bits,
    whoever waits, gives up or comes last."""
    monkeypatch.setattr(tile_linear, "LOOKS", looks)
    dtype, tokens = torch.bfloat16, config.tokens - 3
    layers = [
        (random_weight(6144, 1024, dtype) / 2, random_weight(1024, 3072, dtype)) for _ in range(8)
    ]
    start = random(tokens, 1024, dtype=dtype)
    stream, inner = start.clone(), poisoned(tokens, 3072, dtype)
    scratch = scratch_for(tokens, 6144)

    def step(function, stream, **options):
        for gate_up, down in layers:
            function(stream, gate_up, inner, scratch, activation="silu", **options)
            function(inner, down, stream, scratch, add_to_TN=stream, **options)

    want = start.clone()
    step(batch_linear_reference, want)
    step(batch_linear, stream, pdl=True, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(batch_linear, stream, pdl=True, config=config)
    first = None
    for _ in range(50):
        stream.copy_(start)
        inner.fill_(float("nan"))
        graph.replay()
        first = stream.clone() if first is None else first
        torch.testing.assert_close(stream, first, rtol=0, atol=0)
    assert not scratch.counters.any()
    torch.testing.assert_close(first, want, rtol=0.12, atol=0.12)
