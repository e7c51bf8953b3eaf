"""A small random Gemma 3 through the real scheduler and runner, against transformers: one pool for
all its layers.

Its prompts are several windows long. Each way of computing asserts that it really was taken.
"""

from __future__ import annotations

import json

import pytest
from in_process import InProcessEngine

from ringcast.mq.config import EngineConfig, ModelSpec, build
from ringcast.mq.sampling_params import SamplingParams

WINDOW, SIZE = 8, 4
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SHAPE = {
    "vocab_size": 90,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder, and transformers' model."""
    import torch
    import transformers

    torch.manual_seed(5)
    config = transformers.Gemma3TextConfig(**SHAPE)
    made = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager").eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    made.tie_weights()
    folder = tmp_path_factory.mktemp("hybrid")
    made.save_pretrained(folder)
    return folder, made


@pytest.fixture(scope="module")
def prompts():
    """They begin alike for 7 windows."""
    stem = [3 + i * i % 83 for i in range(56)]
    return [[*stem, *(5 + (i * number) % 77 for i in range(9 * number))] for number in range(1, 9)]


def engine(model, **options):
    folder = model[0]
    hf_config = json.loads((folder / "config.json").read_text())
    spec = ModelSpec(
        name="hybrid",
        path=str(folder),
        tokenizer_path=str(folder),
        architecture=hf_config["architectures"][0],
        vocab_size=hf_config["vocab_size"],
        max_model_len=160,
        eos_token_ids=[2],
        hf_config=hf_config,
    )
    fixed = {"dtype": "float32", "block_size": SIZE, "max_num_batched_tokens": 32}
    return InProcessEngine(build(EngineConfig, {**fixed, **options}), spec)


def assert_greedy(model, prompt, output):
    """Each token is transformers' choice, or a tie with it."""
    import torch

    with torch.inference_mode():
        logits = model[1](torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (logits.max(1).values - chosen < 1e-3).all()


def test_batched_chunked_and_cached(model, prompts):
    e = engine(model, num_gpu_blocks_override=900)
    for _ in range(2):
        for prompt, output in zip(prompts, e.generate(prompts, GREEDY), strict=True):
            assert_greedy(model, prompt, output)
    statistics = e.scheduler.statistics()
    assert statistics["chunked_prefills"] > 4
    assert statistics["prefix_cache_hits"] > sum(map(len, prompts)) / 2
    e.scheduler.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_sequence_holds_its_windows_only(model, prompts, depth):
    prompt = prompts[-1]  # 128 tokens
    e = engine(model, num_gpu_blocks_override=200, max_steps_in_flight=depth)
    e.add("a", prompt, GREEDY)
    used = []
    while e.scheduler.num_unfinished:
        e.step()
        statistics = e.scheduler.statistics()
        used.append(statistics["num_blocks"] - 1 - statistics["free_blocks"])
    assert_greedy(model, prompt, e.tokens["a"][0])
    whole = -(-(len(prompt) + 24) // SIZE)
    # One group of two layers with full attention, two of windows: (8 - 1 + 32) / 4 + 1 blocks,
    # and those of a chunk in flight, which aren't registered yet.
    assert whole < max(used) <= whole + 2 * (11 + 8 * (depth - 1))
    # At a token a step, no more than (8 - 1) / 4 + 1; the last step frees all.
    assert whole < used[-2] <= whole + 2 * (3 + depth - 1)
    assert used[-2] < max(used)
    assert used[-1] == 0


@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 84), (2, 88), (3, 92)])
def test_a_tight_pool_preempts(model, prompts, depth, num_blocks):
    """The longest prompt takes 40 + 2 * 11."""
    e = engine(model, num_gpu_blocks_override=num_blocks, max_steps_in_flight=depth)
    for prompt, output in zip(prompts, e.generate(prompts, GREEDY), strict=True):
        assert_greedy(model, prompt, output)
    assert e.scheduler.statistics()["preemptions"] > 0
    e.scheduler.check()


@pytest.mark.parametrize("length", [57, 64, 71])
def test_forks_share_the_windows(model, prompts, length):
    prompt = prompts[-1][:length]
    e = engine(model, num_gpu_blocks_override=400)
    e.add("a", prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=3))
    e.run()
    assert e.scheduler.statistics()["forks"] == 2
    for output in e.tokens["a"].values():
        assert_greedy(model, prompt, output)
