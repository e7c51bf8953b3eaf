"""Quantised checkpoints, and the options fp8 of weights and KV cache, through the device's runner.

Checkpoints are packed here, by the formats' own rules and not by the runner's code, beside a folder
with the same weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executor.gpu.conftest import (
    SHAPE,
    TwoRunners,
    load,
    make_model,
    random_tokens,
    take_few_programs,
    take_references,
)
from kernels.gpu.devices import DEVICE
from safetensors.torch import load_file, save_file

from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import linears
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.kernels.gpu import fp8_linear, int4_linear
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import ConfigError, ModelLoadError

FP8 = torch.float8_e4m3fn
GROUP = 32
SIZES = {"intermediate_size": 64}
QUERY = "model.layers.0.self_attn.q_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
Tensors = dict[str, torch.Tensor]


# --- checkpoints


def awq(weight_KN: torch.Tensor, zeros_GN: torch.Tensor) -> Tensors:
    """Eight outputs in an int32; the i-th four bits have the output that is i-th here."""

    def pack(numbers: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed += numbers[:, output::8].long() * 16**place
        return packed.to(torch.int32)

    return {"qweight": pack(weight_KN), "qzeros": pack(zeros_GN)}


def gptq(weight_KN: torch.Tensor, zeros_GN: torch.Tensor) -> Tensors:
    """Eight inputs in an int32, and eight outputs' zero points less one; 0 can't be stored."""
    qweight = torch.zeros(len(weight_KN) // 8, weight_KN.shape[1], dtype=torch.int64)
    qzeros = torch.zeros(len(zeros_GN), zeros_GN.shape[1] // 8, dtype=torch.int64)
    for place in range(8):
        qweight += weight_KN[place::8].long() * 16**place
        qzeros += (zeros_GN[:, place::8].long() - 1) * 16**place
    g_idx = torch.arange(len(weight_KN), dtype=torch.int32) // (len(weight_KN) // len(zeros_GN))
    packed = {"qweight": qweight, "qzeros": qzeros}
    return {name: tensor.to(torch.int32) for name, tensor in packed.items()} | {"g_idx": g_idx}


def four_bits(pack: Callable[..., Tensors], group: int) -> Callable[[torch.Tensor], Any]:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        groups = inputs // group
        numbers = torch.randint(16, (inputs, outputs))
        zeros = torch.randint(1, 16, (groups, outputs))
        scales = ((torch.rand(groups, outputs) + 0.5) * 0.03).half()
        whole = (numbers - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(
            group, 0
        )
        return pack(numbers, zeros) | {"scales": scales}, whole.T.contiguous()

    return quantize


def eight_bits(strategy: str, static: bool) -> Callable[[torch.Tensor], Any]:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        most = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()
        # Wider than it must be, and of each weight another.
        scale = most / 448 * (1 + torch.rand(()))
        q = (weight / scale).to(FP8)
        tensors = {"weight": q, "weight_scale": scale if scale.dim() else scale.reshape(1)}
        if static:
            tensors["input_scale"] = torch.tensor(0.02)
        return tensors, q.float() * scale

    return quantize


Folders = tuple[ModelSpec, ModelSpec]


def make_checkpoint(
    folder: Path,
    config: dict[str, Any],
    quantize: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]],
    name: str = "llama",
    edit: Callable[[Tensors], None] = lambda tensors: None,
    kept: str = "-",
) -> Folders:
    """The quantised model, and the one in float32. Linear layers with `kept` in their name aren't
    quantised.
    """
    reference = make_model(folder / "whole", name, **SIZES)
    torch.manual_seed(1)
    whole = load_file(folder / "whole/model.safetensors")
    tensors: Tensors = {}
    for key, tensor in whole.items():
        if key.endswith("_proj.weight") and kept not in key:
            parts, whole[key] = quantize(tensor)
            tensors |= {key.replace("weight", part): value for part, value in parts.items()}
        else:
            tensors[key] = tensor
    edit(tensors)
    save_file(whole, folder / "whole/model.safetensors")
    spec = make_model(folder / "quantized", name, **SIZES, quantization_config=config)
    save_file(tensors, folder / "quantized/model.safetensors")
    return spec, reference


def compressed(strategy: str, static: bool) -> dict[str, Any]:
    activations = {"strategy": "tensor" if static else "token", "dynamic": not static}
    group = {
        "targets": ["Linear"],
        "weights": EIGHT_BITS | {"strategy": strategy, "dynamic": False},
        "input_activations": EIGHT_BITS | activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def device_runner(spec: ModelSpec, **options: Any) -> GpuModelRunner:
    """With the options of a CUDA device, also where there is none."""
    options = {"device": "cuda", "enforce_eager": True, "num_gpu_blocks_override": 60} | options
    return load(spec, GpuModelRunner, 0, DEVICE, **options)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most kernels' references, where there is no device."""
    if DEVICE.type != "cuda":
        take_references(monkeypatch)


@pytest.fixture
def quickest(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references of those of quantised layers too."""
    if DEVICE.type != "cuda":
        monkeypatch.setattr(linears, "int4_linear", int4_linear.int4_linear_reference)
        monkeypatch.setattr(linears, "quantize_rows", fp8_linear.quantize_rows_reference)


# --- 4 bits


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


@pytest.mark.usefixtures("quick")
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


def linear_of(runner: GpuModelRunner) -> torch.Tensor:
    """The first layer's queries, keys and values in float32."""
    linear = runner._decoder._layers[0].qkv
    if isinstance(linear, linears.Int4Linear):
        whole = torch.empty(linear.weight.outputs, linear.weight.inputs, device=DEVICE)
        int4_linear.dequantize_int4_reference(linear.weight, whole)
        return whole.cpu()
    return (linear.weight_NK.float() * linear.scale_N[:, None]).cpu()


def stacked(spec: ModelSpec) -> torch.Tensor:
    tensors = load_file(Path(spec.path) / "model.safetensors")
    names = [QUERY.replace("q_proj", f"{which}_proj.weight") for which in "qkv"]
    return torch.cat([tensors[name] for name in names])


@pytest.mark.usefixtures("quickest")
def test_gptqs_second_format_stores_zero_points_as_they_are(tmp_path):
    def pack(weight_KN, zeros_GN):
        return gptq(weight_KN, zeros_GN + 1)

    config = GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}

    def quantize(weight):
        return four_bits(pack, weight.shape[1])(weight)

    spec, reference = make_checkpoint(tmp_path, config, quantize)
    torch.testing.assert_close(linear_of(device_runner(spec)), stacked(reference))


@pytest.mark.usefixtures("quickest")
def test_a_bias_of_zeros_is_dropped_and_another_refused(tmp_path):
    def add(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith("qweight")]:
            tensors[key.replace("qweight", "bias")] = torch.zeros(tensors[key].shape[1])

    spec, _ = make_checkpoint(tmp_path, GPTQ, four_bits(gptq, GROUP), "qwen3", add)
    device_runner(spec)
    edit(spec, lambda tensors: tensors[f"{QUERY}.bias"].fill_(1.0))
    refused(spec, f"{QUERY}.bias", "isn't zero")


@pytest.mark.usefixtures("quickest")
def test_layers_that_were_left_in_16_bits(tmp_path):
    config = AWQ | {"modules_to_not_convert": ["layers.0"]}
    spec, reference = make_checkpoint(tmp_path, config, four_bits(awq, GROUP), kept="layers.0.")
    mine = device_runner(spec)
    kinds = [type(layer.down) for layer in mine._decoder._layers]
    assert kinds == [linears.Linear, linears.Int4Linear]
    assert len(mine._decoder.representatives()) == 2
    converse(TwoRunners(mine, load(reference, CpuModelRunner), 16, 1))


# --- 8 bits


def logits(runner: GpuModelRunner) -> torch.Tensor:
    """Of a prompt's end, of one token alone and of one beside another sequence: tokens are given,
    so that they are the same whatever was sampled.
    """
    s, known, found = TwoRunners(runner, None, 16, len(runner._decoder.groups)), [], []

    def run(row: int, more: list[int], others: dict[int, int] | None = None) -> None:
        blocks = s.blocks[row - 1] if known else []
        s.enter(row, [*known, *more], computed=len(known), blocks=blocks)
        known.extend(more)
        s.run({row: len(more)} | (others or {}))
        found.append(runner._decoder.logits_NV[0].float().clone().cpu())

    run(1, random_tokens(1, 21))
    run(2, [7])
    s.enter(5, random_tokens(2, 9))
    run(3, [8], {5: 9})
    return torch.stack(found)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().amax(-1) / want.abs().amax(-1)).max().item()


def emulate(monkeypatch: pytest.MonkeyPatch, scale: float | None) -> None:
    """Linear layers of 16 bits, but for the head, get activations that have been through 8: by a
    scale for each token, or by a fixed one.
    """
    whole = linears.Linear.into

    def into(self, x_TK, out_TN, pdl=False):
        if len(self.weight_NK) != SHAPE["vocab_size"]:
            x = x_TK.float()
            steps = scale or x.abs().amax(-1, keepdim=True) * (1 / 448)
            x_TK = ((x / steps).clamp(-448, 448).to(FP8).float() * steps).to(x_TK.dtype)
        whole(self, x_TK, out_TN)

    monkeypatch.setattr(linears.Linear, "into", into)


BF16 = {"dtype": "bfloat16"}
CHECKPOINTS = {
    "channel, dynamic": (compressed("channel", False), eight_bits("channel", False)),
    "tensor, static": (compressed("tensor", True), eight_bits("tensor", True)),
    "fp8, dynamic": ({"quant_method": "fp8"}, eight_bits("tensor", False)),
    "fp8, static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        eight_bits("tensor", True),
    ),
}


@pytest.mark.usefixtures("quickest")
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_of_eight_bits(kind, tmp_path, monkeypatch):
    config, quantize = CHECKPOINTS[kind]
    spec, reference = make_checkpoint(tmp_path, config, quantize)
    mine, theirs = device_runner(spec, **BF16), device_runner(reference, **BF16)
    assert "fp8" in mine.details()["quantization"]
    torch.testing.assert_close(linear_of(mine), stacked(reference))
    emulate(monkeypatch, 0.02 if "static" in kind else None)
    assert error(logits(mine), logits(theirs)) < 0.05


@pytest.mark.usefixtures("quickest")
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_weights_are_quantised_at_load(name, tmp_path, monkeypatch):
    spec = make_model(tmp_path, name, **SIZES)
    mine, theirs = device_runner(spec, quantization="fp8", **BF16), device_runner(spec, **BF16)
    assert mine.details()["quantization"] == "fp8, dynamic activations"
    assert mine.details()["weights_bytes"] < 0.75 * theirs.details()["weights_bytes"]
    weight = stacked(spec).bfloat16().float()
    steps = weight.abs().amax(1, keepdim=True) * (1 / 448)
    torch.testing.assert_close(linear_of(mine), (weight / steps).to(FP8).float() * steps)

    for own, other in zip(mine._decoder._layers, theirs._decoder._layers, strict=True):
        for one, whole in zip(own.linears, other.linears, strict=True):
            with torch.inference_mode():
                whole.weight_NK.copy_(one.weight_NK.float() * one.scale_N[:, None])
    emulate(monkeypatch, None)
    # Gemma norms what it adds, and so the error in it.
    assert error(logits(mine), logits(theirs)) < (0.05 if name == "llama" else 0.15)


@pytest.mark.usefixtures("quickest")
def test_the_widest_of_the_parts_scales_holds_for_all(tmp_path):
    def widen(tensors: Tensors) -> None:
        tensors[QUERY.replace("q_proj", "k_proj.input_scale")] = torch.tensor([0.5])

    config, quantize = CHECKPOINTS["tensor, static"]
    spec, _ = make_checkpoint(tmp_path, config, quantize, edit=widen)
    layer = device_runner(spec, **BF16)._decoder._layers[0]
    assert layer.qkv.input_scale_1.tolist() == [0.5]
    assert layer.output.input_scale_1.tolist() == [pytest.approx(0.02)]


# --- the KV cache


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cache_of_eight_bits(name, tmp_path):
    spec = make_model(tmp_path, "qwen3", **SIZES)
    mine, theirs = device_runner(spec, kv_cache_dtype=name), device_runner(spec)
    assert mine.details()["kv_cache_dtype"] == "float8_e4m3fn"
    assert mine._decoder.block_bytes * 4 == theirs._decoder.block_bytes
    assert mine.details()["kv_cache_bytes"] * 4 == theirs.details()["kv_cache_bytes"]
    assert 0 < error(logits(mine), logits(theirs)) < 0.15


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("below", ["{}_scale", "attn.{}_scale", "{}_proj.{}_scale"])
def test_a_checkpoints_scales_of_the_cache(below, tmp_path):
    spec = make_model(tmp_path, "llama", **SIZES)

    def add(tensors: Tensors) -> None:
        for which, scale in (("k", 0.125), ("v", 4.0)):
            for layer in range(2):
                name = f"model.layers.{layer}.self_attn.{below.replace('{}', which)}"
                tensors[name] = torch.tensor(scale)

    edit(spec, add)
    mine, theirs = device_runner(spec, kv_cache_dtype="fp8"), device_runner(spec)
    layers = [(layer.k_scale, layer.v_scale) for layer in mine._decoder._layers]
    assert layers == [(0.125, 4.0)] * 2
    assert 0 < error(logits(mine), logits(theirs)) < 0.15
    first = mine._decoder.cache[0].float() * torch.tensor([0.125, 4.0], device=DEVICE).view(
        2, 1, 1, 1, 1
    )
    torch.testing.assert_close(first[:, 1], theirs._decoder.cache[0, :, 1], rtol=1 / 16, atol=0.02)


# --- what is refused


def edit(spec: ModelSpec, change: Callable[[Tensors], object]) -> None:
    file = Path(spec.path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(spec: ModelSpec, *parts: str, **options: Any) -> None:
    with pytest.raises(ModelLoadError) as failure:
        device_runner(spec, **options)
    for part in parts:
        assert part in str(failure.value)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


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


@pytest.mark.usefixtures("quickest")
@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_checkpoints_of_four_bits(what, tmp_path):
    change, *parts = MALFORMED[what]
    spec, _ = make_checkpoint(tmp_path, GPTQ, four_bits(gptq, GROUP), edit=change)
    refused(spec, *parts)


def test_group_sizes_that_dont_divide(tmp_path):
    spec, _ = make_checkpoint(tmp_path, GPTQ | {"group_size": 48}, four_bits(gptq, GROUP))
    refused(spec, QUERY, "group_size 48 for 32 inputs", "a multiple of 32")


WRONG_SCALES = {
    "too many": (torch.ones(3), "has 3 numbers; it must have 1 or 64"),
    "zero": (torch.zeros(1), "positive and finite"),
    "not a number": (torch.tensor([float("nan")]), "positive and finite"),
}


@pytest.mark.usefixtures("quickest")
@pytest.mark.parametrize("what", WRONG_SCALES)
def test_malformed_scales(what, tmp_path):
    tensor, message = WRONG_SCALES[what]
    config, quantize = CHECKPOINTS["channel, dynamic"]
    change = put(f"{QUERY}.weight_scale", tensor)
    spec, _ = make_checkpoint(tmp_path, config, quantize, edit=change)
    refused(spec, f"{QUERY}.weight_scale", message, **BF16)


@pytest.mark.usefixtures("quickest")
def test_options_that_dont_go_together(tmp_path):
    spec, _ = make_checkpoint(tmp_path / "awq", AWQ, four_bits(awq, GROUP))
    with pytest.raises(ConfigError, match=r"quantized already \(awq, 4 bits"):
        device_runner(spec, quantization="fp8", **BF16)
    refused(spec, "load_format = 'dummy'", "awq, 4 bits", load_format="dummy")
    config, quantize = CHECKPOINTS["fp8, dynamic"]
    eight, _ = make_checkpoint(tmp_path / "fp8", config, quantize)
    device_runner(eight, quantization="fp8", **BF16)
    with pytest.raises(ConfigError, match=r"dtype = 'float16': with weights of fp8"):
        device_runner(eight, dtype="float16")
    plain = make_model(tmp_path / "plain", "llama", intermediate_size=40)
    refused(plain, "32 outputs of 40 inputs", "multiples of 16", quantization="fp8", **BF16)


def test_the_cpu_refuses_a_quantised_checkpoint(tmp_path):
    spec, _ = make_checkpoint(tmp_path, AWQ, four_bits(awq, GROUP))
    with pytest.raises(ModelLoadError, match=r"awq, .* not supported on device 'cpu'; 'cuda'"):
        load(spec, CpuModelRunner)


# --- on a device


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}], ids=["", "fp8 cache"])
@pytest.mark.parametrize("kind", ["awq", "fp8 at load", *CHECKPOINTS])
def test_graphs_do_what_eager_steps_do(kind, options, tmp_path):
    options = options | BF16 | {"max_num_seqs": 4}
    if kind == "awq":
        spec, _ = make_checkpoint(tmp_path, AWQ, four_bits(awq, GROUP))
    elif kind in CHECKPOINTS:
        spec, _ = make_checkpoint(tmp_path, *CHECKPOINTS[kind], "qwen3")
    else:
        spec, options["quantization"] = make_model(tmp_path, "qwen3", **SIZES), "fp8"
    tokens = []
    for eager in (False, True):
        runner = device_runner(spec, enforce_eager=eager, **options)
        s = TwoRunners(runner, None, 16, 1)
        for row, length in ((0, 30), (2, 7)):
            s.enter(row, random_tokens(row, length))
        s.run({0: 30, 2: 7})
        for lengths in [{0: 1, 2: 1}] * 12 + [{2: 1}] * 12:
            s.run(lengths)
        tokens.append(s.known)
    assert tokens[0] == tokens[1]
