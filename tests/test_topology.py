"""The whole topology as real processes, with the fake device: what comes out, what stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from serving import Server, command, gone, serve, until
from tiny_model import make_tiny_model

from ringcast import LLM, SamplingParams
from ringcast.executor.fake_runner import expected_tokens
from ringcast.frontend.hub import resolve_model
from ringcast.mq.config import EngineConfig
from ringcast.mq.errors import ConfigError, EngineDeadError, InvalidRequestError

FAKE = ("--device", "fake", "--num-gpu-blocks-override", "64")
SLOW = {"RINGCAST_FAKE_STEP_SECONDS": "0.02"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def options(**more):
    return {"device": "fake", "load_format": "dummy", "num_gpu_blocks_override": 64, **more}


def free_blocks(server: Server) -> float:
    return server.statistics().get("scheduler.0.free_blocks", -1)


def test_llm_gives_each_prompt_its_tokens(model):
    prompts = [{"prompt_token_ids": [number + 1] * (number + 1)} for number in range(20)]
    spec = resolve_model(EngineConfig(model=str(model), load_format="dummy"))
    with LLM(str(model), **options()) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            want = expected_tokens(prompt["prompt_token_ids"], 0, 12, spec)
            assert list(output.outputs[0].token_ids) == want
            assert output.outputs[0].finish_reason == "length"


def test_llm_over_zeromq(model):
    with LLM(str(model), **options(transport="zmq")) as llm:
        output = llm.generate("hello", SamplingParams(max_tokens=5, n=3), use_tqdm=False)[0]
        assert [len(choice.token_ids) for choice in output.outputs] == [5, 5, 5]


def test_a_bad_prompt_costs_nobody_else_anything(model):
    with LLM(str(model), **options()) as llm:
        with pytest.raises(InvalidRequestError, match="512"):
            llm.generate(["x" * 600], SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.generate("fine", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_llm_says_why_an_engine_died_that_is_not_to_be_restarted(model):
    with LLM(str(model), **options(max_restarts=0)) as llm:
        worker = next(a for a in llm.status().actors if a.name == "worker.0")
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker\.0 .*SIGKILL"):
            llm.generate(["x"] * 1000, SamplingParams(max_tokens=100), use_tqdm=False)


def test_a_model_that_cannot_be_loaded_is_a_config_error(model):
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(model), **options(max_model_len=100_000))


def test_rings_that_there_is_no_room_for_are_a_config_error(model):
    with pytest.raises(ConfigError, match=r"ring_bytes: .* of shared memory were asked for"):
        LLM(str(model), **options(ring_bytes=1 << 45))


def test_the_dead_have_no_status(model):
    with LLM(str(model), **options()) as llm:
        os.kill(llm._engine._connection._process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"the supervisor .* died"):
            until(lambda: llm.status() is None)


def test_completions_stream_and_not(model):
    with serve(model, *FAKE, "--load-format", "dummy", "--disable-access-log") as server:
        name = server.get("/v1/models")["data"][0]["id"]
        body = {"model": name, "prompt": "abc", "max_tokens": 8, "seed": 1}
        status, answer = server.post("/v1/completions", body)
        assert status == 200
        assert answer["usage"] == {**answer["usage"], "prompt_tokens": 3, "completion_tokens": 8}
        events = list(server.stream("/v1/completions", body))
        assert events[-1] == "[DONE]"
        text = "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1])
        assert text == answer["choices"][0]["text"]
        assert server.end() == (
            0,
            "ending: running requests have 30 s (again Ctrl-C ends at once)\n",
        )


def test_every_script_and_emoji_streams_byte_for_byte(model):
    texts = (
        "Zażółć gęślą jaźń · Ωμέγα · Привет, мир · שלום עולם · مرحبا بالعالم · नमस्ते दुनिया",
        "สวัสดีชาวโลก · 你好,世界 · こんにちは世界 · 안녕하세요 · 𝔘𝔫𝔦",
        '👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇵🇱 · e\u0301 · \u200b\ufeff · \x00\t\r\n"\\ · \U0010ffff',
    )
    with serve(model, *FAKE, "--load-format", "dummy", RINGCAST_FAKE_ECHO="1") as server:
        name = server.get("/v1/models")["data"][0]["id"]
        for text in texts:
            size = len(text.encode())  # the tiny model's tokens are bytes
            body = {"model": name, "prompt": text, "max_tokens": size}
            events = list(server.stream("/v1/completions", body))
            pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
            assert len(pieces) > 1  # those that come while another is sent go together
            assert "".join(pieces).encode() == text.encode()
            assert server.post("/v1/completions", body)[1]["choices"][0]["text"] == text


def test_a_client_that_leaves_frees_its_blocks(model):
    with serve(model, *FAKE, "--load-format", "dummy", **SLOW) as server:
        name = server.get("/v1/models")["data"][0]["id"]
        all_free = until(lambda: free_blocks(server) > 0 and free_blocks(server))
        stream = server.stream(
            "/v1/completions", {"model": name, "prompt": "a" * 40, "max_tokens": 400}
        )
        assert next(stream)
        until(lambda: free_blocks(server) < all_free)
        stream.close()
        until(lambda: free_blocks(server) == all_free)
        assert server.statistics()["scheduler.0.running"] == 0


def test_sigterm_lets_running_requests_end(model):
    with serve(model, *FAKE, "--load-format", "dummy", **SLOW) as server:
        name = server.get("/v1/models")["data"][0]["id"]
        stream = server.stream("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 50})
        first = next(stream)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.post("/v1/completions", {"model": name, "prompt": "b"})[0] == 503)
        events = [first, *stream]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait()[0] == 0


def test_nothing_survives_the_supervisor(model):
    with serve(model, *FAKE, "--load-format", "dummy") as server:
        pids = server.pids()
        server.process.kill()
        until(lambda: all(gone(pid) for pid in pids.values()))


def test_nothing_survives_the_process_of_an_llm(model):
    script = (
        "import sys, time\n"
        "from ringcast import LLM\n"
        f"llm = LLM({str(model)!r}, device='fake', load_format='dummy')\n"
        "print(*[actor.pid for actor in llm.status().actors], flush=True)\n"
        "time.sleep(60)\n"
    )
    maker = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE)
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 4
    maker.kill()
    maker.wait()
    maker.stdout.close()
    until(lambda: all(gone(pid) for pid in pids))


def test_a_taken_port_is_said_at_once(model):
    with serve(model, *FAKE, "--load-format", "dummy") as server:
        port = server.url.rpartition(":")[2]
        start = time.monotonic()
        other = [*command(model, *FAKE, "--load-format", "dummy"), "--port", port]
        second = subprocess.run(other, stderr=subprocess.PIPE, text=True, timeout=20)
        assert second.returncode == 2
        assert f"port = {port}: taken" in second.stderr
        assert "Traceback" not in second.stderr
        assert time.monotonic() - start < 10
        assert server.get("/v1/models")["data"]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "ringcast" in name}


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_starts_and_stops_leave_nothing(model, times):
    before, all_pids = shared_memory(), []
    for number in range(times):
        with serve(model, *FAKE, "--load-format", "dummy") as server:
            all_pids += server.pids().values()
            status, _ = server.end(signal.SIGTERM if number % 2 else signal.SIGINT)
            assert status == 0
    assert all(gone(pid) for pid in all_pids)
    assert shared_memory() == before
