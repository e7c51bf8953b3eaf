"""`ringcast top`: the actors of a running server, their channels and their load, once a second."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .remote import DEFAULT_URL, RemoteServer

REFRESH_SECONDS = 1.0
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
        if as_json:
            await _print_json(server, once)
        elif once:
            Console().print(Picture().draw(await server.get("/status"), time.monotonic()))
        else:
            await _show(server)


async def _print_json(server: RemoteServer, once: bool) -> None:
    print(json.dumps(await server.get("/status")), flush=True)
    while not once:
        await asyncio.sleep(REFRESH_SECONDS)
        print(json.dumps(await server.get("/status")), flush=True)


async def _show(server: RemoteServer) -> None:
    picture = Picture()
    first = picture.draw(await server.get("/status"), time.monotonic())
    with Live(first, auto_refresh=False, screen=True) as live:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            status = await server.get("/status")
            live.update(picture.draw(status, time.monotonic()), refresh=True)


class Picture:
    """Draws a status. Rates (CPU, tokens a second) are since the status drawn before it."""

    def __init__(self) -> None:
        self._last: Status | None = None
        self._last_time = 0.0

    def draw(self, status: Status, now: float) -> RenderableType:
        last, seconds = self._last, now - self._last_time
        self._last, self._last_time = status, now
        parts: list[RenderableType] = [
            _load(status, last, seconds),
            _actors(status, last, seconds),
            _edges(status),
        ]
        return Group(*parts)


def total(status: Status, actor: str, name: str) -> float:
    """A statistic, summed over the instances of an actor ("scheduler.0.running")."""
    statistics: dict[str, float] = status["statistics"]
    return sum(
        value
        for key, value in statistics.items()
        if key.startswith(f"{actor}.") and key.rpartition(".")[2] == name
    )


def _load(status: Status, last: Status | None, seconds: float) -> Text:
    tokens = _rate(
        total(status, "scheduler", "generation_tokens"),
        total(last, "scheduler", "generation_tokens") if last else None,
        seconds,
    )
    return Text(
        f"running {total(status, 'scheduler', 'running'):.0f}   "
        f"waiting {total(status, 'scheduler', 'waiting'):.0f}   "
        f"KV cache {total(status, 'scheduler', 'kv_usage'):.1%}   "
        f"{'-' if tokens is None else f'{tokens:.0f}'} tok/s",
        style="bold",
    )


def _actors(status: Status, last: Status | None, seconds: float) -> Table:
    before = {actor["pid"]: actor["cpu_seconds"] for actor in last["actors"]} if last else {}
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("actor")
    table.add_column("state")
    for heading in ("pid", "CPU %", "RSS MB", "restarts"):
        table.add_column(heading, justify="right")
    for actor in status["actors"]:
        cpu = _rate(actor["cpu_seconds"], before.get(actor["pid"]), seconds)
        table.add_row(
            Text(actor["name"]),
            Text(actor["state"], style="" if actor["state"] == "ready" else "yellow"),
            str(actor["pid"]),
            "-" if cpu is None else f"{100 * cpu:.0f}",
            f"{actor['rss_bytes'] / _MEGABYTE:.0f}",
            str(actor["restarts"]),
        )
    return table


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
    if before is None or seconds <= 0:
        return None
    return max(now - before, 0.0) / seconds
