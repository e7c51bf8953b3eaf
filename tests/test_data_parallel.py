"""Several replicas, in processes of their own: the right answers, whatever dies."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import gone, serve, until
from tiny_model import make_tiny_model

from ringcast import LLM, SamplingParams
from ringcast.executor.fake_runner import expected_tokens
from ringcast.frontend.hub import resolve_model
from ringcast.mq.config import EngineConfig
from ringcast.mq.errors import ConfigError

FAKE = ("--device", "fake", "--num-gpu-blocks-override", "128", "--load-format", "dummy")
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def text_of(server, body, begun):
    """What a stream says in all; `begun` is told when it has said something."""
    text = ""
    for event in server.stream("/v1/completions", body):
        if event != "[DONE]":
            text += json.loads(event)["choices"][0]["text"]
            begun.add(body["prompt"])
    assert event == "[DONE]"
    return text


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_death_of_a_replica_costs_nothing(model, stages):
    """Its own requests go on at the other, and the other's don't even begin again."""
    sizes = ("-dp", "2", "-pp", str(stages))
    workers, dies = [f"worker.{i}" for i in range(2 * stages)], f"worker.{stages - 1}"
    with serve(model, *FAKE, *sizes, RINGCAST_FAKE_STEP_SECONDS="0.02") as server:
        name = server.get("/v1/models")["data"][0]["id"]
        bodies = [
            {"model": name, "prompt": f"prompt {i}", "max_tokens": 40} for i in range(NUM_STREAMS)
        ]
        pids, begun = server.pids(), set()
        assert sorted(pids) == [
            *("client.0", "coordinator.0", "detokenizer.0", "scheduler.0", "scheduler.1"),
            *("tokenizer.0", *workers),
        ]
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(text_of, server, body, begun) for body in bodies]
            until(lambda: len(begun) == NUM_STREAMS)
            os.kill(pids[dies], signal.SIGKILL)
            texts = [stream.result(30) for stream in streams]
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            asked = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
            undisturbed = [answer.result(30)[1] for answer in asked]
        assert texts == [answer["choices"][0]["text"] for answer in undisturbed]
        until(lambda: 0 < server.statistics()["client.0.takeovers"] < NUM_STREAMS)
        until(server.all_ready, 20)
        now = server.pids()
        unit = {*workers[:stages], "scheduler.0"}
        assert {name for name in pids if now[name] != pids[name]} == unit
        assert gone(pids[dies])
        until(lambda: server.statistics()["scheduler.0.free_blocks"] == 127)


@pytest.mark.parametrize("transport", ["ring", pytest.param("zmq", marks=pytest.mark.slow)])
def test_every_replica_works_and_a_lost_coordinator_is_not_missed(model, transport):
    options = {"device": "fake", "load_format": "dummy", "transport": transport}
    spec = resolve_model(EngineConfig(model=str(model), load_format="dummy"))
    prompts = [{"prompt_token_ids": [number + 1] * 5} for number in range(12)]
    params = SamplingParams(max_tokens=20)
    with LLM(str(model), **options, data_parallel_size=3, data_parallel_routing="prefix") as llm:
        (victim,) = [a for a in llm.status().actors if a.name == "coordinator.0"]
        for killed in (False, True):
            if killed:
                os.kill(victim.pid, signal.SIGKILL)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                want = expected_tokens(prompt["prompt_token_ids"], 0, 20, spec)
                assert list(output.outputs[0].token_ids) == want
        assert llm.reset_prefix_cache() is True

        def made():
            values = llm.status().statistics
            return [values.get(f"scheduler.{i}.generation_tokens", 0) for i in range(3)]

        until(lambda: sum(made()) == 2 * 12 * 20)
        assert min(made()) > 0
        restarts = {actor.name: actor.restarts for actor in llm.status().actors}
        assert [name for name, times in restarts.items() if times] == ["coordinator.0"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel_routing": "prefix"}, "needs data_parallel_size of 2 or more"),
        (
            {
                "data_parallel_routing": "prefix",
                "data_parallel_size": 2,
                "enable_prefix_caching": False,
            },
            "needs enable_prefix_caching",
        ),
        ({"data_parallel_size": 0}, "data_parallel_size = 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        LLM("m", **options)


@pytest.mark.slow
def test_the_real_model_says_the_same_from_two_replicas():
    texts = []
    prompts = [f"The number {n} is" for n in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12)
    for replicas in (1, 2):
        options = {"device": "cpu", "deterministic": True, "max_model_len": 512}
        with LLM(**options, data_parallel_size=replicas) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
