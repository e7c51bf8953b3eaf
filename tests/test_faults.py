"""What a death costs: real processes with the fake device, killed while streams run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time

import pytest
from serving import Server, command, gone, serve, until
from tiny_model import make_tiny_model

from ringcast import LLM, SamplingParams
from ringcast.actors import topology
from ringcast.executor.fake_runner import expected_tokens
from ringcast.frontend.hub import resolve_model
from ringcast.mq.config import EngineConfig

FAKE = ("--device", "fake", "--num-gpu-blocks-override", "128", "--load-format", "dummy")
SLOW = {"RINGCAST_FAKE_STEP_SECONDS": "0.02"}
NUM_STREAMS = 8
UNITS = topology.units({})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model):
    with serve(model, *FAKE, **SLOW) as server:
        yield server


class Streams:
    """Several streaming completions at once, each read by a thread of its own."""

    def __init__(self, server: Server, max_tokens: int = 60) -> None:
        name = server.get("/v1/models")["data"][0]["id"]
        self.bodies = [
            {"model": name, "prompt": f"prompt {i}", "max_tokens": max_tokens, "n": 1 + i % 2}
            for i in range(NUM_STREAMS)
        ]
        self.events: list[list[str]] = [[] for _ in self.bodies]
        self.errors: list[Exception] = []
        self._server = server
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def _read(self, i: int) -> None:
        try:
            for event in self._server.stream("/v1/completions", self.bodies[i]):
                self.events[i].append(event)
        except (OSError, ValueError) as error:  # http.client's IncompleteRead is among these
            self.errors.append(error)

    def all_flow(self) -> bool:
        return all(len(events) > 5 for events in self.events)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def texts(self) -> list[dict[int, str]]:
        """Each request's texts, by choice; each ended as it should."""
        self.wait()
        assert not self.errors
        texts = []
        for body, events in zip(self.bodies, self.events, strict=True):
            assert events[-1] == "[DONE]", events[-1]
            text, reasons = {}, []
            for choice in (json.loads(event)["choices"][0] for event in events[:-1]):
                text[choice["index"]] = text.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"]:
                    reasons.append((choice["index"], choice["finish_reason"]))
            assert sorted(reasons) == [(i, "length") for i in range(body["n"])]
            texts.append(text)
        return texts


@pytest.fixture(scope="module")
def undisturbed(server):
    return Streams(server).texts()


def unit_of(victim):
    return next(actors for actors in UNITS.values() if victim in actors)


def assert_only_restarted(server, names, before, restarts):
    """Those have other processes and one restart more, and nobody else does."""
    until(server.all_ready, 20)
    for name, actor in server.actors().items():
        assert (actor["pid"] != before[name]) == (name in names), name
        assert actor["restarts"] == restarts[name] + (name in names), name
    assert all(gone(before[name]) for name in names)


def free_blocks(server: Server) -> float:
    return server.statistics().get("scheduler.0.free_blocks", -1)


@pytest.mark.parametrize("victim", ["worker.0", "scheduler.0", "tokenizer.0", "detokenizer.0"])
def test_streams_go_on_after_a_death(server, undisturbed, victim):
    pids = server.pids()
    restarts = {name: actor["restarts"] for name, actor in server.actors().items()}
    streams = Streams(server)
    until(streams.all_flow)
    os.kill(pids[victim], signal.SIGKILL)
    assert streams.texts() == undisturbed
    assert_only_restarted(server, unit_of(victim), pids, restarts)
    names = " and ".join(unit_of(victim))
    assert f"{victim} (pid {pids[victim]}) died: signal SIGKILL; restarting {names}" in server.said
    until(lambda: f"{names} back after" in server.said)
    until(lambda: free_blocks(server) == 127)


def test_an_api_servers_death_ends_its_own_connections_and_nothing_else(server, undisturbed):
    pids = server.pids()
    restarts = {name: actor["restarts"] for name, actor in server.actors().items()}
    streams = Streams(server)
    until(streams.all_flow)
    os.kill(pids["client.0"], signal.SIGKILL)
    streams.wait()
    assert not any(events[-1] == "[DONE]" for events in streams.events)
    assert_only_restarted(server, ["client.0"], pids, restarts)
    assert Streams(server).texts() == undisturbed
    until(lambda: free_blocks(server) == 127)  # of the dead one's requests, too


def test_two_deaths_at_once(server, undisturbed):
    pids = server.pids()
    restarts = {name: actor["restarts"] for name, actor in server.actors().items()}
    streams = Streams(server)
    until(streams.all_flow)
    for victim in ("tokenizer.0", "scheduler.0"):
        os.kill(pids[victim], signal.SIGKILL)
    assert streams.texts() == undisturbed
    lost = ("tokenizer.0", *unit_of("scheduler.0"))
    assert_only_restarted(server, lost, pids, restarts)


def segments(pid: int) -> set[str]:
    """The shared memory that a process has open."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if "ringcast" in target and "/shm" in target:
                found.add(target)
    return found


def sockets(pid: int) -> set[str]:
    links = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {link for link in links if link.startswith("socket:")}


def test_every_actor_holds_its_own_channels_and_no_others(server):
    until(server.all_ready)
    supervisor, pids = server.process.pid, server.pids()
    everything = segments(supervisor)
    channels = topology.channels({})
    assert len(everything) == len(channels)
    listener = sockets(supervisor) & sockets(pids["client.0"])
    assert len(listener) == 1
    for name, pid in pids.items():
        own = [c for c in channels if name in (c.writer, *c.readers)]
        assert len(segments(pid)) == len(own), name
        assert segments(pid) <= everything
        if name != "client.0":
            assert not sockets(pid) & sockets(supervisor)


def test_topologies_side_by_side_share_nothing(server, model, undisturbed):
    until(server.all_ready)
    ours = server.pids()
    streams = Streams(server)
    with serve(model, *FAKE, **SLOW) as other:
        theirs = other.pids()
        mine = segments(server.process.pid)
        for pid in (other.process.pid, *theirs.values()):
            assert not segments(pid) & mine
        os.kill(theirs["scheduler.0"], signal.SIGKILL)
        until(lambda: "back after" in other.said)
        other.process.kill()
    until(lambda: all(gone(pid) for pid in theirs.values()))
    assert streams.texts() == undisturbed
    assert server.pids() == ours


def test_a_worker_that_hangs_is_named_and_replaced(model):
    with serve(model, *FAKE, "--step-timeout", "2", **SLOW) as server:
        pids = server.pids()
        streams = Streams(server, max_tokens=40)
        until(streams.all_flow)
        start = time.monotonic()
        os.kill(pids["worker.0"], signal.SIGSTOP)
        until(lambda: "hangs" in server.said)
        assert time.monotonic() - start < 3.0  # named within 2 s, and then read by us
        said = server.said
        assert f"worker.0 (pid {pids['worker.0']}) hangs" in said
        assert "scheduler.0>workers: " in said
        streams.texts()
        assert gone(pids["worker.0"])


def test_restarts_go_on_while_the_server_drains(model):
    with serve(model, *FAKE, **SLOW) as server:
        pids = server.pids()
        streams = Streams(server)
        until(streams.all_flow)
        server.process.send_signal(signal.SIGTERM)
        os.kill(pids["worker.0"], signal.SIGKILL)
        streams.texts()
        assert server.wait()[0] == 0


def test_who_read_its_words_may_go(model):
    """A server whose stderr is a pipe without a reader goes on, and restarts what dies."""
    read, write = os.pipe()
    with open(read) as reader:
        process = subprocess.Popen(command(model, *FAKE), stderr=write)
        os.close(write)
        line = next(line for line in reader if "ready in" in line)
    try:
        process.stderr = ()  # for Server, which listens to it
        server = Server(process, re.search(r"http://[^/]+", line)[0])
        pids = server.pids()
        os.kill(pids["worker.0"], signal.SIGKILL)
        until(lambda: server.all_ready() and server.pids()["worker.0"] != pids["worker.0"], 20)
        assert server.end(signal.SIGTERM)[0] == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("victim", ["worker.0", "client.0"])
def test_without_restarts_any_death_ends_everything(model, victim):
    with serve(model, *FAKE, "--max-restarts", "0", **SLOW) as server:
        pids = server.pids()
        streams = Streams(server, max_tokens=400)
        until(streams.all_flow)
        os.kill(pids[victim], signal.SIGKILL)
        status, said = server.wait()
        streams.wait()
        assert status == 1
        assert f"{victim} (pid {pids[victim]}) died: signal SIGKILL" in said
        if victim != "client.0":
            assert all("died" in events[-1] for events in streams.events)
        assert all(gone(pid) for pid in pids.values())


@pytest.mark.parametrize("transport", ["ring", pytest.param("zmq", marks=pytest.mark.slow)])
def test_an_llm_goes_on_after_every_death(model, transport, monkeypatch):
    monkeypatch.setenv("RINGCAST_FAKE_STEP_SECONDS", "0.01")
    spec = resolve_model(EngineConfig(model=str(model), load_format="dummy"))
    prompts = [{"prompt_token_ids": [number + 1] * (number + 1)} for number in range(40)]
    options = {"device": "fake", "load_format": "dummy", "transport": transport}
    victims = ["worker.0", "tokenizer.0", "detokenizer.0"]
    with LLM(str(model), **options, max_num_seqs=8) as llm:
        pids = {actor.name: actor.pid for actor in llm.status().actors}

        def kill():
            for victim in victims:
                time.sleep(0.6)
                os.kill(pids[victim], signal.SIGKILL)

        killing = threading.Thread(target=kill)
        killing.start()
        outputs = llm.generate(prompts, SamplingParams(max_tokens=60), use_tqdm=False)
        killing.join()
        for prompt, output in zip(prompts, outputs, strict=True):
            want = expected_tokens(prompt["prompt_token_ids"], 0, 60, spec)
            assert list(output.outputs[0].token_ids) == want
        now = {actor.name: actor.restarts for actor in llm.status().actors}
        assert all(now[victim] == 1 for victim in victims)
