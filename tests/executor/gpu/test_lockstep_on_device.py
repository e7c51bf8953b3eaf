"""Two replicas that share experts, each on a device of its own, or both on one where there is only
one: in graphs and eagerly, the tokens that each has alone. And what needs two devices: long
exchanges, and an engine through its front door. Replicas are processes of their own.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import msgspec
import pytest
from executor.gpu.conftest import make_model, random_tokens
from executor.gpu.one_replica import make_order, run_replicas
from executor.gpu.test_parallel_on_device import workers

from ringcast import LLM, SamplingParams
from ringcast.executor.gpu.runner import GpuModelRunner

pytestmark = pytest.mark.gpu
LIMIT = 70  # seconds for replicas, of which a start takes most
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 400,
}
LENGTHS = [[70, 3, 17], [9, 1, 1, 40]]


@pytest.mark.parametrize(
    ("name", "eager"),
    [("mixtral", False), ("mixtral", True), ("qwen3 experts of 4", False)],
)
def test_each_has_the_tokens_that_it_has_alone(name, eager, specs):
    """With dummy steps before and behind, prompts beside decoding, and one alone."""
    order = make_order(specs[name], OPTIONS | {"enforce_eager": eager}, LENGTHS, num_tokens=12)
    answers = run_replicas(order, LIMIT)
    assert [answer.compiled for answer in answers] == [[], []]
    for engine, answer in enumerate(answers):
        want = order.alone(GpuModelRunner, engine, device="cuda", enforce_eager=eager)
        same = sum(a == b for a, b in zip(answer.tokens, want, strict=True))
        assert same >= len(want) - 1, (engine, answer.tokens, want)  # one may part at a tie
        assert (answer.details["graphs"] == 0) == eager


@pytest.mark.two_devices
def test_long_exchanges_are_nccls(tmp_path):
    """Steps of more tokens than are exchanged through peers' memory."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "head_dim": 64}
    spec = make_model(tmp_path / "wide", "mixtral", num_key_value_heads=4, **sizes)
    spec = msgspec.structs.replace(spec, max_model_len=4096)
    options = OPTIONS | {"max_num_batched_tokens": 4096, "num_gpu_blocks_override": 1200}
    order = make_order(spec, options, [[3000], [5, 2000]], num_tokens=6)
    order = msgspec.structs.replace(order, chunk=3000)
    for engine, answer in enumerate(run_replicas(order, LIMIT)):
        want = order.alone(GpuModelRunner, engine, device="cuda")
        same = sum(a == b for a, b in zip(answer.tokens, want, strict=True))
        assert same >= len(want) - 1, (engine, answer.tokens, want)


def llm(folder: str, **options: Any) -> LLM:
    return LLM(
        folder,
        device="cuda",
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
        step_timeout=30,
        startup_timeout=LIMIT,
        **options,
    )


def tokens_of(one: LLM, num_tokens: int) -> list[list[int]]:
    prompts = [{"prompt_token_ids": random_tokens(i, 5 + 9 * i)} for i in range(8)]
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    outputs = one.generate(prompts, [params] * len(prompts), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.two_devices
@pytest.mark.parametrize(
    "shares", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["dp", "tp"]
)
def test_an_engine_whose_experts_are_dealt(shares, tmp_path):
    """The texts of one device, again after all were idle, and once a worker has died."""
    sizes = {"max_position_embeddings": 512, "vocab_size": 512, "hidden_size": 64}
    make_model(tmp_path / "model", "mixtral", **sizes)
    folder = str(tmp_path / "model")
    with llm(folder) as one:
        want = tokens_of(one, 40)

    def check(got: list[list[int]]) -> None:
        assert sum(a == b for a, b in zip(got, want, strict=True)) >= len(want) - 1

    with llm(folder, enable_expert_parallel=True, **shares) as two:
        check(tokens_of(two, 40))
        check(tokens_of(two, 40))
        pids = workers()
        assert len(pids) == 2, pids
        os.kill(pids[1], signal.SIGKILL)
        end = time.monotonic() + LIMIT
        while True:  # until the unit is there again, requests may fail
            try:
                again = tokens_of(two, 40)
                break
            except Exception:
                if time.monotonic() > end:
                    raise
        check(again)
