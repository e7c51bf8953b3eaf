"""Pipeline parallelism over processes: the same tokens as from one stage, however they are made."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import random_models
from in_process import InProcessEngine, tiny_engine
from random_models import (
    MODELS,
    SMALL,
    Models,
    assert_same,
    prompt_logprobs,
    run_greedy,
    run_seeded,
)
from ranks import Ranks
from serving import serve
from tiny_model import make_tiny_model

from ringcast import SamplingParams
from ringcast.mq.config import EngineConfig, build

# (ranks of a stage, stages). All models have three layers.
SHAPES = ((1, 2), (1, 3), (2, 2), (2, 3))
FAST = [("llama tied", (1, 2)), ("mistral", (1, 2)), ("gemma3", (1, 3)), ("qwen3", (2, 2))]
SLOW = [(name, shape) for name in MODELS for shape in SHAPES if (name, shape) not in FAST]
CASES = FAST + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


def sizes(shape):
    return {"tensor_parallel_size": shape[0], "pipeline_parallel_size": shape[1]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    with Ranks(6) as ranks:
        yield Models(tmp_path_factory.mktemp("models"), ranks)


@pytest.fixture(scope="module")
def prompts():
    return random_models.prompts()


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_the_same_tokens(models, prompts, name, shape):
    one, greedy, seeded = models.reference(name)
    several = models.engine(name, **sizes(shape))
    assert_same(one, run_greedy(several, prompts), greedy)
    assert run_seeded(several, prompts) == seeded
    for i in range(len(prompts)):
        assert prompt_logprobs(several, i) == pytest.approx(prompt_logprobs(one, i), abs=1e-4)
    statistics = several.scheduler.statistics()
    assert statistics["chunked_prefills"] > 2
    assert statistics["prefix_cache_hits"] > 0
    assert statistics["forks"] > 0
    assert statistics["overshoot_tokens"] == 0
    several.scheduler.check()


@pytest.mark.parametrize(
    ("name", "shape", "by_expert"),
    [
        ("qwen3 experts", (1, 2), False),
        ("qwen3 experts", (1, 3), False),  # the second stage's only layer is the dense one
        ("mixtral", (1, 2), False),
        pytest.param("qwen3 experts", (2, 2), True, marks=pytest.mark.slow),
        pytest.param("mixtral", (2, 2), False, marks=pytest.mark.slow),
    ],
)
def test_experts_in_stages(models, prompts, name, shape, by_expert):
    one, greedy, _ = models.reference(name)
    several = models.engine(name, **sizes(shape), enable_expert_parallel=by_expert)
    assert_same(one, run_greedy(several, prompts), greedy)
    for i in range(len(prompts)):
        assert prompt_logprobs(several, i) == pytest.approx(prompt_logprobs(one, i), abs=1e-4)
    several.scheduler.check()


@pytest.mark.parametrize("ahead", [1, 5])
def test_a_tight_pool_preempts(models, prompts, ahead):
    one, greedy, _ = models.reference("qwen3")
    options = {"num_gpu_blocks_override": 50, "max_steps_in_flight": ahead}
    several = models.engine("qwen3", pipeline_parallel_size=3, **options)
    assert_same(one, run_greedy(several, prompts), greedy)
    assert several.scheduler.statistics()["preemptions"] > 0
    several.scheduler.check()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["llama tied", "gemma3"])
def test_the_same_bits(models, prompts, name, options):
    """What goes from stage to stage is the residual stream as it is."""
    options = {**options, "deterministic": True}
    # Where kernels are compiled they don't round as where they are found in the cache: all that is
    # compared here finds them there.
    InProcessEngine(build(EngineConfig, {**SMALL, **options}), models.spec(name))
    one = models.engine(name, **options)
    alone = run_greedy(one, prompts)
    several = models.engine(name, pipeline_parallel_size=2, **options)
    assert alone == run_greedy(several, prompts)
    assert one.logprobs == several.logprobs
    for i in range(len(prompts)):
        assert (prompt_logprobs(one, i) == prompt_logprobs(several, i)).all()


def test_a_stage_has_its_own_weights_alone(models):
    """And as many blocks of its own layers as fit."""
    sizes, blocks = [], []
    for stages in (1, 3):
        options = {"pipeline_parallel_size": stages, "kv_cache_memory_bytes": 200_000}
        config = build(
            EngineConfig, {**SMALL, "num_gpu_blocks_override": None, "max_num_seqs": 64} | options
        )
        loaded = models.ranks.load(config, models.spec("qwen3")).loaded
        sizes.append(sum(details["weights_bytes"] for _, details in loaded))
        blocks.append([ready.num_blocks for ready, _ in loaded])
    assert sizes[0] == sizes[1]
    assert blocks[1] == [3 * blocks[0][0] + blocks[1][0] % 3] * 3


def test_more_stages_than_layers(models):
    config = build(EngineConfig, {**SMALL, "pipeline_parallel_size": 4})
    with pytest.raises(RuntimeError, match=r"has 3 layers, .* at most 3 is possible\n"):
        models.ranks.load(config, models.spec("qwen3"))


# Through the whole of it


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
ENGINE = {"deterministic": True, "max_num_batched_tokens": 48, "max_model_len": 256}
OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--load-format", "dummy", "--num-threads", "1"),
    *("--deterministic", "--max-num-batched-tokens", "48", "--max-model-len", "256"),
    *("--block-size", "4", "--num-gpu-blocks-override", "120"),
)


def read(server, name, prompt, on_event):
    """The tokens of a stream."""
    body = {"model": name, "prompt": prompt, "max_tokens": 60, "temperature": 0, "logprobs": 0}
    body |= {"ignore_eos": True, "return_tokens_as_token_ids": True}
    events = []
    for event in server.stream("/v1/completions", body):
        events.append(event)
        on_event(len(events))
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    return [int(token.removeprefix("token_id:")) for token in tokens]


@pytest.mark.parametrize(
    ("sizes", "dies"),
    [
        (("-pp", "2"), "worker.0"),
        pytest.param(("-pp", "2"), "worker.1", marks=pytest.mark.slow),
        pytest.param(("-pp", "2", "-tp", "2"), "worker.1", marks=pytest.mark.slow),
    ],
)
def test_a_stages_death_is_a_pause(model, sizes, dies):
    """Of streams that the stages serve at the same time, with nothing in step. No token is lost,
    repeated or another one.
    """
    prompts = [[5 + (i * number) % 90 for i in range(10 + 9 * number)] for number in range(6)]
    want = tiny_engine(model, **ENGINE).generate(prompts, PARAMS)
    assert [len(tokens) for tokens in want] == [60] * len(prompts)
    with serve(model, *OPTIONS, *sizes) as server, ThreadPoolExecutor(len(prompts)) as pool:
        pids = server.pids()
        name = server.get("/v1/models")["data"][0]["id"]

        def kill(count):
            if count == 15:
                os.kill(pids[dies], signal.SIGKILL)

        def run(on_event):
            """on_event: of the first stream."""
            ask = [on_event, *[lambda count: None] * (len(prompts) - 1)]
            streams = [
                pool.submit(read, server, name, prompt, each)
                for prompt, each in zip(prompts, ask, strict=True)
            ]
            return [stream.result() for stream in streams]

        if "-tp" in sizes:  # which adds up in another order
            want = run(lambda count: None)
        assert run(kill) == want
        assert f"{dies} (pid {pids[dies]}) died: signal SIGKILL; restarting" in server.said
        now = server.pids()
        unit = {name for name in pids if name.startswith(("worker.", "scheduler."))}
        assert len(unit) == (5 if "-tp" in sizes else 3)
        assert all((now[name] != pids[name]) == (name in unit) for name in pids)
        status, said = server.end()
    assert status == 0
    assert "Traceback" not in said
