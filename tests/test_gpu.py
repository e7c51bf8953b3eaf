"""The engine on a GPU, through `LLM`, against transformers on the same small random weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringcast import LLM, SamplingParams

pytestmark = pytest.mark.gpu

NUM_TOKENS = 48
TIE = 2e-3
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64, "tie_word_embeddings": False},
    "mistral": {"head_dim": 64, "sliding_window": 40, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 256,
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
    },
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


def make_model(kind: str, folder: Path) -> Any:
    """Random weights of transformers' own model, saved to `folder` in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **ARCHITECTURES[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):  # so that logits aren't all alike
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)
    return model.cuda()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_model(request.param, folder)


def engine(folder: Path, **options: Any) -> LLM:
    fixed = {
        "device": "cuda",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 400,
    }
    return LLM(str(folder), **{**fixed, **options})


def prompts() -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 100, 300, 7, 33]
    return [{"prompt_token_ids": rng.choices(range(1000), k=n)} for n in lengths]


def tokens_of(llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_against(model: Any, outputs: list[list[int]]) -> None:
    """Every token is transformers' likeliest one after what came before, or ties with it."""
    import torch

    for prompt, output in zip(prompts(), outputs, strict=True):
        assert len(output) == NUM_TOKENS
        ids = prompt["prompt_token_ids"] + output
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device="cuda")).logits[0].float()
        foreseen = logits[len(prompt["prompt_token_ids"]) - 1 : -1]
        chosen = foreseen.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0]
        assert float((foreseen.amax(-1) - chosen).max()) < TIE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True, "max_num_batched_tokens": 48, "max_num_seqs": 5},
        {
            "num_gpu_blocks_override": 40,
            "block_size": 16,
            "max_model_len": 384,
            "max_steps_in_flight": 4,
        },
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers(
    model: tuple[Path, Any], options: dict[str, Any]
) -> None:
    folder, reference = model
    if "num_gpu_blocks_override" in options and "gemma3" in folder.name:
        options = {**options, "num_gpu_blocks_override": 120}
    with engine(folder, dtype="float32", **options) as llm:
        check_against(reference, tokens_of(llm))
        check_against(reference, tokens_of(llm))  # with the prefix cache filled


def test_prompt_logprobs_are_near_those_of_transformers(model: tuple[Path, Any]) -> None:
    import torch

    folder, reference = model
    ids = random.Random(1).choices(range(1000), k=200)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, detokenize=False)
    with engine(folder) as llm:
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    with torch.inference_mode():
        logits = reference(torch.tensor([ids], device="cuda")).logits[0].float()
    expected = logits.log_softmax(-1)[:-1]
    entries = output.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    got = [entry[token].logprob for token, entry in zip(ids[1:], entries[1:], strict=True)]
    wanted = expected.gather(1, torch.tensor(ids[1:], device="cuda")[:, None])[:, 0]
    error = (torch.tensor(got, device="cuda") - wanted).abs()
    assert float(error.mean()) < 0.02
    assert float(error.max()) < 0.15


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    make_model("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def llm(small: Path) -> Iterator[LLM]:
    with engine(small) as running:
        yield running


def test_graphs_change_no_token(small: Path, llm: LLM) -> None:
    rng = random.Random(2)
    with engine(small, enforce_eager=True) as eager:
        for batch in (1, 2, 3, 8, 33):
            asked = [
                {"prompt_token_ids": rng.choices(range(1000), k=rng.randint(1, 90))}
                for _ in range(batch)
            ]
            expected = eager.generate(asked, GREEDY, use_tqdm=False)
            got = llm.generate(asked, GREEDY, use_tqdm=False)
            # Which prompts share a step is a matter of time, and so is how products are rounded.
            same = [
                a.outputs[0].token_ids == b.outputs[0].token_ids
                for a, b in zip(expected, got, strict=True)
            ]
            assert sum(same) >= 0.9 * batch


def test_prompts_of_a_large_budget_and_long_outputs(small: Path) -> None:
    """Long prompts, a step of many tokens and then graphs: a generation that once hung."""
    rng = random.Random(0)
    with engine(
        small, max_num_batched_tokens=16384, max_model_len=2048, num_gpu_blocks_override=4000
    ) as llm:
        for count in (1, 8, 64):
            asked = [
                {"prompt_token_ids": rng.choices(range(1000), k=rng.randint(100, 1024))}
                for _ in range(count)
            ]
            params = [
                SamplingParams(
                    temperature=0.6,
                    seed=number,
                    max_tokens=rng.randint(100, 400),
                    ignore_eos=True,
                    detokenize=False,
                )
                for number in range(count)
            ]
            outputs = llm.generate(asked, params, use_tqdm=False)
            for output, wanted in zip(outputs, params, strict=True):
                assert len(output.outputs[0].token_ids) == wanted.max_tokens


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"temperature": 0.7, "top_k": 5, "seed": 3},
    {"temperature": 1.5, "min_p": 0.1, "seed": 4},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0, "logit_bias": {7: 100.0}},
    {"temperature": 1.0, "allowed_token_ids": [3, 5, 9], "seed": 5},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 1.0, "min_tokens": 20, "stop_token_ids": [1, 2, 3], "seed": 6},
    {"temperature": 1.0, "n": 3, "seed": 7},
    {"temperature": 0},
]


def test_all_options_in_one_batch(llm: LLM) -> None:
    params = [
        SamplingParams(
            **{"max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False, **options}
        )
        for options in OPTIONS
    ]
    first = llm.generate(prompts(), params, use_tqdm=False)
    assert all(len(choice.token_ids) == NUM_TOKENS for out in first for choice in out.outputs)
    assert set(first[6].outputs[0].token_ids) == {7}
    assert set(first[7].outputs[0].token_ids) <= {3, 5, 9}
    assert len({tuple(choice.token_ids) for choice in first[10].outputs}) == 3
    entries = first[8].outputs[0].logprobs
    assert entries is not None
    assert len(entries) == NUM_TOKENS
    for token, entry in zip(first[8].outputs[0].token_ids, entries, strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 5


def test_a_seed_gives_the_same_tokens_again(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
    )
    prompt = [prompts()[8]]
    first, second = (llm.generate(prompt, params, use_tqdm=False) for _ in range(2))
    assert first[0].outputs[0].token_ids == second[0].outputs[0].token_ids


def test_aborts_and_stops_leave_no_block(llm: LLM) -> None:
    """After many requests that end early the pool serves one that needs nearly all of it."""
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, detokenize=False)
    for _ in range(20):
        llm.generate(prompts(), params, use_tqdm=False)
    long = [{"prompt_token_ids": [5] * 900} for _ in range(20)]
    outputs = llm.generate(long, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 3 for output in outputs)
