"""`--launcher ray` on a real Ray of several nodes, all on this host: `scripts/ray` runs it.

Real processes with the fake device. What a request gives is known from the first, undisturbed run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import command, gone, serve, until
from tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: scripts/ray"),
]
FAKE = ("--device", "fake", "--load-format", "dummy", "--num-gpu-blocks-override", "256")
SLOW = {"RINGCAST_FAKE_STEP_SECONDS": "0.02", "RAY_USAGE_STATS_ENABLED": "0"}
NUM_REQUESTS = 12
NUM_TOKENS = 200  # which take 4 s
OURS = ("ringcast.frontend.launch", "ringcast.actors.boot", "ringcast.frontend.cli", "ray::RayHost")


class Nodes:
    """Ray's head and two nodes of two CPUs each; see ray_nodes.py."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("ray_nodes.py"))
        self._process = subprocess.Popen(
            [sys.executable, program, "2", "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SLOW},
        )
        self.address = self._process.stdout.readline().strip()
        assert self.address, "no Ray"

    def do(self, what: str) -> None:
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().startswith(what)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def options(nodes: Nodes, *more: str) -> tuple[str, ...]:
    ray = ("--launcher", "ray", "--ray-address", nodes.address)
    return (*FAKE, *ray, "--served-model-name", "model", "--data-parallel-size", "2", *more)


class Load:
    """Requests that are under way at once."""

    def __init__(self, url: str) -> None:
        self.texts: dict[int, str] = {}
        self.errors: list[str] = []
        self._url = url
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(NUM_REQUESTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, i: int) -> None:
        body = {"model": "model", "prompt": f"prompt {i}", "max_tokens": NUM_TOKENS}
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + "/v1/completions", data, kind)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                self.texts[i] = json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            with error:
                self.errors.append(error.read().decode())
        except (OSError, ValueError, KeyError) as error:
            self.errors.append(str(error))

    def results(self) -> dict[int, str]:
        for thread in self._threads:
            thread.join(120)
        assert not self.errors, self.errors
        assert len(self.texts) == NUM_REQUESTS
        return self.texts


def ours() -> dict[int, str]:
    """Processes of ours on this host, but for this one's tests."""
    found = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and not gone(int(name)):
                words = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if any(our in words for our in OURS) and _of_this_python(int(name)):
                    found[int(name)] = words
    return found


def _of_this_python(pid: int) -> bool:
    """Other people's tests may run beside these."""
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    return f"RINGCAST_RAY_TEST={os.getpid()}".encode() in environ


@pytest.fixture(scope="module", autouse=True)
def marked():
    """What these tests start can be told by its environment, also what Ray starts for them."""
    os.environ["RINGCAST_RAY_TEST"] = str(os.getpid())
    yield
    del os.environ["RINGCAST_RAY_TEST"]


def sent_to(server, rank: int) -> float:
    edges = {edge["name"]: edge["records"] for edge in server.get("/status")["edges"]}
    return edges[f"tokenizer.0>scheduler.{rank}"]


def under_way(server) -> Load:
    """Requests, of which each replica has at least one."""
    before = [sent_to(server, rank) for rank in (0, 1)]
    load = Load(server.url)
    until(lambda: all(sent_to(server, rank) > before[rank] for rank in (0, 1)), 30)
    return load


def hosts() -> list[int]:
    return sorted(pid for pid, words in ours().items() if "launch.host_process" in words)


def driver() -> int:
    (pid,) = (pid for pid, words in ours().items() if "launch.ray_driver" in words)
    return pid


def fail(model: Path | str, *words: str, **how) -> tuple[int, str]:
    """The exit status of a server that doesn't become ready, and what it says."""
    done = subprocess.run(
        command(model, *words),
        env={**os.environ, **SLOW},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **how,
    )
    assert not ours()
    return done.returncode, done.stderr


def test_no_cluster_is_told(nodes, model):
    status, said = fail(
        model, *options(nodes, "--ray-address", "127.0.0.1:1", "--startup-timeout", "9")
    )
    assert status == 1
    assert "no answer from a Ray cluster at --ray-address 127.0.0.1:1 for 9 s" in said


def test_a_cluster_too_small_is_told_and_ends_the_start(nodes, model):
    threads = ("--device", "cpu", "--num-threads", "3", "--num-gpu-blocks-override", "64")
    status, said = fail(model, *options(nodes, *threads, "--startup-timeout", "8"))
    assert status == 1
    assert "ranks 0 and 1 wait for room on the Ray cluster: 3 CPU on one node, for each" in said
    assert "4 CPU, 0 GPU are free; none of them is large enough" in said
    assert "given up after 8 s (--startup-timeout)" in said


def test_what_a_host_finds_wrong_ends_the_start_with_its_words(nodes, model):
    """The model is where only the master sees it."""
    status, said = fail(
        f"/proc/self/cwd/{model.name}", *options(nodes), cwd=model.parent, stdin=subprocess.DEVNULL
    )
    assert status == 2, said
    assert "has ended with exit status 2" in said
    assert f"/proc/self/cwd/{model.name}" in said


@pytest.fixture(scope="module")
def server(nodes, model):
    with serve(model, *options(nodes), **SLOW) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server):
    return Load(server.url).results()


def test_all_replicas_are_on_nodes_of_ray(server, undisturbed):
    assert len(undisturbed) == NUM_REQUESTS
    assert all(undisturbed.values())
    names = set(server.actors())
    assert {"scheduler.0", "scheduler.1", "coordinator.0"} <= names
    assert not [name for name in names if name.startswith("worker")]
    assert all(sent_to(server, rank) for rank in (0, 1))
    assert len(hosts()) == 2


def test_the_secret_is_in_nobodys_command_line_environment_or_log(server, nodes):
    (secret,) = {
        secret
        for fd in Path(f"/proc/{server.process.pid}/fd").iterdir()
        if (secret := _secret_in(fd))
    }
    for pid in ours():
        for file in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{pid}/{file}").read_bytes()
    for log in Path("/tmp/ray/session_latest/logs").rglob("*"):
        assert not log.is_file() or secret not in log.read_bytes(), log


def _secret_in(fd: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        if "memfd:boot" in os.readlink(fd):
            return fd.read_bytes()
    return None


def test_a_lost_node_of_ray_costs_no_request_and_its_replica_moves(server, nodes, undisturbed):
    nodes.do("add 2")
    before = hosts()
    load = under_way(server)
    nodes.do("kill 0")
    assert load.results() == undisturbed
    until(lambda: "back after" in server.said, 120)
    until(server.all_ready, 30)
    assert "its node of Ray is lost" in server.said
    assert len(hosts()) == 2
    assert len(set(before) & set(hosts())) == 1
    assert under_way(server).results() == undisturbed


def test_a_killed_headless_host_is_started_again(server, undisturbed):
    times = server.said.count("back after")
    (victim, *_) = hosts()
    load = under_way(server)
    os.kill(victim, signal.SIGKILL)
    assert load.results() == undisturbed
    until(lambda: server.said.count("back after") > times, 120)
    assert "has ended with exit status -9" in server.said
    assert under_way(server).results() == undisturbed


def test_a_killed_launcher_is_started_again_with_all_it_had(server, undisturbed):
    times = server.said.count("back after")
    before, load = hosts(), under_way(server)
    os.kill(driver(), signal.SIGKILL)
    until(lambda: server.said.count("back after") >= times + 2, 180)
    assert load.results() == undisturbed, server.said
    until(server.all_ready, 30)
    assert "the launcher of replicas on Ray died: signal SIGKILL" in server.said
    assert not set(before) & set(hosts())
    assert under_way(server).results() == undisturbed


def test_at_the_end_nothing_stays(server):
    status, said = server.end(signal.SIGTERM, 60)
    assert status == 0, said
    until(lambda: not ours(), 20)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_of_a_killed_master_and_one_replica_may_be_its_own(nodes, model, number):
    """The second has room only because the first has given its own back."""
    with serve(model, *options(nodes, "--data-parallel-size-local", "1"), **SLOW) as server:
        names = set(server.actors())
        assert {"worker.0", "scheduler.0", "scheduler.1"} <= names
        assert len(hosts()) == 1
        assert len(Load(server.url).results()) == NUM_REQUESTS
        status, said = server.end(number, 60)
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 0), said
    until(lambda: not ours(), 30)
