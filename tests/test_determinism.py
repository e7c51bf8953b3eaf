"""--deterministic: a request's tokens and log-probabilities are the same, bit for bit, alone and in
a batch, preempted or not, in chunks or not, from the cache or not; in every precision.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcessEngine
from tiny_model import make_tiny_model

from ringcast.executor import layers
from ringcast.frontend.hub import resolve_model
from ringcast.kernels.cpu import blocks, tiles
from ringcast.mq import codec
from ringcast.mq.config import EngineConfig
from ringcast.mq.sampling_params import SamplingParams

NUM_TOKENS = 12
NUM_COMPARED = 10  # of the requests, all together being more than a kernel for few rows serves
BLOCKS = 400
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 without tiles": {"dtype": "bfloat16"},
    "bfloat16 widened": {"dtype": "bfloat16"},
    "bfloat16, blocks of 8": {"dtype": "bfloat16", "block_size": 8},  # another kernel of attention
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
# Two layouts of attention: with a window, its pieces begin and end elsewhere.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32, "architectures": ["MistralForCausalLM"], "sliding_window": 21},
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1, "top_p": 0.9},
    {"temperature": 0.8, "seed": 2, "n": 2},
    {"temperature": 1.0, "seed": 3, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0, "prompt_logprobs": 2},
]
# What is done to the same requests, and what shows that it was.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "in a batch": ({}, "steps"),
    "preempted": ({"num_gpu_blocks_override": 24}, "preemptions"),
    "in chunks": (
        {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 7},
        "chunked_prefills",
    ),
    "cached": ({"enable_prefix_caching": True}, "prefix_cache_hits"),
}

Requests = list[tuple[list[int], SamplingParams]]
Result = tuple[Any, Any, dict[int, bytes]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder(name of a model) -> where it is."""

    @cache
    def make(name: str) -> Path:
        made = make_tiny_model(tmp_path_factory.mktemp("models") / name)
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(config | MODELS[name]))
        return made

    return make


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param in ("bfloat16 without tiles", "bfloat16 widened"):
        monkeypatch.setattr(tiles, "available", lambda: False)
        widened = request.param == "bfloat16 widened"
        if widened and not blocks.available():
            pytest.skip("this processor has no AVX2")
        monkeypatch.setattr(layers, "widens", lambda: widened)
    return str(request.param)


def tiny_requests() -> Requests:
    """Prompts of 30 to 65 tokens, of which 18 are the same."""
    requests: Requests = []
    for number in range(20):
        prompt = [*range(18), *((number * 37 + i * 11) % 256 for i in range(12 + 7 * (number % 6)))]
        sampling = SAMPLING[number % len(SAMPLING)]
        params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 3, **sampling}
        requests.append((prompt, SamplingParams(**params)))
    return requests


def make_engine(model: str, **options: Any) -> InProcessEngine:
    defaults = {
        "load_format": "dummy",
        "max_model_len": 128,
        "max_num_seqs": 32,
        "num_threads": 1,
        "num_gpu_blocks_override": BLOCKS,
        "enable_prefix_caching": False,
        "deterministic": True,
    }
    config = EngineConfig(model=model, **(defaults | options))
    return InProcessEngine(config, resolve_model(config))


def run(engine: InProcessEngine, requests: Requests, at_once: bool) -> list[Result]:
    for number, (prompt, params) in enumerate(requests):
        engine.add(str(number), prompt, params)
        if not at_once:
            engine.run()
    engine.run()
    return [take(engine, str(number)) for number in range(len(requests))]


def take(engine: InProcessEngine, name: str) -> Result:
    """A request's tokens, their log-probabilities, and those of its prompt by place."""
    of_prompt: dict[int, bytes] = {}
    for part in engine.prompt_logprobs.pop(name, []):
        table = part.logprobs
        width = table.width * 4
        for i in range(len(codec.ints(table.rank))):
            row = slice(i * width, (i + 1) * width)
            of_prompt[part.first + i] = table.token_ids[row] + table.logprobs[row]
    return engine.tokens.pop(name), engine.logprobs.pop(name), of_prompt


@pytest.mark.parametrize("model", MODELS)
def test_the_same_bits(folder: Callable[[str], Path], precision: str, model: str) -> None:
    requests = tiny_requests()
    common = {"model": str(folder(model)), **PRECISIONS[precision]}
    alone = run(make_engine(**common), requests[:NUM_COMPARED], at_once=False)
    assert len(alone[4][2]) == len(requests[4][0]) - 1
    for change, (options, shown) in CHANGES.items():
        engine = make_engine(**common, **options)
        if change == "cached":
            run(engine, requests, at_once=True)
        before = engine.scheduler.statistics()[shown]
        assert run(engine, requests, at_once=True)[:NUM_COMPARED] == alone, change
        assert engine.scheduler.statistics()[shown] > before, change


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_model(dtype: str) -> None:
    prompts = [[*range(1000 + 50 * n, 1028 + 50 * n + n % 4)] for n in range(14)]
    sampling = ({"temperature": 0}, {"temperature": 1.0, "seed": 5, "top_p": 0.95})
    requests = [
        (prompt, SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, **sampling[i % 2]))
        for i, prompt in enumerate(prompts)
    ]
    common = {"model": EngineConfig().model, "dtype": dtype, "load_format": "auto"}
    common |= {"max_model_len": 256, "max_num_batched_tokens": 512}
    alone = run(make_engine(**common), requests[:4], at_once=False)
    for change in ({}, {"max_num_batched_tokens": 40}, {"num_gpu_blocks_override": 32}):
        engine = make_engine(**common | change)
        assert run(engine, requests, at_once=True)[:4] == alone
    assert engine.scheduler.statistics()["preemptions"] > 0
