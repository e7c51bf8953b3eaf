"""Replicas that have the experts of a mixture between them, and step together for that."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import random_models
import torch
from in_process import InProcessEngine, Together, tiny_engine
from random_models import (
    GREEDY,
    SMALL,
    RandomWeights,
    assert_same,
    make_model,
    run_greedy,
)
from ranks import Ranks
from safetensors.torch import save_file
from serving import gone, serve, until
from simulation.reference import decode, encode
from tiny_model import make_tiny_model

from ringcast import SamplingParams
from ringcast.executor.cpu_decoder import CpuDecoder
from ringcast.executor.layers import Layout
from ringcast.executor.lockstep import check_places, check_rows
from ringcast.executor.models import find_model
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError

TOGETHER = {"enable_expert_parallel": True, "data_parallel_size": 2}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3 experts")


@pytest.fixture(scope="module")
def prompts():
    return random_models.prompts()


@pytest.fixture(scope="module")
def one(spec, prompts):
    engine = InProcessEngine(build(EngineConfig, SMALL), spec)
    return engine, run_greedy(engine, prompts)


def together(spec, ranks, **options):
    config = build(EngineConfig, {**SMALL, **TOGETHER, **options})
    return Together(config, spec, ranks.load(config, spec))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_steps_in_flight": 1},
        {"max_steps_in_flight": 3, "num_gpu_blocks_override": 50},
        pytest.param({"data_parallel_size": 4}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["two", "one step ahead", "tight", "four", "two of two"],
)
def test_the_same_tokens_as_one_engine(spec, ranks, prompts, one, options):
    """Dealt to replicas in turn: their prompts have other lengths, and end at other times."""
    replicas = together(spec, ranks, **options)
    engines = replicas.engines
    for i, prompt in enumerate(prompts):
        engines[i % len(engines)].add(f"greedy {i}", prompt, GREEDY)
    replicas.run()
    got = [engines[i % len(engines)].tokens[f"greedy {i}"][0] for i in range(len(prompts))]
    assert_same(one[0], got, one[1])
    for engine in engines:
        engine.scheduler.check()


def test_a_replica_without_work_steps_too(spec, ranks, prompts, one):
    replicas = together(spec, ranks)
    busy, idle = replicas.engines
    for turn in (1, 2):
        got = []
        for i, prompt in enumerate(prompts):
            busy.add(f"greedy {i}", prompt, GREEDY, incarnation=turn)
        replicas.run()
        got = [busy.tokens[f"greedy {i}"][0] for i in range(len(prompts))]
        assert_same(one[0], got, one[1])
        of_busy, of_idle = busy.scheduler.statistics(), idle.scheduler.statistics()
        assert of_busy["waves"] == of_idle["waves"] == turn
        assert of_busy["steps"] == of_idle["steps"] == of_idle["dummy_steps"]
        assert of_busy["dummy_steps"] < of_busy["steps"] / 4


def test_in_another_precision(spec, ranks, prompts):
    """Words of two numbers travel whole."""
    alone = InProcessEngine(build(EngineConfig, {**SMALL, "dtype": "bfloat16"}), spec)
    want = run_greedy(alone, prompts)
    replicas = together(spec, ranks, dtype="bfloat16")
    for i, prompt in enumerate(prompts):
        replicas.engines[i % 2].add(f"greedy {i}", prompt, GREEDY)
    replicas.run()
    got = [replicas.engines[i % 2].tokens[f"greedy {i}"][0] for i in range(len(prompts))]
    assert sum(a[0] == b[0] for a, b in zip(got, want, strict=True)) >= len(want) - 1


def test_who_comes_to_another_step_is_named():
    with pytest.raises(AssertionError, match="replica 1 is in step 4 of wave 2, after 9 meetings"):
        check_places(np.array([(9, 2, 3), (9, 2, 4)], np.int32))
    check_places(np.array([(9, 2, 3)] * 3, np.int32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel_size": 3}, "8 experts can't be dealt evenly to the 3 ranks"),
        ({"data_parallel_size": 1}, "it takes 2 or more, or data_parallel_size does"),
    ],
)
def test_what_cannot_be_dealt_is_refused(spec, ranks, options, words):
    with pytest.raises(RuntimeError, match=words):
        together(spec, ranks, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_devices_step_together_too(ranks):
    options = {"device": "cuda", "tensor_parallel_size": ranks, **TOGETHER}
    assert build(EngineConfig, options).lockstep


def test_rows_of_other_bytes_are_refused():
    """As hosts with processors of different kinds would have them."""
    with pytest.raises(ConfigError, match="replica 1 has rows of 64 numbers of 4 bytes; all must"):
        check_rows(np.array([(2, 64), (4, 64)], np.int32))
    check_rows(np.array([(2, 64)] * 3, np.int32))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_served_mixture(tmp_path_factory.mktemp("served"))


def make_served_mixture(folder):
    """A folder with a tokenizer and weights."""
    folder = make_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text()) | EXPERTS
    (folder / "config.json").write_text(json.dumps(config))
    weights = RandomWeights()
    declared = find_model("Qwen3MoeForCausalLM").check(config)
    CpuDecoder(declared, Layout(torch.float32), 4, weights, lambda *_: None)
    save_file(weights.tensors, folder / "model.safetensors")
    return folder


def text_of(server, body, begun):
    """What a stream says in all; `begun` is told when it has said something."""
    text = ""
    for event in server.stream("/v1/completions", body):
        if event != "[DONE]":
            text += json.loads(event)["choices"][0]["text"]
            begun.add(body["prompt"])
    assert event == "[DONE]"
    return text


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_replica", [1, 2], ids=["one", "two"])
def test_in_processes_whatever_dies(model, ranks_per_replica):
    """The texts of one engine, with all replicas at work or one; and when one's worker dies."""
    options = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--block-size", "4")
    several = ("-dp", "2", "-tp", str(ranks_per_replica), "--enable-expert-parallel")
    length = {"max_tokens": 450, "temperature": 0, "ignore_eos": True}
    prompts = [f"prompt {i}" for i in range(4)]
    alone = tiny_engine(model, load_format="auto", max_model_len=512)
    tokens = alone.generate([encode(prompt) for prompt in prompts], SamplingParams(**length))
    want = [decode(each, final=True) for each in tokens]
    with serve(model, *options, *several, "--num-gpu-blocks-override", "400") as server:
        name = server.get("/v1/models")["data"][0]["id"]
        bodies = [{"model": name, "prompt": prompt, **length} for prompt in prompts]
        assert text_of(server, bodies[0], set()) == want[0]

        def statistics(what):
            values = server.statistics()
            return [values.get(f"scheduler.{i}.{what}", 0) for i in range(2)]

        until(lambda: statistics("waves") == [1, 1] and max(statistics("dummy_steps")) >= 450)
        assert min(statistics("dummy_steps")) < 20
        pids, begun = server.pids(), set()
        with ThreadPoolExecutor(len(bodies)) as pool:
            streams = [pool.submit(text_of, server, body, begun) for body in bodies]
            until(lambda: len(begun) == len(bodies))
            os.kill(pids["worker.1"], signal.SIGKILL)
            assert [stream.result(60) for stream in streams] == want
        until(server.all_ready, 30)
        now = server.pids()
        changed = {name for name in pids if now[name] != pids[name]}
        assert changed == {name for name in pids if name.startswith(("worker", "scheduler"))}
        assert all(gone(pids[name]) for name in changed)
        assert text_of(server, bodies[1], set()) == want[1]
        until(lambda: server.statistics()["client.0.takeovers"] >= len(bodies) / 2)
