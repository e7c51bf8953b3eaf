"""Quantised models on a device: what doesn't go together, and steps as graphs."""

from __future__ import annotations

import pytest
from executor.gpu.checkpoints import (
    AWQ,
    BF16,
    CHECKPOINTS,
    GROUP,
    SIZES,
    awq,
    device_runner,
    four_bits,
    make_checkpoint,
    refused,
)
from executor.gpu.conftest import TwoRunners, load, make_model, random_tokens

from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.mq.errors import ConfigError, ModelLoadError


@pytest.mark.usefixtures("all_references")
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
