"""`ringcast top`: the actors of a running server, their queues and channels, once a second.

It outlives what it watches: while no answer comes (the API server is being restarted, or hangs),
the last picture stays, under a line that says so. Only the first question must be answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...mq.errors import RingcastError
from .remote import DEFAULT_URL, RemoteServer

REFRESH_SECONDS = 1.0
ANSWER_SECONDS = 2.0  # after which the server is said not to answer
FRESH_SECONDS = 10.0  # for so long a restart stands beside the actor's state

# Of an actor's statistics, those that say what waits in it and what befell its requests.
QUEUES = ("running", "waiting", "open", "streams", "outbox")
TROUBLES = ("parked", "takeovers", "poisoned", "preemptions")
_STATES = {"ready": "", "dead": "red"}
_MEGABYTE = 1_000_000

Status = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--json", action="store_true", help="print the status as lines of JSON")


def run(args: argparse.Namespace) -> int:
    asyncio.run(_watch(args.url, args.once, args.json))
    return 0


async def _watch(url: str, once: bool, as_json: bool) -> None:
    async with RemoteServer(url) as server:
        first = await server.get("/status")
        if as_json:
            print(json.dumps(first), flush=True)
        elif once:
            Console().print(Picture().draw(first, time.monotonic()))
        if once:
            return
        await (_print_json(server) if as_json else _show(server, first))


async def _print_json(server: RemoteServer) -> None:
    async for status in later(server):
        if isinstance(status, RingcastError):
            print(f"ringcast: {status}", file=sys.stderr, flush=True)
        else:
            print(json.dumps(status), flush=True)


async def _show(server: RemoteServer, first: Status) -> None:
    picture = Picture()
    shown = picture.draw(first, time.monotonic())
    with Live(shown, auto_refresh=False, screen=True) as live:
        async for status in later(server):
            now = time.monotonic()
            if isinstance(status, RingcastError):
                live.update(picture.without_answer(status, now), refresh=True)
            else:
                live.update(picture.draw(status, now), refresh=True)


async def later(server: RemoteServer) -> AsyncGenerator[Status | RingcastError, None]:
    """The status again and again, or why there is none."""
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        answer: Status | RingcastError
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await server.get("/status")
        except TimeoutError:
            answer = RingcastError(f"no answer within {ANSWER_SECONDS:g} s")
        except RingcastError as error:
            answer = error
        yield answer


class Picture:
    """Draws a status. Rates (CPU, tokens a second) are since the status drawn before it."""

    def __init__(self) -> None:
        self._last: Status | None = None
        self._last_time = 0.0
        self._drawn: RenderableType = ""
        self._restarted: dict[str, float] = {}  # when an actor's process was seen to be another

    def draw(self, status: Status, now: float) -> RenderableType:
        last, seconds = self._last, now - self._last_time
        self._last, self._last_time = status, now
        self._note_restarts(status, last, now)
        self._drawn = Group(
            _load(status, last, seconds),
            *_full(status),
            _actors(status, last, seconds, self._ages(now)),
            _edges(status),
        )
        return self._drawn

    def without_answer(self, error: RingcastError, now: float) -> RenderableType:
        """The last picture again, and since when it is out of date."""
        notice = f"reconnecting: this is of {now - self._last_time:.0f} s ago ({error})"
        return Group(Text(notice, style="bold yellow"), self._drawn)

    def _note_restarts(self, status: Status, last: Status | None, now: float) -> None:
        before = {actor["name"]: actor["pid"] for actor in last["actors"]} if last else {}
        for actor in status["actors"]:
            if before.get(actor["name"], actor["pid"]) != actor["pid"]:
                self._restarted[actor["name"]] = now

    def _ages(self, now: float) -> dict[str, float]:
        """Seconds since each recent restart, by actor."""
        ages = {name: now - since for name, since in self._restarted.items()}
        return {name: age for name, age in ages.items() if age <= FRESH_SECONDS}


def total(status: Status, actor: str, name: str) -> float:
    """A statistic, summed over the instances of an actor ("scheduler.0.running")."""
    return sum(_values(status, actor, name))


def _values(status: Status, actor: str, name: str) -> list[float]:
    statistics: dict[str, float] = status["statistics"]
    return [
        value
        for key, value in statistics.items()
        if key.startswith(f"{actor}.") and key.rpartition(".")[2] == name
    ]


def _load(status: Status, last: Status | None, seconds: float) -> Text:
    tokens = _rate(
        total(status, "scheduler", "generation_tokens"),
        total(last, "scheduler", "generation_tokens") if last else None,
        seconds,
    )
    usages = _values(status, "scheduler", "kv_usage")
    text = Text(
        f"running {total(status, 'scheduler', 'running'):.0f}   "
        f"waiting {total(status, 'scheduler', 'waiting'):.0f}   "
        f"KV cache {sum(usages) / max(len(usages), 1):.1%}   "
        f"{'-' if tokens is None else f'{tokens:.0f}'} tok/s",
        style="bold",
    )
    replicas = status["statistics"].get("supervisor.replicas", 1)
    if wanted := status["statistics"].get("supervisor.scaling_to"):
        text.append(f"   replicas {replicas:.0f}, scaling to {wanted:.0f}", style="yellow")
    elif replicas > 1:
        text.append(f"   replicas {replicas:.0f}")
    for name in ("parked", "takeovers", "poisoned"):
        if number := total(status, "client", name):
            text.append(f"   {name} {number:.0f}", style="yellow")
    return text


def _full(status: Status) -> list[Text]:
    """A line for each channel whose writer waits for space: for how long, and for whom."""
    return [
        Text(f"{edge['name']} full for {edge['full_seconds']:.1f} s: {edge['laggards']}", "red")
        for edge in status["edges"]
        if edge["full_seconds"]
    ]


def _actors(status: Status, last: Status | None, seconds: float, ages: dict[str, float]) -> Table:
    before = {actor["pid"]: actor["cpu_seconds"] for actor in last["actors"]} if last else {}
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("actor")
    table.add_column("state", no_wrap=True)
    for heading in ("pid", "CPU %", "RSS MB", "restarts"):
        table.add_column(heading, justify="right")
    table.add_column("queues")
    for actor in status["actors"]:
        name, dead = actor["name"], actor["state"] == "dead"
        cpu = None if dead else _rate(actor["cpu_seconds"], before.get(actor["pid"]), seconds)
        table.add_row(
            Text(name),
            _state(actor, ages.get(name)),
            "-" if dead else str(actor["pid"]),
            "-" if cpu is None else f"{100 * cpu:.0f}",
            f"{actor['rss_bytes'] / _MEGABYTE:.0f}",
            Text(str(actor["restarts"]), style="yellow" if actor["restarts"] else ""),
            _queues(status["statistics"], name),
        )
    return table


def _state(actor: dict[str, Any], age: float | None) -> Text:
    state = actor["state"]
    text = Text(state, style=_STATES.get(state, "yellow"))
    if age is not None and state == "ready":
        text.append(f", up {age:.0f} s", style="yellow")
    return text


def _queues(statistics: dict[str, float], actor: str) -> Text:
    """The actor's queues that are not empty, and what befell its requests if anything did."""
    text = Text()
    for name in (*QUEUES, *TROUBLES):
        if number := statistics.get(f"{actor}.{name}"):
            style = "yellow" if name in TROUBLES else ""
            text.append("  " if text else "").append(f"{name} {number:.0f}", style)
    return text


def _edges(status: Status) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("channel")
    table.add_column("fill", width=20)
    for heading in ("used", "of", "records"):
        table.add_column(heading, justify="right")
    for edge in status["edges"]:
        capacity, used = edge["capacity"], edge["used"]
        bar = ProgressBar(total=max(capacity, 1), completed=used, width=20)
        table.add_row(Text(edge["name"]), bar, str(used), str(capacity), str(edge["records"]))
    return table


def _rate(now: float, before: float | None, seconds: float) -> float | None:
    """None where there is nothing to compare with: the counter is new, or began again."""
    if before is None or now < before or seconds <= 0:
        return None
    return (now - before) / seconds
