"""More and fewer replicas while a server serves: nobody notices, whatever dies meanwhile."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import gone, serve, until
from tiny_model import make_tiny_model

from ringcast.frontend.cli.main import main

FAKE = ("--device", "fake", "--num-gpu-blocks-override", "128", "--load-format", "dummy")
SLOW = {"RINGCAST_FAKE_STEP_SECONDS": "0.02"}
NUM_STREAMS = 8
ALONE = ["client.0", "detokenizer.0", "scheduler.0", "tokenizer.0", "worker.0"]


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


def bodies_for(server, max_tokens=40):
    name = server.get("/v1/models")["data"][0]["id"]
    return [
        {"model": name, "prompt": f"prompt {i}", "max_tokens": max_tokens}
        for i in range(NUM_STREAMS)
    ]


def scale(server, replicas, **more):
    return server.post("/scale", {"replicas": replicas, **more})


def started(server, name):
    """The process of an actor that is new, if there is one yet."""
    actor = server.actors().get(name)
    return actor is not None and actor["state"] != "dead" and actor["pid"]


def all_answers(server, pool, bodies):
    asked = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
    return [answer.result(30)[1]["choices"][0]["text"] for answer in asked]


@pytest.mark.parametrize("transport", ["ring", pytest.param("zmq", marks=pytest.mark.slow)])
def test_more_and_fewer_replicas_under_load(model, transport):
    """Those that go have no time to end what they had, so it goes on elsewhere."""
    options = ("--transport", transport)
    with serve(model, *FAKE, *options, **SLOW) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        bodies, begun = bodies_for(server), set()
        before = server.pids()
        assert sorted(before) == ALONE
        for replicas in (0, 65):
            status, refused = scale(server, replicas)
            assert status == 400
            assert "replicas: expected `int`" in refused["error"]["message"]
        assert scale(server, 1)[0] == 200
        assert server.pids() == before
        growing = pool.submit(scale, server, 3)
        until(lambda: server.statistics()["supervisor.scaling_to"] == 3)
        status, refused = scale(server, 2)
        assert (status, refused["error"]["message"]) == (
            409,
            "a scale to --replicas 3 is under way",
        )
        expected = all_answers(server, pool, bodies)
        assert growing.result(30) == (
            200,
            {"replicas": 3, "message": "Scaled to 3 data parallel engines"},
        )
        now = server.pids()
        assert {name: now[name] for name in before} == before
        assert sorted({*now} - {*before}) == [
            *("coordinator.0", "scheduler.1", "scheduler.2", "worker.1", "worker.2")
        ]
        streams = [pool.submit(text_of, server, body, begun) for body in bodies]
        until(lambda: len(begun) == NUM_STREAMS)
        assert scale(server, 1, drain_timeout=0)[0] == 200
        assert [stream.result(30) for stream in streams] == expected
        assert server.statistics()["supervisor.replicas"] == 1
        until(lambda: server.statistics()["client.0.takeovers"] > 0)
        assert sorted(server.pids()) == sorted([*ALONE, "coordinator.0"])
        assert all(gone(pid) for name, pid in now.items() if name[-1] != "0")
        assert server.statistics()["client.0.poisoned"] == 0
        until(lambda: server.statistics()["scheduler.0.free_blocks"] == 127)


@pytest.mark.slow
def test_whatever_dies_meanwhile_the_topology_is_one_of_the_two(model, capsys):
    with serve(model, *FAKE, **SLOW) as server, ThreadPoolExecutor(NUM_STREAMS + 1) as pool:
        bodies, begun = bodies_for(server, 60), set()
        before = server.pids()
        expected = all_answers(server, pool, bodies)

        growing = pool.submit(scale, server, 2)
        os.kill(until(lambda: started(server, "worker.1")), signal.SIGKILL)
        status, answer = growing.result(30)
        assert status == 500
        assert "worker.1" in answer["error"]["message"]
        assert "SIGKILL" in answer["error"]["message"]
        assert "replicas, as before: 1" in answer["error"]["message"]
        assert server.pids() == before

        growing = pool.submit(main, ["scale", "--replicas", "2", "--url", server.url])
        until(lambda: started(server, "worker.1"))
        os.kill(before["tokenizer.0"], signal.SIGKILL)
        assert growing.result(30) == 0
        assert capsys.readouterr().out == "replicas: 2\n"
        until(server.all_ready, 20)
        assert server.actors()["tokenizer.0"]["restarts"] == 1

        streams = [pool.submit(text_of, server, body, begun) for body in bodies]
        until(lambda: len(begun) == NUM_STREAMS)
        shrinking = pool.submit(scale, server, 1, drain_timeout=20)
        until(lambda: server.statistics()["supervisor.scaling_to"] == 1)
        os.kill(server.pids()["worker.1"], signal.SIGKILL)
        assert shrinking.result(30)[0] == 200
        assert [stream.result(30) for stream in streams] == expected
        assert sorted(server.pids()) == sorted([*ALONE, "coordinator.0"])
        assert all_answers(server, pool, bodies) == expected


@pytest.mark.slow
def test_the_real_model_says_the_same_from_a_new_replica():
    options = ("--device", "cpu", "--deterministic", "--max-model-len", "512")
    with serve("smollm2-135m-instruct", *options, "--num-threads", "1") as server:
        bodies = [{**body, "temperature": 0} for body in bodies_for(server, 6)[:4]]
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            alone = all_answers(server, pool, bodies)
            assert scale(server, 2)[0] == 200
            assert all_answers(server, pool, bodies) == alone
            until(lambda: server.statistics().get("scheduler.1.generation_tokens", 0) > 0)
            assert scale(server, 1)[0] == 200
            assert all_answers(server, pool, bodies) == alone


def test_without_descriptors_for_more_replicas_there_are_as_many_as_before(model):
    """Whether they are missing for the channels or for the processes."""
    with serve(model, *FAKE) as server:
        supervisor = server.process.pid
        used, most = len(os.listdir(f"/proc/{supervisor}/fd")), 1 << 10
        for room in (10, 36):
            resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (used + room, most))
            status, answer = scale(server, 2)
            assert status == 500
            assert re.search("can't be .* replicas, as before: 1", answer["error"]["message"])
            assert len(os.listdir(f"/proc/{supervisor}/fd")) == used
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (most, most))
        assert scale(server, 2)[0] == 200
        assert server.post("/v1/completions", bodies_for(server)[0])[0] == 200
