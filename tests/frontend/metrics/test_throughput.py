"""The line of throughput: when there is one, and its figures."""

from __future__ import annotations

from ringcast.frontend.metrics.throughput import Throughput
from ringcast.mq.supervision import Status

IDLE = {"running": 0.0, "waiting": 0.0, "kv_usage": 0.0}


def status(prompt: float, generated: float, hits: float = 0, **now: float) -> Status:
    values = {
        "prompt_tokens": prompt,
        "generation_tokens": generated,
        "prefix_cache_queries": prompt,
        "prefix_cache_hits": hits,
        **IDLE,
        **now,
    }
    return Status([], [], {f"scheduler.0.{name}": value for name, value in values.items()})


def test_rates_are_since_the_last_line() -> None:
    throughput = Throughput()
    assert throughput.line(status(500, 500), 0.0) is None
    line = throughput.line(status(700, 550, 50, running=3, waiting=1, kv_usage=0.125), 10.0)
    assert line == (
        "prompt 20.0 tok/s, generation 5.0 tok/s, running 3, waiting 1, KV cache 12.5%, "
        "prefix cache hits 25.0%"
    )
    line = throughput.line(status(700, 600, 50, running=3), 20.0)
    assert line == "prompt 0.0 tok/s, generation 5.0 tok/s, running 3, waiting 0, KV cache 0.0%"


def test_an_idle_engine_says_nothing() -> None:
    throughput = Throughput()
    for now in (0.0, 10.0, 20.0):
        assert throughput.line(status(9, 9), now) is None
    assert throughput.line(status(9, 9, waiting=1), 30.0) is not None  # it is stuck, perhaps


def test_a_scheduler_that_was_started_again_counts_from_0() -> None:
    throughput = Throughput()
    throughput.line(status(900, 900), 0.0)
    assert throughput.line(Status([], [], {}), 10.0) is None
    line = throughput.line(status(10, 20), 20.0)
    assert line is not None
    assert line.startswith("prompt 1.0 tok/s, generation 2.0 tok/s")
    again = throughput.line(status(5, 4), 30.0)
    assert again is not None
    assert again.startswith("prompt 0.5 tok/s, generation 0.4 tok/s")
