"""Log-probabilities of prompts against transformers, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from in_process import InProcessEngine

from ringcast.mq import codec
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.messages import PromptLogprobs
from ringcast.mq.sampling_params import SamplingParams

VOCAB = 101
WANTED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.15)
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return folder, made


def random_tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


@torch.no_grad()
def check(parts: Iterable[PromptLogprobs], prompt: list[int], reference: Any) -> None:
    """These parts are of the whole prompt, in order, each place once."""
    raw = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    place = 1
    for part in parts:
        assert part.first == place
        table = part.logprobs
        assert table.width == 4
        ids = codec.ints(table.token_ids).reshape(-1, 4)
        values = codec.floats(table.logprobs).reshape(-1, 4)
        assert codec.ints(table.index).tolist() == list(range(len(ids)))
        for row, rank in enumerate(codec.ints(table.rank).tolist()):
            before = raw[place - 1]
            assert ids[row, 0] == prompt[place]
            assert values[row] == pytest.approx(before.numpy()[ids[row]], abs=1e-3)
            assert values[row, 1:] == pytest.approx(before.topk(3).values.numpy(), abs=1e-3)
            assert rank == 1 + (before > before[prompt[place]]).sum()
            place += 1
    assert place == max(len(prompt), 1)


def test_chunks_among_other_rows(model: Any, hand: Any) -> None:
    folder, reference = model
    s = hand(folder, max_num_seqs=4, max_num_batched_tokens=64)
    prompts = {0: random_tokens(0, 30), 2: random_tokens(1, 11), 3: random_tokens(2, 1)}
    s.enter(0, prompts[0], params=WANTED)
    s.enter(1, random_tokens(3, 9))
    s.enter(2, prompts[2], params=WANTED)
    s.enter(3, prompts[3], params=WANTED)
    # More of a prompt than max_num_seqs, so that its logits don't fit into one go.
    steps: list[dict[int, int]] = [{1: 9, 0: 7}, {0: 1, 1: 1, 2: 10}, {2: 1, 0: 21, 3: 1}, {0: 1}]
    steps += [{0: 1, 1: 1, 2: 1, 3: 1}] * 2
    found: dict[int, list[PromptLogprobs]] = {row: [] for row in range(4)}
    for step in steps:
        for part in s.run(step).prompt_logprobs:
            found[part.of].append(part)
    assert found[1] == []
    for row, prompt in prompts.items():
        check(found[row], prompt, reference)
    # What is sampled is not disturbed by it.
    ids = torch.tensor([s.known[0]])
    expected = reference(ids).logits[0, len(prompts[0]) - 1 :].argmax(-1).tolist()
    assert s.known[0][len(prompts[0]) :] == expected[:-1]


def engine(spec_of: Any, folder: Path, **options: Any) -> InProcessEngine:
    options = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_seqs": 4,
        "num_threads": 1,
        "num_gpu_blocks_override": 40,
        "max_model_len": 40,
    } | options
    spec = spec_of(folder, max_model_len=options["max_model_len"])
    return InProcessEngine(build(EngineConfig, options), spec)


def test_what_the_cache_has_is_computed_again(model: Any, spec_of: Any) -> None:
    folder, reference = model
    e = engine(spec_of, folder, long_prefill_token_threshold=7)
    prompt = random_tokens(4, 30)
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = e.generate([prompt], plain)
    e.add("again", prompt, WANTED)
    e.run()
    check(e.prompt_logprobs["again"], prompt, reference)
    assert e.tokens["again"][0] == output
    e.generate([prompt], plain)
    assert e.scheduler.statistics()["prefix_cache_hits"] == 28


def test_of_several_choices_once(model: Any, spec_of: Any) -> None:
    folder, reference = model
    e = engine(spec_of, folder)
    prompt = random_tokens(5, 14)
    e.add("three", prompt, SamplingParams(n=3, seed=1, max_tokens=5, prompt_logprobs=3))
    e.run()
    check(e.prompt_logprobs["three"], prompt, reference)


@pytest.mark.parametrize("threshold", [0, 8])
def test_preempted_with_the_prompt_in_flight(model: Any, spec_of: Any, threshold: int) -> None:
    """What comes of the prompt after that counts: it may be the last that is ever computed of it.

    "b" finds no block in step 1, with a part of its prompt or all of it in step 0.
    """
    folder, reference = model
    e = engine(
        spec_of,
        folder,
        max_steps_in_flight=3,
        num_gpu_blocks_override=5,  # 4 blocks
        long_prefill_token_threshold=threshold,
        max_model_len=16,
    )
    prompt = random_tokens(6, 12)
    e.add("a", random_tokens(7, 4), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    e.add("b", prompt, WANTED)
    e.step()
    assert e.scheduler.statistics()["preemptions"] == 1
    e.run()
    parts = e.prompt_logprobs["b"]
    again = len(parts) - 1 - [part.first for part in reversed(parts)].index(1)
    assert (again > 0) == bool(threshold)
    check(parts[again:], prompt, reference)


def test_preempted_sequences_do_not_answer_again(model: Any, spec_of: Any) -> None:
    folder, reference = model
    e = engine(spec_of, folder, num_gpu_blocks_override=14)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=3)
    prompts = [random_tokens(seed, 12) for seed in range(4)]
    for name, prompt in enumerate(prompts):
        e.add(str(name), prompt, params)
    e.run()
    assert e.scheduler.statistics()["preemptions"] > 0
    for name, prompt in enumerate(prompts):
        check(e.prompt_logprobs[str(name)], prompt, reference)
