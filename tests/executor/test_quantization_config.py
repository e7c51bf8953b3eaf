"""config.json's quantization_config: what is read, and what is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from ringcast.executor.quantization import (
    Fp8Checkpoint,
    Int4Checkpoint,
    read_quantization,
    refuse_quantized,
)
from ringcast.executor.runner import make_runner
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError, ModelLoadError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(
    weights: dict | None = None, activations: dict | None = None, **changes: Any
) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": EIGHT_BITS | {"strategy": "channel", "dynamic": False} | (weights or {}),
        "input_activations": EIGHT_BITS
        | {"strategy": "token", "dynamic": True}
        | (activations or {}),
    }
    found = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return found | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]} | changes


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, None),
        ({}, None),
        (AWQ, Int4Checkpoint("awq", 128, 0)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Int4Checkpoint("awq", 64, 0)),
        (GPTQ, Int4Checkpoint("gptq", 64, 1)),
        (
            GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "group_size": -1},
            Int4Checkpoint("gptq", -1, 0),
        ),
        (FP8, Fp8Checkpoint("fp8", False)),
        ({"quant_method": "fp8"}, Fp8Checkpoint("fp8", True)),
        (compressed(), Fp8Checkpoint("compressed-tensors", True)),
        (
            compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
            Fp8Checkpoint("compressed-tensors", False),
        ),
    ],
)
def test_what_is_read(found, expected):
    assert read_quantization({"quantization_config": found}) == expected


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        ("gptq", ("quantization_config = 'gptq'",)),
        ({"quant_method": "bitsandbytes"}, ("quant_method = 'bitsandbytes'", "'awq'", "'gptq'")),
        ({"bits": 4}, ("quant_method = None",)),
        ({"quant_method": ["awq"]}, ("quant_method = ['awq']",)),
        (AWQ | {"bits": 8}, ("bits = 8", "4 is")),
        (AWQ | {"zero_point": False}, ("zero_point = False",)),
        (AWQ | {"version": "gemv"}, ("version = 'gemv'", "'gemm'")),
        (AWQ | {"group_size": 0}, ("group_size = 0",)),
        (AWQ | {"group_size": True}, ("group_size = True",)),
        (GPTQ | {"desc_act": True}, ("desc_act = True", "False is")),
        (GPTQ | {"lm_head": True}, ("lm_head = True",)),
        (GPTQ | {"bits": 3}, ("bits = 3",)),
        (GPTQ | {"dynamic": {"-:x": {}}}, ("dynamic", "one way for all layers")),
        (GPTQ | {"checkpoint_format": "marlin"}, ("'marlin'", "'gptq_v2'")),
        (GPTQ | {"group_size": None}, ("group_size = None",)),
        (FP8 | {"weight_block_size": [128, 128]}, ("weight_block_size = [128, 128]",)),
        (FP8 | {"activation_scheme": "none"}, ("activation_scheme = 'none'",)),
        (FP8 | {"fmt": "e5m2"}, ("fmt = 'e5m2'",)),
        (compressed(format="pack-quantized"), ("format = 'pack-quantized'", "float-quantized")),
        (compressed(config_groups={}), ("config_groups = []", "one group")),
        (compressed(config_groups=None), ("config_groups = None",)),
        (compressed({"num_bits": 4}), ("group_0.weights.num_bits = 4",)),
        (compressed({"type": "int"}), ("group_0.weights.type = 'int'",)),
        (compressed({"strategy": "block"}), ("weights.strategy = 'block'", "'channel'")),
        (compressed(None, {"strategy": "tensor"}), ("input_activations.strategy = 'tensor'",)),
        (compressed(None, {"dynamic": "local"}), ("input_activations.dynamic = 'local'",)),
        (
            compressed(
                config_groups={
                    "g": compressed()["config_groups"]["group_0"] | {"input_activations": None}
                }
            ),
            ("g.input_activations = None",),
        ),
    ],
)
def test_what_is_refused(found, parts):
    with pytest.raises(ModelLoadError) as error:
        read_quantization({"quantization_config": found})
    assert str(error.value).startswith("config.json: quantization_config")
    for part in parts:
        assert part in str(error.value)


def test_a_device_that_reads_none_says_which_does():
    refuse_quantized({}, "cpu")
    message = r"awq, 4 bits, groups of 128 inputs\) are not supported on device 'cpu'; 'cuda' reads"
    with pytest.raises(ModelLoadError, match=message):
        refuse_quantized({"quantization_config": AWQ}, "cpu")


@pytest.mark.parametrize(
    ("device", "quantization", "message"),
    [
        ("cpu", "fp8", "device 'cpu' has 'none', 'int8', 'int4' only; cuda has it"),
        ("cuda", "int4", "device 'cuda' has 'none', 'fp8' only; cpu has it"),
        ("fake", "fp8", "device 'fake' has 'none' only; cuda has it"),
    ],
)
def test_pairs_that_cant_be(device, quantization, message):
    config = build(EngineConfig, {"device": device, "quantization": quantization})
    with pytest.raises(ConfigError, match=f"quantization = '{quantization}': {message}"):
        make_runner(config, None)  # refused before it is looked at


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_a_cache_of_more_bits_is_for_real_devices(name):
    for device in ("cpu", "cuda"):
        build(EngineConfig, {"device": device, "kv_cache_dtype": name})
    with pytest.raises(ConfigError, match=f"kv_cache_dtype = '{name}': .*'cpu' and 'cuda' have it"):
        build(EngineConfig, {"device": "fake", "kv_cache_dtype": name})


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_cache_of_eight_bits_is_for_cuda_alone(device, name):
    build(EngineConfig, {"device": "cuda", "kv_cache_dtype": name})
    message = f"kv_cache_dtype = '{name}': device 'cuda' alone has it, .* is '{device}'"
    with pytest.raises(ConfigError, match=message):
        build(EngineConfig, {"device": device, "kv_cache_dtype": name})
    with pytest.raises(ConfigError, match="kv_cache_dtype = 'fp8_e5m2'"):
        build(EngineConfig, {"device": "cuda", "kv_cache_dtype": "fp8_e5m2"})
