"""What only a device has: graphs against eager steps, 16-bit types against transformers, memory
that is measured, and long prompts behind captured graphs.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from executor.gpu.conftest import GREEDY, MODELS, TwoRunners, load, random_tokens
from executor.gpu.launchless import steps_of
from kernels.gpu.devices import DEVICE
from triton import knobs
from triton.runtime import JITFunction

from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.weights import DummyWeights
from ringcast.kernels import gpu as kernels
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import ConfigError
from ringcast.mq.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {
    "vocab_size": 2003,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True, "attention_bias": True},
    "Qwen3": {"head_dim": 128},
    "Gemma3": {
        "sliding_window": 40,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "query_pre_attn_scalar": 64,
    },
}
ALL_STEPS = {
    "device": "cuda",
    "max_num_seqs": 40,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 1000,
}
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate((70, 3, 129, 16, 1))]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ModelSpec, Any]]:
    """theirs(family) -> spec of a random model, and transformers' own in float32."""

    def make(family: str) -> tuple[ModelSpec, Any]:
        torch.manual_seed(len(family))
        kind = "Gemma3Text" if family == "Gemma3" else family
        config = getattr(transformers, f"{kind}Config")(**(SHAPE | FAMILIES[family]))
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(
            config, attn_implementation="eager"
        )
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.06)
        model.tie_weights()
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        return spec_of(folder), model.eval().to(DEVICE)

    return make


def spec_of(folder: Path, max_model_len: int = 512) -> ModelSpec:
    config = json.loads((folder / "config.json").read_text())
    return ModelSpec(
        name=folder.name,
        path=str(folder),
        tokenizer_path=str(folder),
        hf_config=config,
        architecture=config["architectures"][0],
        vocab_size=config["vocab_size"],
        max_model_len=max_model_len,
        eos_token_ids=[2],
    )


def generate(
    spec: ModelSpec,
    prompts: list[list[int]],
    num_tokens: int,
    params: Callable[[int], SamplingParams] = lambda row: GREEDY,
    **options: Any,
) -> list[list[int]]:
    """Prompts in chunks, one beginning after the other, and two steps in flight."""
    options = {"device": "cuda", "max_num_seqs": len(prompts), "num_gpu_blocks_override": 400} | (
        options
    )
    runner = load(spec, GpuModelRunner, 0, DEVICE, **options)
    s = TwoRunners(runner, None, 16, len(runner._decoder.groups), 400)
    left: dict[int, int] = {}
    for step in range(len(prompts) + num_tokens + 2):
        if step < len(prompts):
            s.enter(step, prompts[step], params=params(step))
            left[step] = len(prompts[step])
        lengths = {row: max(1, min(left[row], 64 // len(prompts))) for row in s.known}
        for row, length in lengths.items():
            left[row] -= length
        s.launch(lengths)
        if step:
            s.read()
    s.read()
    return [s.known[row][: len(prompt) + 8] for row, prompt in enumerate(prompts)]


def options_of(row: int) -> SamplingParams:
    """Greedy, at random, and what a graph doesn't have."""
    return (
        GREEDY,
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=1.0, seed=6, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, logprobs=3),
    )[row % 5]


@pytest.mark.parametrize("options", [lambda row: GREEDY, options_of], ids=["plain", "any"])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_do_what_eager_steps_do(family, options, theirs):
    spec, _ = theirs(family)
    graphs = generate(spec, PROMPTS, 30, options)
    eager = generate(spec, PROMPTS, 30, options, enforce_eager=True)
    assert graphs == eager


@torch.no_grad()
def likelihoods(model: Any, tokens: list[int], first: int) -> list[tuple[float, float]]:
    """Of each token from `first` on: its logit less the largest one, and the logits' deviation."""
    logits = model(torch.tensor([tokens], device=DEVICE)).logits[0].float()[first - 1 : -1]
    own = logits.gather(1, torch.tensor(tokens[first:], device=DEVICE)[:, None])[:, 0]
    return list(zip((own - logits.amax(-1)).tolist(), logits.std(-1).tolist(), strict=True))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-3), ("float16", 0.05), ("bfloat16", 0.25)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_transformers_likeliest(family, dtype, tolerance, theirs):
    spec, model = theirs(family)
    for prompt, tokens in zip(PROMPTS, generate(spec, PROMPTS, 30, dtype=dtype), strict=True):
        for loss, deviation in likelihoods(model, tokens, len(prompt)):
            assert -loss <= tolerance * deviation


def test_long_prompts_behind_captured_graphs(theirs):
    """A budget of 16384 tokens once hung in the first generation after capture."""
    spec = spec_of(Path(theirs("Llama")[0].path), max_model_len=4096)
    options = {"max_num_batched_tokens": 16384, "max_num_seqs": 64, "device": "cuda"}
    runner = load(spec, GpuModelRunner, 0, DEVICE, num_gpu_blocks_override=4000, **options)
    s = TwoRunners(runner, None, 16, 1, 4000)
    for wave in range(3):
        rows = range(20 * wave, 20 * wave + 20)
        for row in rows:
            s.enter(row, random_tokens(row, 800))
        for lengths in [dict.fromkeys(rows, 800), *[dict.fromkeys(s.known, 1)] * 40]:
            assert s.launch(lengths).wait(30)
            s.read()
    assert [len(s.known[row]) for row in (0, 20, 40)] == [921, 881, 841]


def test_memory_is_measured_and_its_table_adds_up(theirs):
    spec, _ = theirs("Qwen3")
    options = {"num_gpu_blocks_override": None, "max_num_seqs": 4, "gpu_memory_utilization": 0.5}
    runner = load(spec, GpuModelRunner, 0, DEVICE, device="cuda", **options)
    details = runner.details()
    assert details["num_blocks"] == 4 * 32 + 1  # more than all sequences need is never taken
    assert details["graphs"] == 3 * 2 + 2
    assert details["weights_bytes"] > 0
    assert str(details["memory"]).startswith("in use by others")


def test_too_little_memory_says_what_to_change(theirs):
    spec, _ = theirs("Qwen3")
    small = {"device": "cuda", "num_gpu_blocks_override": None}
    with pytest.raises(ConfigError, match=r"max_model_len is 512, .* KV cache has room for 32 "):
        load(spec, GpuModelRunner, 0, DEVICE, kv_cache_memory_bytes=3 << 17, **small)
    held = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.5), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 0.9: .* set it to at most"):
        load(spec, GpuModelRunner, 0, DEVICE, **small)
    del held
    torch.cuda.empty_cache()


def test_dummy_weights_are_the_same_for_the_same_seed():
    shape = (300, 7)
    first, second, other = (DummyWeights(seed, DEVICE).take("w", shape) for seed in (1, 1, 2))
    assert first.device.type == "cuda"
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert first.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_seconds_and_tokens_of_a_dummy_model(name, specs):
    runner = load(specs[name], GpuModelRunner, 0, DEVICE, device="cuda", load_format="dummy")
    s = TwoRunners(runner, None, 16, len(runner._decoder.groups))
    s.enter(2, random_tokens(1, 9))
    output = s.run({2: 9})
    assert 0 < output.seconds < 5
    assert codec.ints(output.rows).tolist() == [2]


def forget_kernels() -> None:
    """What this process has loaded of them, as in a new one."""
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()


def test_no_kernel_is_compiled_once_a_runner_is_loaded(specs, tmp_path, monkeypatch):
    """And a second start with the same folder compiles none at all."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    details = []
    for _ in range(2):
        forget_kernels()
        runner = load(specs["qwen3"], GpuModelRunner, 0, DEVICE, **ALL_STEPS)
        details.append(runner.details())
    assert details[0]["kernels_compiled"] == details[0]["kernels"] > 30
    assert (details[1]["kernels_compiled"], details[1]["kernels"]) == (0, details[0]["kernels"])
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda fn, **_: compiled.append(fn.name))
    steps_of(runner)
    assert compiled == []
