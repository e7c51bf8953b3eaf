"""Products with weights of 4 bits against their reference, and the layout of these."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES
from kernels.gpu.paged_cache import poisoned, randn

from ringcast.kernels.gpu.int4_linear import (
    MANY_TOKENS,
    MAX_COUNTERS,
    MAX_PARTS,
    Int4Config,
    Int4Weight,
    choose_int4_config,
    dequantize_int4,
    dequantize_int4_reference,
    int4_linear,
    int4_linear_reference,
    int4_scratch,
    is_group_size,
    pack_int4,
    unpack_int4,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random_weight(outputs: int, inputs: int, group: int, scales=torch.float16) -> Int4Weight:
    groups = inputs // group
    packed = pack_int4(torch.randint(16, (outputs, inputs)))
    zeros = torch.randint(17, (groups, outputs), dtype=torch.uint8)
    scale = (torch.rand(groups, outputs) + 0.5) * 0.2 / inputs**0.5
    return Int4Weight(packed.to(DEVICE), scale.to(DEVICE, scales), zeros.to(DEVICE))


def check(tokens, weight, dtype, *, bias=False, config=None) -> None:
    """In columns of a wider buffer; what lies beside them stays as it was."""
    x = randn(tokens, weight.inputs + 3, dtype=dtype)[:, : weight.inputs]
    options = {"bias_N": randn(weight.outputs, dtype=dtype) if bias else None}
    scratch = int4_scratch(weight.outputs * weight.inputs, dtype, DEVICE)
    scratch.parts.fill_(float("nan"))
    got, want = (poisoned(tokens, weight.outputs + 16, dtype=dtype) for _ in range(2))
    int4_linear(x, weight, got[:, : weight.outputs], scratch, config=config, **options)
    int4_linear_reference(x, weight, want[:, : weight.outputs], None, **options)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert not got[:, : weight.outputs].isnan().any()
    assert not scratch.counters.any()


def test_the_layout():
    weight = torch.randint(16, (5, 96))
    packed = pack_int4(weight)
    assert packed.shape == (5, 48)
    assert packed[3, 17] == weight[3, 33] + 16 * weight[3, 49]
    assert torch.equal(unpack_int4(packed), weight.to(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 70])
def test_any_number_of_tokens(tokens, dtype):
    check(tokens, random_weight(70, 256, 128), dtype, bias=tokens % 2 == 1)


@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 384])
def test_group_sizes(group):
    check(3, random_weight(20, 768, group), torch.float32)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_scales_of_other_types(scales):
    check(2, random_weight(17, 64, 32, scales), torch.float32)


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_splits_are_added(splits):
    config = Int4Config(16, 32, splits, 4, 2)
    check(20, random_weight(70, 640, 128), torch.float32, bias=True, config=config)


def test_many_tokens_unpack_the_weight_once():
    check(MANY_TOKENS, random_weight(33, 128, 64), torch.float32, bias=True)
    check(MANY_TOKENS + 1, random_weight(16, 128, 64), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 128])
def test_dequantised_weights(group, dtype):
    weight = random_weight(37, 256, group)
    got, want = (poisoned(37, 256, dtype=dtype) for _ in range(2))
    dequantize_int4(weight, got)
    dequantize_int4_reference(weight, want)
    assert torch.equal(got, want)


def test_every_choice_fits_the_scratch():
    for tokens in (1, 16, 33, 64, 65, 255):
        for outputs in (16, 576, 4096, 28672, 151936):
            for blocks in (1, 4, 32, 224):
                config = choose_int4_config(tokens, outputs, blocks)
                tiles = -(-outputs // config.outputs) * -(-tokens // config.tokens)
                assert config.splits == 1 or config.splits * tokens * outputs <= MAX_PARTS
                assert config.splits == 1 or tiles <= MAX_COUNTERS
                assert 1 <= config.splits <= max(1, blocks)


def test_what_cant_be_computed_is_refused():
    assert is_group_size(128, 256)
    assert not any(is_group_size(group, 256) for group in (0, -1, 16, 48, 512))
    weight = random_weight(16, 64, 32)
    scratch = int4_scratch(0, torch.float32, DEVICE)
    x, out = randn(2, 64, dtype=torch.float32), poisoned(2, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match="64 inputs and 16 outputs"):
        int4_linear(x[:, :32], weight, out, scratch)
    with pytest.raises(ValueError, match="must be uint8"):
        int4_linear(x, weight._replace(zeros_GN=weight.zeros_GN.int()), out, scratch)
    four = {name: getattr(weight, name).repeat(2, 1) for name in ("scales_GN", "zeros_GN")}
    with pytest.raises(ValueError, match="4 groups of 64 inputs"):
        int4_linear(x, weight._replace(**four), out, scratch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 33, 200, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 576)])
def test_shapes_of_models(outputs, inputs, tokens, dtype):
    check(tokens, random_weight(outputs, inputs, 64), dtype, bias=True)


@pytest.mark.gpu
def test_weights_beyond_two_billion_bytes():
    weight = random_weight(64, 8192, 128)
    rows = 2**31 // 4096 + 64
    packed = torch.zeros(rows, 4096, dtype=torch.uint8, device=DEVICE)
    packed[-64:] = weight.packed_NK2
    scales = torch.zeros(64, rows, dtype=torch.float16, device=DEVICE)
    zeros = torch.zeros(64, rows, dtype=torch.uint8, device=DEVICE)
    scales[:, -64:], zeros[:, -64:] = weight.scales_GN, weight.zeros_GN
    x = randn(2, 8192, dtype=torch.float16)
    got, want = poisoned(2, rows, dtype=torch.float16), poisoned(2, 64, dtype=torch.float16)
    scratch = int4_scratch(0, torch.float16, DEVICE)
    int4_linear(x, Int4Weight(packed, scales, zeros), got, scratch)
    int4_linear_reference(x, weight, want, None)
    torch.testing.assert_close(got[:, -64:], want, rtol=4e-3, atol=4e-3)
    assert not got[:, :-64].any()


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_layers_in_a_graph(pdl):
    """Launches that follow each other share the scratch, and a replay starts with it as it was."""
    weights = [random_weight(1024, 1024, 128) for _ in range(6)]
    start = randn(3, 1024, dtype=torch.bfloat16)
    buffers = [start, *(poisoned(3, 1024, dtype=torch.bfloat16) for _ in weights)]
    scratch = int4_scratch(0, torch.bfloat16, DEVICE)

    def step(function, buffers, **options):
        for weight, x, out in zip(weights, buffers, buffers[1:], strict=False):
            function(x, weight, out, scratch, **options)

    want = [start, *(poisoned(3, 1024, dtype=torch.bfloat16) for _ in weights)]
    step(int4_linear_reference, want)
    step(int4_linear, buffers, pdl=pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(int4_linear, buffers, pdl=pdl)
    for _ in range(3):
        for buffer in buffers[1:]:
            buffer.fill_(float("nan"))
        graph.replay()
        scale = want[-1].float().abs().max()
        error = (buffers[-1].float() - want[-1].float()).abs().max()
        assert error <= 0.05 * scale
