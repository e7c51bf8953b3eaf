"""Quantised checkpoints, packed by the formats' own rules and not by the runner's code, beside a
folder with the same weights in float32; and runners of a device that load them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executor.gpu.conftest import load, make_model
from kernels.gpu.devices import DEVICE
from safetensors.torch import load_file, save_file

from ringcast.executor.gpu import linears
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.kernels.gpu import int4_linear
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import ModelLoadError

FP8 = torch.float8_e4m3fn
GROUP = 32
SIZES = {"intermediate_size": 64}
QUERY = "model.layers.0.self_attn.q_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
BF16 = {"dtype": "bfloat16"}
Tensors = dict[str, torch.Tensor]
Folders = tuple[ModelSpec, ModelSpec]


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


CHECKPOINTS = {
    "channel, dynamic": (compressed("channel", False), eight_bits("channel", False)),
    "tensor, static": (compressed("tensor", True), eight_bits("tensor", True)),
    "fp8, dynamic": ({"quant_method": "fp8"}, eight_bits("tensor", False)),
    "fp8, static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        eight_bits("tensor", True),
    ),
}


def edit(spec: ModelSpec, change: Callable[[Tensors], object]) -> None:
    file = Path(spec.path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def device_runner(spec: ModelSpec, **options: Any) -> GpuModelRunner:
    """With the options of a CUDA device, also where there is none."""
    options = {"device": "cuda", "enforce_eager": True, "num_gpu_blocks_override": 60} | options
    return load(spec, GpuModelRunner, 0, DEVICE, **options)


def refused(spec: ModelSpec, *parts: str, **options: Any) -> None:
    with pytest.raises(ModelLoadError) as failure:
        device_runner(spec, **options)
    for part in parts:
        assert part in str(failure.value)


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
