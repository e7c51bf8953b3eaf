"""Weights and KV cache of eight bits through the device's runner: checkpoints, and at load."""

from __future__ import annotations

import pytest
import torch
from executor.gpu.checkpoints import (
    BF16,
    CHECKPOINTS,
    FP8,
    QUERY,
    SIZES,
    Tensors,
    device_runner,
    edit,
    linear_of,
    make_checkpoint,
    put,
    refused,
    stacked,
)
from executor.gpu.conftest import SHAPE, TwoRunners, make_model, random_tokens
from kernels.gpu.devices import DEVICE

from ringcast.executor.gpu import linears
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.gpu.schemes import choose_cache_dtype
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError


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


@pytest.mark.usefixtures("all_references")
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_of_eight_bits(kind, tmp_path, monkeypatch):
    config, quantize = CHECKPOINTS[kind]
    spec, reference = make_checkpoint(tmp_path, config, quantize)
    mine, theirs = device_runner(spec, **BF16), device_runner(reference, **BF16)
    assert "fp8" in mine.details()["quantization"]
    torch.testing.assert_close(linear_of(mine), stacked(reference))
    emulate(monkeypatch, 0.02 if "static" in kind else None)
    assert error(logits(mine), logits(theirs)) < 0.05


@pytest.mark.usefixtures("all_references")
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


@pytest.mark.usefixtures("all_references")
def test_the_widest_of_the_parts_scales_holds_for_all(tmp_path):
    def widen(tensors: Tensors) -> None:
        tensors[QUERY.replace("q_proj", "k_proj.input_scale")] = torch.tensor([0.5])

    config, quantize = CHECKPOINTS["tensor, static"]
    spec, _ = make_checkpoint(tmp_path, config, quantize, edit=widen)
    layer = device_runner(spec, **BF16)._decoder._layers[0]
    assert layer.qkv.input_scale_1.tolist() == [0.5]
    assert layer.output.input_scale_1.tolist() == [pytest.approx(0.02)]


WRONG_SCALES = {
    "too many": (torch.ones(3), "has 3 numbers; it must have 1 or 64"),
    "zero": (torch.zeros(1), "positive and finite"),
    "not a number": (torch.tensor([float("nan")]), "positive and finite"),
}


@pytest.mark.usefixtures("all_references")
@pytest.mark.parametrize("what", WRONG_SCALES)
def test_malformed_scales(what, tmp_path):
    tensor, message = WRONG_SCALES[what]
    config, quantize = CHECKPOINTS["channel, dynamic"]
    change = put(f"{QUERY}.weight_scale", tensor)
    spec, _ = make_checkpoint(tmp_path, config, quantize, edit=change)
    refused(spec, f"{QUERY}.weight_scale", message, **BF16)


def test_a_cache_of_more_bits_is_of_the_models_type():
    config = build(EngineConfig, {"device": "cuda", "kv_cache_dtype": "bfloat16"})
    assert choose_cache_dtype(config, torch.bfloat16, DEVICE) == torch.bfloat16
    message = r"kv_cache_dtype = 'bfloat16': .* it is 'auto', the model's \('float16'\), 'fp8' or"
    with pytest.raises(ConfigError, match=message):
        choose_cache_dtype(config, torch.float16, DEVICE)


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cache_of_eight_bits(name, tmp_path):
    spec = make_model(tmp_path, "qwen3", **SIZES)
    mine, theirs = device_runner(spec, kv_cache_dtype=name), device_runner(spec)
    assert mine.details()["kv_cache_dtype"] == "float8_e4m3fn"
    assert mine._decoder.block_bytes * 4 == theirs._decoder.block_bytes
    assert mine.details()["kv_cache_bytes"] * 4 == theirs.details()["kv_cache_bytes"]
    assert 0 < error(logits(mine), logits(theirs)) < 0.15


@pytest.mark.usefixtures("references")
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
