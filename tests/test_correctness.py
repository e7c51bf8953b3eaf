"""The default model in float32 against transformers on the same weights: the same greedy tokens,
however they are computed.

Thirty-two prompts of mixed lengths (of which some tests take half), batched together. Where two
continuations part, it must be a tie: the two best logits of transformers at that place lie closer
than 1e-3. Every way of computing asserts that it really was taken.
"""

from __future__ import annotations

import pytest
from in_process import InProcessEngine

from ringcast.frontend.hub import resolve_model
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.sampling_params import SamplingParams

pytestmark = pytest.mark.model

NUM_TOKENS = 20
TIE = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SHARED = "You are a careful assistant who answers in plain words and short sentences. "
SUBJECTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time",
    "def fibonacci(n):",
    "2 + 2 =",
    "The quick brown fox",
    "Dear Sir or Madam,",
    "In 1969,",
    "Der Himmel ist",
    "El perro come",
    "Photosynthesis is the process by which",
    "To bake bread, you need",
    "The largest planet is",
    "import numpy as np\n",
    "SELECT name FROM",
    "Shakespeare wrote",
)


@pytest.fixture(scope="module")
def spec():
    return resolve_model(EngineConfig())


@pytest.fixture(scope="module")
def prompts(spec):
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(f"{spec.tokenizer_path}/tokenizer.json").encode
    short = [encode(subject).ids for subject in SUBJECTS]
    long = [
        encode(SHARED * (1 + number % 4) + subject).ids for number, subject in enumerate(SUBJECTS)
    ]
    return [*short, *long]


@pytest.fixture(scope="module")
def reference(spec, prompts):
    """transformers' model, and its greedy continuation of every prompt (left-padded, in batches of
    like lengths).
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # like ignore_eos: past it, and with no other rule
    return model, _go_on(model, prompts[:16]) + _go_on(model, prompts[16:])


def _go_on(model, prompts):
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    return out[:, width:].tolist()


@pytest.fixture(scope="module")
def half(prompts, reference):
    """Every other prompt, and the reference of these."""
    return prompts[::2], (reference[0], reference[1][::2])


def engine(**options):
    fixed = {"dtype": "float32", "num_gpu_blocks_override": 1024, "max_model_len": 2048}
    config = build(EngineConfig, {**fixed, **options})
    return InProcessEngine(config, resolve_model(config))


def same_or_tied(prompts, reference, outputs):
    """How many continuations are equal throughout; fails where one parts without a tie.

    That is the two best logits of transformers, at that place, less than TIE apart.
    """
    import torch

    model, expected = reference
    equal = 0
    for prompt, want, got in zip(prompts, expected, outputs, strict=True):
        assert len(got) == NUM_TOKENS
        if got == want:
            equal += 1
            continue
        place = next(i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + want[:place]])).logits[0, -1]
        best = logits.topk(2).values
        assert {want[place], got[place]} <= {*logits.topk(2).indices.tolist()}
        assert float(best[0] - best[1]) < TIE, (place, float(best[0] - best[1]))
    return equal


def test_equals_transformers_batched_together(prompts, reference):
    run = engine()
    outputs = run.generate(prompts, GREEDY)
    assert same_or_tied(prompts, reference, outputs) >= 28


@pytest.mark.slow
def test_mixed_steps_and_prefix_caching(prompts, reference):
    run = engine(max_num_seqs=8, max_num_batched_tokens=48)
    assert same_or_tied(prompts, reference, run.generate(prompts, GREEDY)) >= 28
    statistics = run.scheduler.statistics()
    assert statistics["mixed_steps"] > 0
    assert statistics["prefix_cache_hits"] > 0


@pytest.mark.slow
def test_without_prefix_caching(prompts, reference):
    run = engine(max_num_seqs=8, enable_prefix_caching=False)
    assert same_or_tied(prompts, reference, run.generate(prompts, GREEDY)) >= 28
    assert run.scheduler.statistics()["prefix_cache_hits"] == 0


@pytest.mark.parametrize(
    "chunk", [64, *(pytest.param(size, marks=pytest.mark.slow) for size in (16, 256))]
)
def test_chunked_prefill(half, chunk):
    prompts, reference = half
    run = engine(max_num_batched_tokens=chunk, enable_prefix_caching=False)
    assert same_or_tied(prompts, reference, run.generate(prompts, GREEDY)) >= 14
    statistics = run.scheduler.statistics()
    assert statistics["chunked_prefills"] >= 1  # prompts that needed more than one chunk
    assert statistics["mixed_steps"] > 0


def test_preemption_when_blocks_run_out(half):
    prompts, reference = half
    run = engine(num_gpu_blocks_override=24, max_model_len=256)
    assert same_or_tied(prompts, reference, run.generate(prompts, GREEDY)) >= 14
    assert run.scheduler.statistics()["preemptions"] > 0


def test_alone_or_together(prompts, reference):
    run = engine()
    alone = [run.generate([prompt], GREEDY)[0] for prompt in prompts[:3]]
    assert same_or_tied(prompts[:3], (reference[0], reference[1][:3]), alone) == 3
