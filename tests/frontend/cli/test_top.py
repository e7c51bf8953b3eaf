"""`ringcast top`: what it shows of a server's status, and what it says without one."""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console, RenderableType

from ringcast.frontend.cli import top
from ringcast.frontend.cli.main import main
from ringcast.frontend.cli.top import Picture, total
from ringcast.mq.errors import ConfigError, RequestFailedError, RingcastError

STATUS: dict[str, Any] = {
    "actors": [
        {
            "name": "worker.0",
            "pid": 17,
            "state": "ready",
            "cpu_seconds": 10.0,
            "rss_bytes": 900_000_000,
            "restarts": 2,
        },
        {
            "name": "client.0",
            "pid": 18,
            "state": "ready",
            "cpu_seconds": 1.0,
            "rss_bytes": 80_000_000,
            "restarts": 0,
        },
    ],
    "edges": [
        {
            "name": "a.0>b.0",
            "capacity": 1000,
            "used": 500,
            "records": 42,
            "full_seconds": 0.0,
            "laggards": "",
        }
    ],
    "statistics": {
        "scheduler.0.running": 3.0,
        "scheduler.1.running": 4.0,
        "scheduler.0.waiting": 1.0,
        "scheduler.0.kv_usage": 0.25,
        "scheduler.1.kv_usage": 0.75,
        "scheduler.0.generation_tokens": 1000.0,
        "detokenizer.0.running": 99.0,
        "client.0.open": 16.0,
        "client.0.parked": 0.0,
    },
}


def changed(actor: str = "", /, statistics: dict[str, float] | None = None, **fields: Any) -> Any:
    """STATUS with other values in an actor's row, and other statistics."""
    status = copy.deepcopy(STATUS)
    for row in status["actors"]:
        if row["name"] == actor:
            row.update(fields)
    status["statistics"].update(statistics or {})
    return status


def printed(picture: RenderableType, *, styled: bool = False) -> str:
    file = io.StringIO()
    colours = "standard" if styled else None
    Console(file=file, width=100, force_terminal=styled, color_system=colours).print(picture)
    return file.getvalue()


def draw(picture: Picture, status: dict[str, Any], now: float) -> str:
    return printed(picture.draw(status, now))


def line_of(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if name in line)
    return line


def test_rates_are_since_the_last_picture() -> None:
    picture = Picture()
    first = draw(picture, STATUS, 100.0)
    assert "running 7   waiting 1   KV cache 50.0%   - tok/s" in first
    later = changed("worker.0", {"scheduler.0.generation_tokens": 1500.0}, cpu_seconds=11.0)
    second = draw(picture, later, 102.0)
    assert "250 tok/s" in second
    worker = line_of(second, "worker.0")
    assert worker.split() == ["worker.0", "ready", "17", "50", "900", "2"]
    edge = line_of(second, "a.0>b.0")
    assert edge.split()[-3:] == ["500", "1000", "42"]


def test_a_restarted_actor_is_seen_and_has_no_rate_yet() -> None:
    picture = Picture()
    draw(picture, STATUS, 100.0)
    again = changed("worker.0", pid=19, cpu_seconds=1.0, restarts=3)
    worker = line_of(draw(picture, again, 101.0), "worker.0")
    assert "ready, up 0 s " in worker
    assert worker.split()[-4:] == ["19", "-", "900", "3"]
    assert ", up 5 s " in line_of(draw(picture, again, 106.0), "worker.0")
    assert ", up" not in line_of(draw(picture, again, 112.0), "worker.0")
    assert ", up" not in line_of(draw(picture, again, 113.0), "client.0")


def test_a_counter_that_began_again_has_no_rate() -> None:
    picture = Picture()
    draw(picture, STATUS, 100.0)
    new_engine = changed(statistics={"scheduler.0.generation_tokens": 7.0})
    assert "- tok/s" in draw(picture, new_engine, 101.0)


@pytest.mark.parametrize(("state", "colour"), [("starting", "33"), ("dead", "31")])
def test_an_actor_that_is_down_stands_out(state: str, colour: str) -> None:
    status = changed("worker.0", state=state)
    text = printed(Picture().draw(status, 100.0), styled=True)
    assert f"\x1b[{colour}m{state}" in line_of(text, "worker.0")
    assert "\x1b[33mready" not in text


def test_what_is_dead_has_no_pid() -> None:
    worker = line_of(draw(Picture(), changed("worker.0", state="dead"), 100.0), "worker.0")
    assert worker.split() == ["worker.0", "dead", "-", "-", "900", "2"]


def test_queues_and_troubles() -> None:
    client = line_of(draw(Picture(), STATUS, 100.0), "client.0")
    assert client.rstrip().endswith("open 16")
    statistics = {"client.0.parked": 5.0, "client.0.takeovers": 2.0, "client.0.outbox": 8.0}
    text = draw(Picture(), changed(statistics=statistics), 100.0)
    assert line_of(text, "client.0").rstrip().endswith("open 16  outbox 8  parked 5  takeovers 2")
    assert "tok/s   parked 5   takeovers 2" in text
    assert "poisoned" not in text
    assert "poisoned 1" in draw(Picture(), changed(statistics={"client.0.poisoned": 1.0}), 100.0)


def test_replicas_are_counted_where_there_are_several_and_while_that_changes() -> None:
    def shown(replicas: float, scaling_to: float) -> str:
        statistics = {"supervisor.replicas": replicas, "supervisor.scaling_to": scaling_to}
        return draw(Picture(), changed(statistics=statistics), 100.0)

    assert "replicas" not in shown(1.0, 0.0)
    assert "replicas 3" in shown(3.0, 0.0)
    assert "replicas 1, scaling to 3" in shown(1.0, 3.0)


def test_a_full_channel_names_who_is_slow() -> None:
    status = copy.deepcopy(STATUS)
    status["edges"][0].update(
        full_seconds=2.34, laggards="reader 0 b.0 (pid 20) is 990 bytes behind"
    )
    line = draw(Picture(), status, 100.0).splitlines()[1]
    assert line == "a.0>b.0 full for 2.3 s: reader 0 b.0 (pid 20) is 990 bytes behind"


def test_statistics_are_summed_over_instances() -> None:
    assert total(STATUS, "scheduler", "running") == 7
    assert total(STATUS, "scheduler", "nothing") == 0


def test_without_an_answer_the_last_picture_stays() -> None:
    picture = Picture()
    picture.draw(STATUS, 100.0)
    text = printed(picture.without_answer(ConfigError("refused"), 104.0))
    assert text.splitlines()[0] == "reconnecting: this is of 4 s ago (refused)"
    assert "worker.0" in text
    assert "reconnecting" not in draw(picture, STATUS, 105.0)


class Answers:
    """A server that gives these answers, each once. None never comes."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers: Iterator[Any] = iter(answers)

    async def get(self, path: str) -> Any:
        assert path == "/status"
        answer = next(self._answers)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_it_goes_on_when_the_server_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(top, "ANSWER_SECONDS", 0.05)
    answers = [STATUS, ConfigError("refused"), RequestFailedError("not yet"), None, STATUS]
    seen = []
    stream = top.later(Answers(answers))  # type: ignore[arg-type]
    async for answer in stream:
        seen.append(answer)
        if len(seen) == len(answers):
            break
    await stream.aclose()
    assert [str(a) if isinstance(a, RingcastError) else a for a in seen] == [
        STATUS,
        "refused",
        "not yet",
        "no answer within 0.05 s",
        STATUS,
    ]


def test_the_live_picture(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = itertools.chain([changed("worker.0", pid=19), ConfigError("refused")])
    shown: list[str] = []

    class Screen:
        def __init__(self, first: RenderableType, **_: Any) -> None:
            shown.append(printed(first))

        def __enter__(self) -> Screen:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, picture: RenderableType, refresh: bool) -> None:
            shown.append(printed(picture))

    async def later(_: object) -> Any:
        for answer in answers:
            yield answer

    monkeypatch.setattr(top, "Live", Screen)
    monkeypatch.setattr(top, "later", later)
    assert main(["top", "--url", url]) == 0
    assert [text.split()[0] for text in shown] == ["running", "running", "reconnecting:"]
    assert ", up 0 s" in shown[1]


def test_once(url: str, capsys: Any) -> None:
    assert main(["top", "--url", url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "worker.0" in shown
    assert "client.0>tokenizer.0" in shown


def test_json(url: str, capsys: Any) -> None:
    assert main(["top", "--url", url, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["actors"][0]["pid"] == 17


def test_json_goes_on(url: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def later(_: object) -> Any:
        yield ConfigError("refused")
        yield STATUS

    monkeypatch.setattr(top, "later", later)
    assert main(["top", "--url", url, "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["actors"][0]["pid"] for line in out.splitlines()] == [17, 17]
    assert err == "ringcast: refused\n"


def test_no_server(capsys: Any) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err
