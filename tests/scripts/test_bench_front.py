"""The front benchmark's arithmetic, and its users' counting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        patch.syspath_prepend(str(SCRIPTS / "peers"))
        import bench_front
        import front_load

        yield bench_front, front_load
    for name in ("bench_front", "front_load", "figures"):
        sys.modules.pop(name, None)


@pytest.fixture
def bench(modules):
    return modules[0]


def test_two_waves_tell_a_token_from_a_request(bench):
    token, request = 7e-6, 200e-6
    short, long = (token * tokens + request for tokens in (8, 256))
    assert bench.shares(short, long, 8, 256) == pytest.approx((token, request))


@pytest.mark.parametrize(("count", "parts"), [(1, 2), (7, 3), (1024, 2)])
def test_streams_are_split_evenly(bench, count, parts):
    shares = bench.split(count, parts)
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


def test_a_report_has_each_actor_that_there_is(bench):
    cell = bench.Cell("http", 4, rates=[1000.0])
    cell.per_token = {"scheduler": [2.0], "client": [10.0, 12.0, 11.0]}
    cell.per_request = {"scheduler": [100.0], "client": [200.0]}
    cell.first, cell.gaps = [0.02], [0.001, 0.003]
    text = bench.report([cell])
    assert "| streams | tok/s | client, µs | scheduler, µs |" in text
    assert "| 4 | 1,000 | 11.0 (10.0 to 12.0) | 2.0 (2.0 to 2.0) | 1.00 / 3.00 | 20.0 |" in text


def test_room_for_all_streams_unless_said_otherwise(bench):
    import argparse

    args = argparse.Namespace(words=64, tokens=256, option=["max_num_seqs=8"])
    options = bench.options_of(args, 100)
    assert options["max_num_seqs"] == 8
    assert options["num_gpu_blocks_override"] * 16 >= 100 * (128 + 256)


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_users_count_events_however_they_are_cut(modules, size):
    event = b'26\r\ndata: {"choices":[{"text":"x"}]}\n\n\r\n'
    data = b"HTTP/1.1 200 OK\r\n\r\n" + event * 5 + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    user = modules[1].User.__new__(modules[1].User)
    pieces = [data[i : i + size] for i in range(0, len(data), size)]

    class Socket:
        def sendall(self, _: bytes) -> None:
            pass

        def recv(self, _: int) -> bytes:
            return pieces.pop(0)

    user.socket = Socket()
    user.ask(b"{}")
    ended = [user.hear(float(now)) for now in range(len(pieces))]
    assert ended == [False] * (len(ended) - 1) + [True]
    assert sum(user.counts) == 5
    assert len(user.gaps()) == 4
