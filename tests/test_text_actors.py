"""Two tokenizers and two detokenizers, in real processes: both work, and one's death is its own."""

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
TWO = ("--tokenizer-count", "2", "--detokenizer-count", "2")
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def texts_of(server, body, begun):
    """What a stream says in all, by choice; `begun` is told when it has said something."""
    texts = {}
    for event in server.stream("/v1/completions", body):
        if event != "[DONE]":
            choice = json.loads(event)["choices"][0]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            begun.add(body["prompt"])
    assert event == "[DONE]"
    return texts


@pytest.mark.parametrize(
    ("victim", "sizes"),
    [
        ("detokenizer.1", ()),
        pytest.param("detokenizer.0", ("-dp", "2"), marks=pytest.mark.slow),
        pytest.param("tokenizer.1", ("--transport", "zmq"), marks=pytest.mark.slow),
        pytest.param("tokenizer.0", ("--api-server-count", "2"), marks=pytest.mark.slow),
    ],
)
def test_a_death_under_load_concerns_its_own_requests_alone(model, victim, sizes):
    # Slow enough that none has ended when the last one has begun.
    with serve(model, *FAKE, *TWO, *sizes, RINGCAST_FAKE_STEP_SECONDS="0.06") as server:
        name = server.get("/v1/models")["data"][0]["id"]
        bodies = [
            {"model": name, "prompt": f"prompt {i}", "max_tokens": 40, "n": 1 + i % 2}
            for i in range(NUM_STREAMS)
        ]
        pids, begun = server.pids(), set()
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(texts_of, server, body, begun) for body in bodies]
            until(lambda: len(begun) == NUM_STREAMS)
            os.kill(pids[victim], signal.SIGKILL)
            texts = [stream.result(30) for stream in streams]
        until(server.all_ready, 20)
        now = server.pids()
        assert {other for other in pids if now[other] != pids[other]} == {victim}
        assert gone(pids[victim])
        clients = [name for name in pids if name.startswith("client.")]
        takeovers = sum(server.statistics()[f"{client}.takeovers"] for client in clients)
        if victim.startswith("detokenizer"):
            assert 0 < takeovers < NUM_STREAMS
        else:
            assert not takeovers  # all of them ran, and needed it no more
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            again = [pool.submit(texts_of, server, body, set()) for body in bodies]
            assert texts == [stream.result(30) for stream in again]
        for kind in ("tokenizer", "detokenizer"):
            until(lambda kind=kind: busy(server, kind) == 2)
        until(lambda: server.statistics()["scheduler.0.free_blocks"] == 127)


def busy(server, kind: str) -> int:
    """How many of a kind have had anything to do."""
    what = "requests" if kind == "tokenizer" else "chunks"
    values = server.statistics()
    return sum(values.get(f"{kind}.{i}.{what}", 0) > 0 for i in range(2))


@pytest.mark.slow
def test_an_llm_goes_by_all_of_them(model):
    options = {"device": "fake", "load_format": "dummy"}
    spec = resolve_model(EngineConfig(model=str(model), load_format="dummy"))
    prompts = [{"prompt_token_ids": [number + 1] * 5} for number in range(12)]
    with LLM(str(model), **options, tokenizer_count=3, detokenizer_count=2) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            want = expected_tokens(prompt["prompt_token_ids"], 0, 20, spec)
            assert list(output.outputs[0].token_ids) == want
        assert llm.reset_prefix_cache() is True
        until(
            lambda: all(
                llm.status().statistics.get(f"{name}", 0) > 0
                for name in (
                    *(f"tokenizer.{i}.requests" for i in range(3)),
                    *(f"detokenizer.{i}.chunks" for i in range(2)),
                )
            )
        )


@pytest.mark.parametrize("option", ["tokenizer_count", "detokenizer_count"])
@pytest.mark.parametrize("number", [0, 17])
def test_what_makes_no_sense_is_refused(option, number):
    with pytest.raises(ConfigError, match=f"{option} = {number}: "):
        LLM("m", **{option: number})
