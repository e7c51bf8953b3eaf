"""`ringcast top`: what it shows of a server's status, and what it says without one."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

from rich.console import Console

from ringcast.frontend.cli.main import main
from ringcast.frontend.cli.top import Picture, total

STATUS: dict[str, Any] = {
    "actors": [
        {
            "name": "worker.0",
            "pid": 17,
            "state": "ready",
            "cpu_seconds": 10.0,
            "rss_bytes": 900_000_000,
            "restarts": 2,
        }
    ],
    "edges": [{"name": "a.0>b.0", "capacity": 1000, "used": 500, "records": 42}],
    "statistics": {
        "scheduler.0.running": 3.0,
        "scheduler.1.running": 4.0,
        "scheduler.0.waiting": 1.0,
        "scheduler.0.kv_usage": 0.25,
        "scheduler.0.generation_tokens": 1000.0,
        "detokenizer.0.running": 99.0,
    },
}


def draw(picture: Picture, status: dict[str, Any], now: float) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(picture.draw(status, now))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_rates_are_since_the_last_picture() -> None:
    picture = Picture()
    first = draw(picture, STATUS, 100.0)
    assert "running 7   waiting 1   KV cache 25.0%   - tok/s" in first
    assert " 900 " in first
    later = copy.deepcopy(STATUS)
    later["statistics"]["scheduler.0.generation_tokens"] = 1500.0
    later["actors"][0]["cpu_seconds"] = 11.0
    second = draw(picture, later, 102.0)
    assert "250 tok/s" in second
    worker = next(line for line in second.splitlines() if "worker.0" in line)
    assert worker.split() == ["worker.0", "ready", "17", "50", "900", "2"]
    edge = next(line for line in second.splitlines() if "a.0>b.0" in line)
    assert edge.split()[-3:] == ["500", "1000", "42"]


def test_a_restarted_actor_has_no_rate_yet() -> None:
    picture = Picture()
    draw(picture, STATUS, 100.0)
    later = copy.deepcopy(STATUS)
    later["actors"][0].update(pid=18, cpu_seconds=1.0)
    worker = next(line for line in draw(picture, later, 101.0).splitlines() if "worker" in line)
    assert worker.split()[3] == "-"


def test_statistics_are_summed_over_instances() -> None:
    assert total(STATUS, "scheduler", "running") == 7
    assert total(STATUS, "scheduler", "nothing") == 0


def test_once(url: str, capsys: Any) -> None:
    assert main(["top", "--url", url, "--once"]) == 0
    printed = capsys.readouterr().out
    assert "worker.0" in printed
    assert "client.0>tokenizer.0" in printed


def test_json(url: str, capsys: Any) -> None:
    assert main(["top", "--url", url, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["actors"][0]["pid"] == 17


def test_no_server(capsys: Any) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err
