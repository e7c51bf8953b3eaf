"""Several API servers at one port: who gets connections, what they share, what a death costs."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from operator import le
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import command, gone, serve, until
from tiny_model import make_tiny_model

from ringcast.frontend.cli.main import main

FAKE = (
    *("--device", "fake", "--num-gpu-blocks-override", "512", "--load-format", "dummy"),
    "--disable-access-log",
)
SHORT = {"prompt": "abcdefgh", "max_tokens": 4, "ignore_eos": True}
ENDLESS = {"prompt": "abcdefgh", "max_tokens": 200, "ignore_eos": True, "stream": True}
MOST, MOST_OF_A_KEY, MOST_IN_A_MINUTE = 8, 5, 20


class Asked:
    """A request on a connection of its own, of which the status has been read."""

    def __init__(self, url: str, method: str, path: str, body: dict | None, key: str) -> None:
        where = urlsplit(url)
        self._connection = HTTPConnection(where.hostname, where.port, timeout=30)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, data, headers)
        self._answer = self._connection.getresponse()
        self.status = self._answer.status

    def read(self) -> str:
        """All of it; of an answer that breaks off, what there is."""
        said = b""
        try:
            while some := self._answer.read1():
                said += some
        except (OSError, HTTPException):
            pass
        finally:
            self.close()
        return said.decode()

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def ask(server, path: str, body: dict | None = None, key: str = "a") -> Asked:
    return Asked(server.url, "GET" if body is None else "POST", path, body, key)


def status_of(server, path: str, body: dict | None = None, key: str = "a") -> int:
    asked = ask(server, path, body, key)
    asked.close()
    return asked.status


def get(server, path: str) -> dict:
    return json.loads(ask(server, path).read())


def statistics(server, name: str) -> list[float]:
    """By API server, what it has published under a name."""
    values = get(server, "/status")["statistics"]
    return [v for key, v in sorted(values.items()) if key.startswith("client.") and name in key]


def at_a_time(number: int, work, items: list) -> list:
    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(work, items))


def scrape(server) -> Counter[str]:
    """The samples' values, by name, and by name with a bucket's end or a reason."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(ask(server, "/metrics").read()):
        for sample in family.samples:
            for label in ("le", "finished_reason"):
                if label in sample.labels:
                    found[f"{sample.name} {sample.labels[label]}"] += sample.value
            found[sample.name] += sample.value
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def four(model):
    """Four of them, with limits that are tried with one key after the other."""
    with serve(
        *(model, *FAKE, "--api-server-count", "4", "--api-key", *"abcde"),
        *("--max-num-queued-reqs", str(MOST), "--max-concurrency-per-key", str(MOST_OF_A_KEY)),
        *("--max-requests-per-minute-per-key", str(MOST_IN_A_MINUTE)),
        RINGCAST_FAKE_STEP_SECONDS="0.05",
    ) as server:
        yield server


def test_limits_are_those_of_all_together(four):
    """Requests that stay are asked for until no place is left; then they leave."""

    def stay(key: str) -> list[Asked]:
        return at_a_time(16, lambda _: ask(four, "/v1/completions", ENDLESS, key), range(16))

    first = stay("a")
    assert Counter(asked.status for asked in first) == {200: MOST_OF_A_KEY, 429: 11}
    second = stay("b")
    statuses = Counter(asked.status for asked in second)
    assert statuses[200] == MOST - MOST_OF_A_KEY
    assert statuses.keys() <= {200, 429, 503}
    assert get(four, "/load") == {"server_load": MOST}
    until(lambda: sum(statistics(four, ".open")) == MOST)
    assert MOST not in statistics(four, ".open")  # or it says nothing of several
    for asked in (*first, *second):
        asked.close()
    until(lambda: get(four, "/load") == {"server_load": 0})
    again = stay("a")
    assert Counter(asked.status for asked in again)[200] == MOST_OF_A_KEY
    for asked in again:
        asked.close()


def test_a_minute_is_that_of_all_together(four):
    statuses = at_a_time(
        MOST_OF_A_KEY,
        lambda _: status_of(four, "/tokenize", {"prompt": "abc"}, "c"),
        range(2 * MOST_IN_A_MINUTE),
    )
    assert Counter(statuses) == {200: MOST_IN_A_MINUTE, 429: MOST_IN_A_MINUTE}


def test_connections_are_spread(four):
    pids = [actor["pid"] for actor in clients(four)]
    before = [num_descriptors(pid) for pid in pids]
    asked = at_a_time(8, lambda _: ask(four, "/version"), range(200))
    try:
        now = [num_descriptors(pid) for pid in pids]
        assert all(more > less for more, less in zip(now, before, strict=True)), (before, now)
    finally:
        for one in asked:
            one.close()


def test_one_scrape_says_what_all_have_counted(four):
    """Of requests that no other test makes: those for three choices."""
    name = "ringcast:request_params_n_bucket"

    def said(one: Counter[str]) -> tuple[float, ...]:
        done = one["ringcast:request_success_total length"]
        return done, one[f"{name} 5.0"] - one[f"{name} 2.0"]

    body = {**SHORT, "n": 3}
    answers = at_a_time(
        MOST_OF_A_KEY,
        lambda _: ask(four, "/v1/completions", body, "d").read(),
        range(MOST_IN_A_MINUTE),
    )
    assert {len(json.loads(answer)["choices"]) for answer in answers} == {3}
    number = len(answers)
    # Of several, if not of all, and each says the same.
    until(lambda: {said(scrape(four)) for _ in range(12)} == {(3 * number, number)})


def test_whichever_is_asked_it_is_done_for_all(four):
    for _ in range(8):
        assert status_of(four, "/reset_prefix_cache", {}, "e") == 200
        assert status_of(four, "/ready") == 200
        assert len(clients(four)) == 4
    until(lambda: get(four, "/status")["statistics"]["scheduler.0.free_blocks"] == 511)


def clients(server) -> list[dict]:
    return [a for a in get(server, "/status")["actors"] if a["name"].startswith("client.")]


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_death_ends_its_own_connections_and_no_other(model):
    options = ("-dp", "2", "--api-server-count", "2")
    with serve(model, *FAKE, *options, RINGCAST_FAKE_STEP_SECONDS="0.02") as server:
        assert ask(server, "/v1/completions", SHORT).read()
        until(lambda: scrape(server)["ringcast:request_success_total"] == 1)
        pids = server.pids()
        both = [pids["client.0"], pids["client.1"]]
        before = [num_descriptors(pid) for pid in both]
        streams: list[Asked] = []
        while len(streams) < 12 or any(map(le, map(num_descriptors, both), before)):
            streams.append(ask(server, "/v1/completions", ENDLESS))
            assert len(streams) < 100
        assert get(server, "/load") == {"server_load": len(streams)}
        os.kill(pids["client.1"], signal.SIGKILL)
        texts = at_a_time(len(streams), Asked.read, streams)
        ended = [text.endswith("data: [DONE]\n\n") for text in texts]
        assert 0 < sum(ended) < len(streams)
        whole = {text_of(text) for text, done in zip(texts, ended, strict=True) if done}
        assert len(whole) == 1
        until(lambda: gone(pids["client.1"]) and server.all_ready(), 20)
        now = server.pids()
        assert {name for name in pids if now[name] != pids[name]} == {"client.1"}
        assert get(server, "/load") == {"server_load": 0}
        assert scrape(server)["ringcast:request_success_total"] >= 1 + sum(ended)
        # It accepts again, and counts on.
        until(
            lambda: ask(server, "/v1/completions", SHORT).read() and served_by(server, "client.1")
        )
        for engine in range(2):
            until(lambda e=engine: server.statistics()[f"scheduler.{e}.free_blocks"] == 511)


def served_by(server, name: str) -> bool:
    return server.statistics().get(f"{name}.requests", 0) > 0


def text_of(events: str) -> str:
    said = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in said)


def test_the_port_of_several_is_no_one_elses(model, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = command(model, *FAKE, "--api-server-count", "2")[1:]
        arguments[arguments.index("--port") + 1] = port
        assert main(arguments) == 2
    assert f"port = {port}: taken" in capfd.readouterr().err


def test_a_headless_host_has_none(model, capfd):
    options = ("-dp", "2", "-dpl", "1", "--headless", "--api-server-count", "2")
    assert main(command(model, *FAKE, *options)[1:]) == 2
    assert "api_server_count = 2: a headless host serves no HTTP" in capfd.readouterr().err
