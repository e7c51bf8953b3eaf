"""Tensor parallelism over processes: the same tokens as from one rank, however they are made."""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np
import pytest
import random_models
from random_models import (
    GREEDY,
    MIXTURES,
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

from ringcast import LLM
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import EngineDeadError

UNIT = ("worker.0", "worker.1", "scheduler.0")
BREAKS = """
from ringcast.executor.logits_processor import LogitsProcessor

class Breaks(LogitsProcessor):
    def __init__(self, *arguments):
        raise RuntimeError("no such luck")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    with Ranks(4) as ranks:
        yield Models(tmp_path_factory.mktemp("models"), ranks)


@pytest.fixture(scope="module")
def prompts():
    return random_models.prompts()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens(models, prompts, name, size):
    one, greedy, seeded = models.reference(name)
    several = models.engine(name, tensor_parallel_size=size)
    assert_same(one, run_greedy(several, prompts), greedy)
    assert run_seeded(several, prompts) == seeded
    for i in range(len(prompts)):
        assert prompt_logprobs(several, i) == pytest.approx(prompt_logprobs(one, i), abs=1e-4)
    statistics = several.scheduler.statistics()
    assert statistics["chunked_prefills"] > 2
    assert statistics["prefix_cache_hits"] > 0
    several.scheduler.check()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_split_and_dealt(models, prompts, name, size):
    one, greedy, _ = models.reference(name)
    for by_expert in (False, True):
        several = models.engine(name, tensor_parallel_size=size, enable_expert_parallel=by_expert)
        assert_same(one, run_greedy(several, prompts), greedy)
        for i in range(len(prompts)):
            assert prompt_logprobs(several, i) == pytest.approx(prompt_logprobs(one, i), abs=1e-4)
        several.scheduler.check()


def test_experts_of_a_dense_model(models):
    config = build(
        EngineConfig, {**SMALL, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    )
    with pytest.raises(RuntimeError, match="enable_expert_parallel = True: this model is dense"):
        models.ranks.load(config, models.spec("qwen3"))


def test_a_tight_pool_preempts(models, prompts):
    one, greedy, _ = models.reference("qwen3")
    several = models.engine("qwen3", tensor_parallel_size=2, num_gpu_blocks_override=50)
    assert_same(one, run_greedy(several, prompts), greedy)
    assert several.scheduler.statistics()["preemptions"] > 0
    several.scheduler.check()


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"dtype": "bfloat16"}, 0.1),
        ({"quantization": "int8"}, 0.02),
        ({"quantization": "int4"}, 0.5),
    ],
)
def test_in_other_precisions(models, prompts, options, tolerance):
    """Whose last digits differ: what is rounded is a part of a sum."""
    of_prompts = []
    for size in (1, 2):
        made = models.engine("qwen3", tensor_parallel_size=size, **options)
        run_greedy(made, prompts)
        of_prompts.append(np.concatenate([prompt_logprobs(made, i) for i in range(len(prompts))]))
    one, several = of_prompts
    assert not np.array_equal(one, several)
    assert np.abs(one - several).mean() < tolerance


@pytest.mark.slow
def test_deterministic_alone_and_together(models, prompts):
    """Bit by bit, where four ranks add up."""
    made = models.engine(
        "gemma3", tensor_parallel_size=4, deterministic=True, enable_prefix_caching=False
    )
    run_greedy(made, prompts)
    for i, prompt in enumerate(prompts):
        made.add("alone", prompt, GREEDY)
        made.run()
        assert made.logprobs.pop("alone") == made.logprobs[f"greedy {i}"]


def test_a_size_that_does_not_divide(models):
    config = build(EngineConfig, {**SMALL, "tensor_parallel_size": 3})
    with pytest.raises(RuntimeError, match="this model takes 1, 2, 4\n"):
        models.ranks.load(config, models.spec("qwen3"))


# Through the whole of it


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


OPTIONS = ("--device", "cpu", "--dtype", "float32", "--load-format", "dummy", "--num-threads", "1")


def read(server, body, on_event=lambda count: None):
    events = []
    for event in server.stream("/v1/completions", body):
        events.append(event)
        on_event(len(events))
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events[:-1]]


@pytest.mark.slow
def test_a_ranks_death_is_a_pause(model):
    """Of a stream, of which no token is lost or repeated."""
    with serve(model, *OPTIONS, "-tp", "2", "--max-num-seqs", "8") as server:
        pids = server.pids()
        assert {name for name in pids if "worker" in name} == {"worker.0", "worker.1"}
        name = server.get("/v1/models")["data"][0]["id"]
        body = {"model": name, "prompt": "a", "max_tokens": 400, "seed": 3, "logprobs": 0}
        want = read(server, body | {"ignore_eos": True})

        def kill(count):
            if count == 20:
                os.kill(pids["worker.1"], signal.SIGKILL)

        got = read(server, body | {"ignore_eos": True}, kill)
        tokens = [[token for c in run for token in c["logprobs"]["tokens"]] for run in (got, want)]
        assert tokens[0] == tokens[1]
        assert len(tokens[0]) == 400
        said = f"worker.1 (pid {pids['worker.1']}) died: signal SIGKILL; restarting worker.0 and"
        assert said in server.said
        now = server.pids()
        assert all((now[name] != pids[name]) == (name in UNIT) for name in pids)
        status, said = server.end()
    assert status == 0
    assert "Traceback" not in said


def test_a_rank_that_fails_at_load_is_reported(model, tmp_path, monkeypatch):
    """The other one waits for it, and isn't what is reported."""
    (tmp_path / "breaks.py").write_text(BREAKS)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{before}")
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"worker\.0 .*no such luck") as raised:
        LLM(
            str(model),
            device="cpu",
            load_format="dummy",
            tensor_parallel_size=2,
            logits_processors=["breaks:Breaks"],
        )
    assert "Traceback" in raised.value.traceback
    assert 'raise RuntimeError("no such luck")' in raised.value.traceback
    assert time.monotonic() - start < 30
