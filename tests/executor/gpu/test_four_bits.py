"""Checkpoints of four bits (AWQ, GPTQ) through the device's runner."""

from __future__ import annotations

import pytest
import torch
from executor.gpu.checkpoints import (
    AWQ,
    GPTQ,
    GROUP,
    QUERY,
    Tensors,
    awq,
    device_runner,
    edit,
    four_bits,
    gptq,
    linear_of,
    make_checkpoint,
    put,
    refused,
    stacked,
)
from executor.gpu.conftest import TwoRunners, load, random_tokens, take_few_programs
from kernels.gpu.devices import DEVICE

from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import linears


def converse(s: TwoRunners) -> None:
    """Prefill, one sequence alone, several, and both together; each token is the CPU's."""
    s.enter(3, random_tokens(1, 21))
    s.run({3: 21})
    s.run({3: 1})
    s.run({3: 1})
    s.enter(0, random_tokens(2, 9))
    s.run({0: 9, 3: 1})
    s.run({0: 1, 3: 1})
    assert [len(s.known[row]) for row in (0, 3)] == [11, 26]


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("config", "pack", "group"),
    [pytest.param(AWQ, awq, GROUP, marks=pytest.mark.slow), (GPTQ, gptq, GROUP)],
    ids=["awq", "gptq"],
)
def test_tokens_are_those_of_the_dequantised_weights(config, pack, group, name, tmp_path):
    spec, reference = make_checkpoint(tmp_path, config, four_bits(pack, group), name)
    mine, theirs = device_runner(spec), load(reference, CpuModelRunner)
    assert mine.details()["quantization"].startswith(config["quant_method"])
    assert mine.details()["weights_bytes"] < device_runner(reference).details()["weights_bytes"]
    converse(TwoRunners(mine, theirs, 16, len(mine._decoder.groups)))


def test_every_kernel(tmp_path, monkeypatch):
    if DEVICE.type != "cuda":
        take_few_programs(monkeypatch)
    spec, reference = make_checkpoint(tmp_path, AWQ, four_bits(awq, GROUP))
    s = TwoRunners(device_runner(spec), load(reference, CpuModelRunner), 16, 1)
    s.enter(3, random_tokens(1, 5))
    s.run({3: 5})
    s.run({3: 1})


@pytest.mark.usefixtures("all_references")
def test_gptqs_second_format_stores_zero_points_as_they_are(tmp_path):
    def pack(weight_KN, zeros_GN):
        return gptq(weight_KN, zeros_GN + 1)

    config = GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}

    def quantize(weight):
        return four_bits(pack, weight.shape[1])(weight)

    spec, reference = make_checkpoint(tmp_path, config, quantize)
    torch.testing.assert_close(linear_of(device_runner(spec)), stacked(reference))


@pytest.mark.usefixtures("all_references")
def test_a_bias_of_zeros_is_dropped_and_another_refused(tmp_path):
    def add(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith("qweight")]:
            tensors[key.replace("qweight", "bias")] = torch.zeros(tensors[key].shape[1])

    spec, _ = make_checkpoint(tmp_path, GPTQ, four_bits(gptq, GROUP), "qwen3", add)
    device_runner(spec)
    edit(spec, lambda tensors: tensors[f"{QUERY}.bias"].fill_(1.0))
    refused(spec, f"{QUERY}.bias", "isn't zero")


@pytest.mark.usefixtures("all_references")
def test_layers_that_were_left_in_16_bits(tmp_path):
    config = AWQ | {"modules_to_not_convert": ["layers.0"]}
    spec, reference = make_checkpoint(tmp_path, config, four_bits(awq, GROUP), kept="layers.0.")
    mine = device_runner(spec)
    kinds = [type(layer.down) for layer in mine._decoder._layers]
    assert kinds == [linears.Linear, linears.Int4Linear]
    assert len(mine._decoder.representatives()) == 2
    converse(TwoRunners(mine, load(reference, CpuModelRunner), 16, 1))


DISORDER = torch.arange(GROUP, dtype=torch.int32).flip(0) // 16
MALFORMED = {
    "a tensor is missing": (lambda t: t.pop(f"{QUERY}.qzeros"), f"{QUERY}.qzeros", "is missing"),
    "nothing is there": (lambda t: t.pop(f"{QUERY}.qweight"), QUERY, "is quantized and"),
    "another shape": (
        put(f"{QUERY}.qweight", torch.zeros(3, 64, dtype=torch.int32)),
        "has shape [3, 64], config.json says [4, 64]",
    ),
    "another type": (
        put(f"{QUERY}.qweight", torch.zeros(4, 64)),
        f"{QUERY}.qweight",
        "is torch.float32; it must be torch.int32",
    ),
    "another order": (put(f"{QUERY}.g_idx", DISORDER), f"{QUERY}.g_idx", "desc_act"),
    "weights of 16 bits too": (
        put(f"{QUERY}.weight", torch.zeros(64, 32)),
        f"{QUERY}.weight",
        "is not part of a model",
    ),
}


@pytest.mark.usefixtures("all_references")
@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_checkpoints_of_four_bits(what, tmp_path):
    change, *parts = MALFORMED[what]
    spec, _ = make_checkpoint(tmp_path, GPTQ, four_bits(gptq, GROUP), edit=change)
    refused(spec, *parts)


def test_group_sizes_that_dont_divide(tmp_path):
    spec, _ = make_checkpoint(tmp_path, GPTQ | {"group_size": 48}, four_bits(gptq, GROUP))
    refused(spec, QUERY, "group_size 48 for 32 inputs", "a multiple of 32")
