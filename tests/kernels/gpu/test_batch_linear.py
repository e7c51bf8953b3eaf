"""The linear layer for a batch of decoding sequences against its reference: every way to cut the
work, all that it takes in, and splits that arrive in any order."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.batch_linear import (
    MOST_PARTS,
    MOST_TILES,
    batch_linear,
    batch_linear_reference,
    batch_linear_scratch,
)
from ringcast.kernels.gpu.batch_linear_table import (
    MOST_SPLITS,
    SHARED_BYTES,
    TUNED,
    Config,
    configuration,
    rule,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KINDS = [None, "silu", "gelu_tanh"]
SMALL = Config(rows=16, tokens=16, block=32, splits=2, warps=4, stages=2, prefetch=1, swap=False)
# What the table may hold: operands in both orders, tiles of few and many tokens, deep splits.
LARGE = [
    Config(64, 16, 128, 4, 4, 4, 4, True),
    Config(8, 16, 256, 1, 4, 4, 8, False),
    Config(32, 64, 128, 2, 4, 4, 4, False),
    Config(64, 64, 128, 8, 4, 3, 3, True),
    Config(128, 64, 64, 4, 8, 4, 0, True),
    Config(64, 16, 256, 12, 4, 1, 1, True),
    Config(32, 64, 512, 6, 4, 1, 0, False),
    Config(128, 128, 64, 2, 8, 3, 4, True),
    Config(64, 256, 64, 2, 8, 3, 8, True),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def random_weight(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, inputs, device=DEVICE) / inputs**0.5).to(dtype)


def poisoned(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((tokens, columns), float("nan"), dtype=dtype, device=DEVICE)


def scratch_for(tokens: int, rows: int):
    scratch = batch_linear_scratch(tokens, rows, DEVICE)
    scratch.parts.fill_(float("nan"))
    return scratch


def compare(tokens, rows, inputs, dtype, *, activation=None, parts=(), **options) -> None:
    """Both functions on random inputs; `parts` names the optional ones to give."""
    outputs = rows // 2 if activation else rows
    optional = {
        "bias_N": random(rows, dtype=dtype),
        "add_to_TN": random(tokens, outputs + 8, dtype=dtype)[:, :outputs],
    }
    of_both = {name: optional[name] for name in parts} | {"activation": activation}
    x = random(tokens, inputs + 16, dtype=dtype)[:, :inputs]
    weight = random_weight(rows, inputs, dtype)
    got, want = (poisoned(tokens + 1, outputs + 16, dtype) for _ in range(2))
    scratch = scratch_for(tokens, rows)
    batch_linear(x, weight, got[:tokens, :outputs], scratch, **of_both, **options)
    batch_linear_reference(x, weight, want[:tokens, :outputs], None, **of_both)
    assert got[tokens:].isnan().all()
    assert got[:, outputs:].isnan().all()
    assert not scratch.counters.any()
    tolerance = TOLERANCE[dtype]
    got, want = got[:tokens, :outputs], want[:tokens, :outputs]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("parts", [(), ("bias_N",), ("add_to_TN",), ("bias_N", "add_to_TN")])
def test_all_that_it_takes_in(parts, activation, dtype):
    compare(3, 12, 64, dtype, activation=activation, parts=parts, config=SMALL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "rows", "inputs"),
    [(1, 2, 1), (2, 6, 17), (16, 16, 64), (17, 34, 65)],
)
def test_odd_sizes(tokens, rows, inputs, dtype):
    compare(tokens, rows, inputs, dtype, config=SMALL._replace(splits=1, swap=True))
    compare(tokens, rows, inputs, dtype, activation="silu", config=SMALL)


@pytest.mark.parametrize("splits", [1, 3, 4, 5])
def test_a_split_of_one_block(splits):
    """The last split is half empty or, of five, all."""
    config = SMALL._replace(splits=splits, block=128 if splits == 1 else 32, stages=1)
    inputs = {1: 128, 3: 83, 4: 128, 5: 120}[splits]
    compare(19, 20, inputs, torch.float32, activation="silu", config=config)
    compare(7, 18, inputs, torch.float32, config=config._replace(swap=True))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_any_number_of_splits(splits, swap):
    """Seven blocks of inputs: splits of unlike lengths, and some without any."""
    config = SMALL._replace(splits=splits, swap=swap)
    compare(19, 20, 224, torch.float32, activation="silu", config=config)
    compare(7, 18, 213, torch.float32, parts=("bias_N", "add_to_TN"), config=config)


def test_the_rule_serves_what_the_table_lacks():
    assert configuration(48, 80, False, 5) is None
    compare(5, 48, 80, torch.float16)
    compare(70, 48, 80, torch.float32, activation="silu")


def test_it_adds_in_place():
    x, weight, stream = random(5, 64), random_weight(20, 64, torch.float32), random(5, 20)
    want = torch.full_like(stream, float("nan"))
    batch_linear_reference(x, weight, want, None, add_to_TN=stream)
    scratch = scratch_for(5, 20)
    batch_linear(x, weight, stream, scratch, add_to_TN=stream, config=SMALL)
    torch.testing.assert_close(stream, want, rtol=1e-5, atol=1e-5)


def test_launches_of_unlike_shapes_share_scratch():
    scratch = scratch_for(40, 96)
    for tokens, rows, inputs, splits in [(40, 96, 64, 2), (3, 20, 256, 8), (40, 96, 64, 2)]:
        x, weight = random(tokens, inputs), random_weight(rows, inputs, torch.float32)
        got, want = (poisoned(tokens, rows, torch.float32) for _ in range(2))
        batch_linear(x, weight, got, scratch, config=SMALL._replace(splits=splits))
        batch_linear_reference(x, weight, want, None)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_results_of_another_type():
    x, weight = random(4, 64, dtype=torch.float16), random_weight(10, 64, torch.float16)
    got, want = (poisoned(4, 10, torch.float32) for _ in range(2))
    batch_linear(x, weight, got, scratch_for(4, 10), config=SMALL)
    batch_linear_reference(x, weight, want, None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_cant_be_computed_is_refused():
    x, weight, out, scratch = random(3, 32), random(6, 32), random(3, 6), scratch_for(3, 6)
    with pytest.raises(ValueError, match=r"out is .* it must be \(3, 3\)"):
        batch_linear(x, weight, out, scratch, activation="silu")
    with pytest.raises(ValueError, match="'relu'; accepted"):
        batch_linear(x, weight, out, scratch, activation="relu")
    with pytest.raises(ValueError, match="5 rows"):
        batch_linear(x, weight[:5], out[:, :2], scratch, activation="silu")
    with pytest.raises(ValueError, match=r"x is .* it must be \(3, 32\)"):
        batch_linear(random(3, 31), weight, out, scratch)
    with pytest.raises(ValueError, match=r"add_to is .* it must be \(3, 6\)"):
        batch_linear(x, weight, out, scratch, add_to_TN=random(2, 6))
    with pytest.raises(ValueError, match="contiguous"):
        batch_linear(x, random(32, 6).T, out, scratch)
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        batch_linear(x.half(), weight, out, scratch)
    with pytest.raises(ValueError, match="other programs still read"):
        batch_linear(x, random(32, 32), x, scratch)
    with pytest.raises(ValueError, match="too few for 32 inputs"):
        batch_linear(x, weight, out, scratch, config=SMALL._replace(block=16, splits=1, stages=1))
    x, weight, out = random(256, 16), random(2048, 16), random(256, 2048)
    with pytest.raises(ValueError, match="needs 4194304 elements"):
        batch_linear(x, weight, out, scratch, config=SMALL._replace(splits=8))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_rule_holds_for_any_shape(gated, itemsize):
    sizes = [1, 17, 576, 1024, 3072, 14336]
    for rows, inputs, tokens in itertools.product(
        [2, 576, 6144, 151936], sizes, [1, 2, 16, 17, 64, 200, 256]
    ):
        config = rule(rows, inputs, gated, tokens, itemsize)
        for size in (config.rows, config.tokens, config.block):
            assert size >= 16
            assert size & (size - 1) == 0
        assert 1 <= config.splits <= MOST_SPLITS
        shared = (config.rows + config.tokens) * config.block * itemsize * config.stages
        assert shared <= SHARED_BYTES
        tiles = -(-rows // config.rows) * -(-tokens // config.tokens)
        parts = len(batch_linear_scratch(tokens, rows, "meta").parts)
        if config.splits > 1:
            assert tiles * config.splits * config.rows * config.tokens <= parts <= MOST_PARTS
            assert tiles <= MOST_TILES


def test_few_rows_are_split_and_many_are_not():
    assert rule(1024, 3072, False, 16).splits > 1
    assert rule(151936, 1024, False, 16).splits == 1
    assert rule(4096, 1024, False, 2).tokens == 16
    assert rule(4096, 1024, False, 256).tokens == 128


def test_the_table_serves_up_to_the_next_measured_tokens(monkeypatch):
    many = SMALL._replace(tokens=32)
    monkeypatch.setitem(TUNED, (24, 96, True), {8: SMALL, 16: None, 64: many})
    found = [configuration(24, 96, True, tokens) for tokens in (1, 8, 9, 16, 17, 64, 65)]
    assert found == [SMALL, SMALL, None, None, many, many, None]
    assert configuration(24, 96, False, 8) is None
    compare(8, 24, 96, torch.float32, activation="silu")


def test_the_table_holds_only_what_scratch_holds():
    for (rows, _, _), by_tokens in TUNED.items():
        for tokens, config in by_tokens.items():
            if config and config.splits > 1:
                tiles = -(-rows // config.rows) * -(-tokens // config.tokens)
                needed = tiles * config.splits * config.rows * config.tokens
                assert needed <= len(batch_linear_scratch(tokens, rows, "meta").parts)
                assert tiles <= MOST_TILES


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", LARGE, ids=str)
def test_large_shapes(config, dtype):
    for tokens, (rows, inputs) in itertools.product(
        [2, config.tokens, 2 * config.tokens - 5], [(1024, 3072), (6144, 1024), (1000, 2050)]
    ):
        for activation, parts in ((None, ("add_to_TN",)), ("silu", ("bias_N",))):
            options = {"activation": activation, "parts": parts, "config": config}
            compare(tokens, rows, inputs, dtype, **options)
            compare(tokens, rows, inputs, dtype, **options, pdl=True)


@pytest.mark.gpu
def test_weights_beyond_two_billion_elements():
    weight = torch.zeros(2**18 + 3, 8192, dtype=torch.float16, device=DEVICE)
    weight[-1] = random_weight(1, 8192, torch.float16)
    x = random(2, 8192, dtype=torch.float16)
    got = poisoned(2, weight.shape[0], torch.float16)
    batch_linear(x, weight, got, scratch_for(2, 64), config=Config(64, 16, 128, 1, 4, 4, 4, True))
    want = x.float() @ weight[-1].float()
    torch.testing.assert_close(got[:, -1].float(), want, rtol=4e-3, atol=4e-3)
    assert not got[:, :-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("config", LARGE, ids=str)
def test_layers_in_a_graph(config, pdl, dtype):
    """Eight feed-forward layers on one scratch, where each launch reads what the one before it
    wrote: each of 50 replays gives the same bits, however the splits arrive."""
    tokens = min(config.tokens, 64) - 3
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
    step(batch_linear, stream, pdl=pdl, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(batch_linear, stream, pdl=pdl, config=config)
    first = None
    for _ in range(50):
        stream.copy_(start)
        inner.fill_(float("nan"))
        graph.replay()
        first = stream.clone() if first is None else first
        torch.testing.assert_close(stream, first, rtol=0, atol=0)
    assert not scratch.counters.any()
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(first, want, rtol=tolerance, atol=tolerance)
