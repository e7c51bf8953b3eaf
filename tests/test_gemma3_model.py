"""Gemma 3 270M itself: as transformers on the same weights, beyond its windows, and as served.

Needs its weights: `ringcast pull gemma3-270m` (240 MB), which the test run itself doesn't fetch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import InProcessEngine
from serving import serve

from ringcast.actors.text.text_tokenizer import load_tokenizer
from ringcast.frontend.hub import list_models, resolve_model
from ringcast.mq.config import EngineConfig
from ringcast.mq.sampling_params import SamplingParams

MODEL = "gemma3-270m"
WINDOW, BLOCK = 512, 16
TEXT = Path(__file__).resolve().parents[1] / "scripts" / "data" / "moby_dick.txt"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

pytestmark = pytest.mark.skipif(
    not any(info.pulled for info in list_models() if info.name == MODEL),
    reason=f"needs weights: run `ringcast pull {MODEL}`",
)


@pytest.fixture(scope="module")
def config():
    return EngineConfig(
        model=MODEL,
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK,
        max_num_batched_tokens=WINDOW,
        num_gpu_blocks_override=1500,
    )


@pytest.fixture(scope="module")
def spec(config):
    return resolve_model(config)


@pytest.fixture(scope="module")
def engine(config, spec):
    return InProcessEngine(config, spec)


@pytest.fixture(scope="module")
def tokenizer(spec):
    return load_tokenizer(spec.tokenizer_path)


@pytest.fixture(scope="module")
def reference(spec):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32).eval()


def assert_greedy(reference, prompt, output):
    """Each token is transformers' choice, or a tie with it."""
    import torch

    places = torch.arange(len(prompt) - 1, len(prompt) + len(output) - 1)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output]), logits_to_keep=places).logits[0]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (logits.max(1).values - chosen < 1e-3).all()


def test_what_its_files_say(spec):
    assert (spec.architecture, spec.vocab_size) == ("Gemma3ForCausalLM", 262144)
    assert (spec.max_model_len, spec.bos_token_id, spec.eos_token_ids) == (2048, 2, [1])
    assert spec.sampling_defaults == {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
    kinds = spec.hf_config["layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11, 17]


def test_short_prompts(engine, tokenizer, reference):
    texts = ["The capital of France is", "def fibonacci(n):\n", "日本の首都は", "\t  a\n\n b 😀"]
    prompts = [tokenizer.encode(text) for text in texts]
    for text, prompt, output in zip(texts, prompts, engine.generate(prompts, GREEDY), strict=True):
        assert prompt[0] == 2
        assert tokenizer.decode(prompt) == text
        assert_greedy(reference, prompt, output)
    assert prompts[0] == [2, 818, 5279, 529, 7001, 563]


@pytest.mark.slow
def test_a_prompt_of_three_windows_frees_what_they_passed(engine, tokenizer, reference):
    prompt = (tokenizer.encode(TEXT.read_text()) * 2)[:1500]
    engine.add("long", prompt, GREEDY)
    used = []
    while engine.scheduler.num_unfinished:
        engine.step()
        statistics = engine.scheduler.statistics()
        used.append(statistics["num_blocks"] - 1 - statistics["free_blocks"])
    assert_greedy(reference, prompt, engine.tokens["long"][0])
    # Three layers with full attention are one group, and fifteen with windows are five.
    whole = -(-(len(prompt) + 24) // BLOCK)
    windows = 5 * (WINDOW // BLOCK + 1)
    at_the_end = used[-2]  # the last step frees all
    assert whole < at_the_end <= whole + windows
    assert at_the_end < max(used)  # a chunk of the prompt has windows of its own
    assert max(used) < 6 * whole * 0.8


@pytest.mark.slow
def test_served_as_a_base_model():
    with serve(MODEL, "--max-model-len", "1024") as server:
        body = {"model": MODEL, "temperature": 0, "max_tokens": 6}
        status, answer = server.post(
            "/v1/completions", {**body, "prompt": "The capital of France is"}
        )
        assert status == 200
        assert answer["choices"][0]["text"] == " the capital of the country of"
        assert answer["usage"]["prompt_tokens"] == 6  # with <bos>
        messages = [{"role": "user", "content": "Hello"}]
        status, answer = server.post("/v1/chat/completions", {**body, "messages": messages})
    assert status == 400
    assert answer["error"]["message"] == (
        "the model 'gemma3-270m' has no chat template: give one with --chat-template, "
        "or use /v1/completions"
    )
