"""What API servers count together: sums, places, deaths, and the lock between processes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ringcast.mq.config import build
from ringcast.mq.errors import ConfigError
from ringcast.mq.server_config import ServerConfig
from ringcast.mq.tallies import KEYS, METRIC_WORDS, QUESTIONS, REQUESTS, Shape, Tallies

TRIES = 5000
TAKER = f"""
import sys
from ringcast.mq.tallies import REQUESTS, Shape, Tallies
tallies = Tallies.attach(int(sys.argv[1]), Shape(4), int(sys.argv[2]))
print("there", flush=True)
sys.stdin.readline()
most = 0
for _ in range({TRIES}):
    with tallies.locked():
        if tallies.total(REQUESTS):
            continue
        tallies.add(REQUESTS, 1)
    most = max(most, tallies.total(REQUESTS))
    tallies.add(REQUESTS, -1)
print(most)
"""


@pytest.fixture
def owner():
    tallies = Tallies.create(Shape(3, num_keys=9, max_per_minute=2))
    yield tallies
    tallies.close()


def attach(owner: Tallies, server: int) -> Tallies:
    return Tallies.attach(owner.fd, Shape(3, 9, 2), server)


def test_rows_add_up_and_a_dead_servers_is_cleared(owner):
    servers = [attach(owner, i) for i in range(3)]
    for number, server in enumerate(servers, 1):
        server.add(REQUESTS, number)
        server.add(QUESTIONS, 10 * number)
        server.add(KEYS + 8, 100 * number)
    servers[1].add(REQUESTS, -1)
    for server in (owner, *servers):
        assert server.total(REQUESTS) == 5
        assert server.total(REQUESTS, QUESTIONS) == 65
        assert server.total(KEYS + 8) == 600
        assert server.total(KEYS + 7) == 0
    owner.clear(1)
    assert servers[0].total(REQUESTS, QUESTIONS) == 44
    assert servers[2].total(KEYS + 8) == 400


def test_the_places_of_a_minute_are_every_servers(owner):
    first, second = attach(owner, 0), attach(owner, 2)
    assert first.free_at(8) == 0.0
    first.begin(8, 61.0)
    second.begin(8, 62.0)
    assert (first.free_at(8), second.free_at(8)) == (61.0, 61.0)
    assert second.free_at(7) == 0.0
    second.begin(8, 63.0)
    assert first.free_at(8) == 62.0
    owner.clear(0)
    assert first.free_at(8) == 62.0


def test_metrics_add_up_and_outlive_their_server(owner):
    for server in range(3):
        attach(owner, server).metrics[[0, -1]] += server + 0.5
    owner.clear(2)
    sums = owner.metrics_of_all()
    assert sums.shape == (METRIC_WORDS,)
    assert sums[[0, 1, -1]].tolist() == [4.5, 0.0, 4.5]
    assert np.all(attach(owner, 2).metrics[[0, -1]] == 2.5)


def test_of_many_processes_that_want_the_one_place_one_has_it():
    owner = Tallies.create(Shape(4))
    command = [sys.executable, "-P", "-c", TAKER, str(owner.fd)]
    takers = [
        subprocess.Popen(
            [*command, str(server)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[owner.fd],
        )
        for server in range(4)
    ]
    try:
        for taker in takers:
            assert taker.stdout.readline() == "there\n"
        for taker in takers:
            taker.stdin.write("go\n")
            taker.stdin.flush()
        most = [int(taker.communicate(timeout=30)[0]) for taker in takers]
        assert max(most) == 1
        assert owner.total(REQUESTS) == 0
    finally:
        for taker in takers:
            taker.kill()
            taker.wait()
            taker.stdin.close()
            taker.stdout.close()
        owner.close()


def test_the_shape_is_of_the_servers_options():
    options = {"api_server_count": 3, "api_key": ["a", "b"], "max_requests_per_minute_per_key": 7}
    assert Shape.of(build(ServerConfig, options)) == Shape(3, 2, 7)
    for count in (0, 65):
        with pytest.raises(ConfigError, match=f"api_server_count = {count}"):
            build(ServerConfig, {"api_server_count": count})
