"""`--quantization`: models of every kind against transformers, and what it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from in_process import InProcessEngine
from tiny_model import make_tiny_model

from ringcast.executor.runner import make_runner
from ringcast.kernels.cpu import blocks, quantize, tiles, vectors
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError
from ringcast.mq.sampling_params import SamplingParams

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
# Of a logit, in shares of its row's largest: what quantised activations, and weights, may change.
TOLERANCE = {"int8": 0.02, "int4": 0.06}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    name, changes = MODELS[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**(SHAPE | changes))
    ).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    made.tie_weights()
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    return folder, made


def quantized(folder: Path, bits: int, dtype: torch.dtype) -> torch.nn.Module:
    """The model in float32 with weights quantised from `dtype`, and an embedding of its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    head = model.lm_head.weight.detach().clone()
    model.lm_head.weight = torch.nn.Parameter(head)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            made = quantize.quantize(module.weight.data.to(dtype), 8 if name == "lm_head" else bits)
            module.weight.data = quantize.dequantize(made, *module.weight.shape)
    return model


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def logits_of(s: Any, model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """What a model makes of each row's tokens: [positions, V]."""
    return {row: model(torch.tensor([tokens])).logits[0] for row, tokens in s.known.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_logits(name, dtype, model, hand):
    folder, original = model
    reference = quantized(folder, 8 if name == "int8" else 4, getattr(torch, dtype))
    s = hand(folder, dtype=dtype, quantization=name, max_num_batched_tokens=64)
    s.enter(3, random_tokens(1, 40))
    s.run({3: 40})
    s.enter(0, random_tokens(2, 37))
    s.run({0: 10, 3: 1})
    s.run({0: 27, 3: 1})
    for _ in range(3):
        s.run({0: 1, 3: 1})
    assert len(s.logits) == 10
    mine, whole = logits_of(s, reference), logits_of(s, original)
    for (row, position), logits in s.logits.items():
        assert error(logits, mine[row][position - 1]) < TOLERANCE[name]
        if name == "int8":
            assert error(logits, whole[row][position - 1]) < 0.08


def test_the_kernel_does_not_change_the_bits(hand, model, monkeypatch):
    """But for that of 8 bits with AVX2 alone (int4's output layer, too), which rounds otherwise."""
    folder, _ = model

    def logits(name: str) -> list[torch.Tensor]:
        s = hand(folder, quantization=name)
        s.enter(0, random_tokens(3, 30))
        s.run({0: 30})
        s.run({0: 1})
        return list(s.logits.values())

    for name in ("int8", "int4"):
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "available", lambda: False)
            first = logits(name)
            patch.setattr(tiles, "bytes_available", lambda: False)
            second = logits(name)
            patch.setattr(vectors, "products_available", lambda: False)
            third = logits(name)
        for a, b, c in zip(first, second, third, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


@pytest.mark.skipif(not blocks.available(), reason="this processor has no AVX2")
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_with_avx2_alone(name, hand, model, monkeypatch):
    """bfloat16 is of the KV cache and of weights, the embedding among them, and of nothing else."""
    for module, feature in ((tiles, "bytes_available"), (vectors, "products_available")):
        monkeypatch.setattr(module, feature, lambda: False)
    monkeypatch.setattr(vectors, "bfloat16_available", lambda: False)
    folder, _ = model
    reference = quantized(folder, 8 if name == "int8" else 4, torch.bfloat16)
    whole = hand(folder, quantization=name).runner.details()
    s = hand(folder, quantization=name, dtype="bfloat16")
    details = s.runner.details()
    assert details["linear"] == f"{name}, vectors (AVX2)"
    assert details["kv_cache_bytes"] * 2 == whole["kv_cache_bytes"]
    assert details["weights_bytes"] < whole["weights_bytes"]
    s.enter(0, random_tokens(5, 30))
    s.run({0: 30})
    s.run({0: 1})
    whole = logits_of(s, reference)
    for (row, position), logits in s.logits.items():
        assert error(logits, whole[row][position - 1]) < TOLERANCE[name]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_logits_are_the_same_in_any_batch(name, hand, model):
    folder, _ = model
    alone, together = (hand(folder, quantization=name, max_num_seqs=40) for _ in range(2))
    alone.enter(0, random_tokens(0, 9))
    alone.run({0: 9})
    for row in range(40):
        together.enter(row, random_tokens(row, 9))
        together.run({row: 9})
    for _ in range(4):
        alone.run({0: 1})
        together.run(dict.fromkeys(range(40), 1))
    for key, logits in alone.logits.items():
        assert torch.equal(logits, together.logits[key])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_from_end_to_end(name, tmp_path, spec_of):
    folder = make_tiny_model(tmp_path / "tiny")
    options = {"quantization": name, "load_format": "dummy", "num_threads": 2, "seed": 1}
    options |= {"num_gpu_blocks_override": 100, "enable_prefix_caching": False}
    engine = InProcessEngine(build(EngineConfig, options), spec_of(folder))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[*range(5 + i, 25 + 2 * i)] for i in range(20)]
    together = engine.generate(prompts, params)
    assert [len(tokens) for tokens in together] == [12] * 20
    again = [engine.generate([prompt], params)[0] for prompt in prompts[:4]]
    assert again == together[:4]


def test_details_and_memory(hand, model):
    folder, _ = model
    whole = hand(folder).runner.details()
    sizes = {name: hand(folder, quantization=name).runner.details() for name in ("int8", "int4")}
    assert whole["linear"].startswith("rows")
    for name, details in sizes.items():
        assert details["linear"].startswith(name)
        assert details["weights_bytes"] < whole["weights_bytes"]
    assert sizes["int4"]["weights_bytes"] < sizes["int8"]["weights_bytes"]


def test_a_device_without_it_refuses(tmp_path, spec_of):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"], "vocab_size": 8}))
    config = build(EngineConfig, {"quantization": "int8", "device": "fake"})
    with pytest.raises(ConfigError, match=r"quantization = 'int8': device 'fake' has 'none' only"):
        make_runner(config, spec_of(tmp_path))


def test_an_unknown_quantization_is_refused():
    with pytest.raises(ConfigError, match="quantization = 'fp4'"):
        build(EngineConfig, {"quantization": "fp4"})
