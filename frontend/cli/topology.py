"""`ringcast topology`: draws the process graph, as actors/topology.py has it.

With --url it is the graph of a running server: its numbers of actors, and their pids.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ...actors import topology
from ...mq.board import MAX_READERS
from ...mq.config import MAX_TEXT_ACTORS, EngineConfig
from ...mq.endpoint import SENDERS
from ...mq.errors import ConfigError
from .graph import Graph, make_graph
from .graph_svg import draw_svg
from .graph_text import draw_text
from .remote import RemoteServer

_NUMBERS = ("clients", "workers", "data-parallel-size", "tokenizer-count", "detokenizer-count")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--svg", metavar="FILE", help="write an SVG drawing; - is standard output")
    form.add_argument("--json", action="store_true", help="print JSON, with every channel")
    parser.add_argument("--url", help="a running server, whose actors are drawn with their pids")
    parser.add_argument("--clients", type=int, metavar="N", help="as with N API servers")
    for kind in ("tokenizer", "detokenizer"):
        parser.add_argument(f"--{kind}-count", type=int, metavar="N", help=f"as with N {kind}s")
    parser.add_argument(
        *("--workers", "--tensor-parallel-size", "-tp"),
        type=int,
        metavar="N",
        help="as with N workers (of each replica)",
    )
    parser.add_argument(
        *("--data-parallel-size", "-dp"), type=int, metavar="N", help="as with N replicas"
    )
    parser.add_argument(
        "--transport",
        choices=tuple(SENDERS),
        help=f"as with this transport (default: {EngineConfig().transport})",
    )


def run(args: argparse.Namespace) -> int:
    graph = _graph(args)
    if args.svg is not None:
        _write(args.svg, draw_svg(graph))
    elif args.json:
        print(msgspec.json.format(msgspec.json.encode(graph)).decode())
    else:
        print(draw_text(graph))
    return 0


def _graph(args: argparse.Namespace) -> Graph:
    given = {option: getattr(args, option.replace("-", "_")) for option in _NUMBERS}
    asked = {option: count for option, count in given.items() if count is not None}
    if args.url is not None:
        if asked or args.transport:
            raise ConfigError("--url draws what runs there, so no other numbers and no transport")
        return graph_of(asyncio.run(_status(args.url)))
    for option, count in asked.items():
        most = MAX_TEXT_ACTORS if option.endswith("tokenizer-count") else MAX_READERS
        if not 1 <= count <= most:
            raise ConfigError(f"--{option} {count}: it must be 1 to {most}")
    clients, ranks, replicas, tokenizers, detokenizers = (asked.get(o, 1) for o in _NUMBERS)
    counts = {"client": clients, **topology.counts_for(replicas, ranks)}
    counts |= {"tokenizer": tokenizers, "detokenizer": detokenizers}
    return make_graph(counts, args.transport or EngineConfig().transport)


def graph_of(status: dict[str, Any]) -> Graph:
    """The graph of a running server, from its /status. (That doesn't tell the transport.) What is
    on other hosts isn't drawn."""
    pids = {actor["name"]: actor["pid"] for actor in status["actors"]}
    edges = {edge["name"] for edge in status["edges"]}
    return make_graph(_counts(pids, edges), pids=pids, edges=edges)


def _counts(names: Iterable[str], edges: Iterable[str]) -> dict[str, int]:
    """How many there are of each kind on all hosts, by what one of them has."""
    counts = Counter(name.partition(".")[0] for name in names)
    local = sum(edge.endswith(">workers") for edge in edges)  # engines that have workers here
    nodes = 1 + counts["gateway"]  # that share an engine
    ranks = nodes * counts["worker"] // max(local, 1)
    counts["worker"] = max(counts["scheduler"], 1) * ranks
    if counts["gateway"]:
        counts["gateway"] = nodes  # 0 is nowhere
    if counts["mirror"]:
        counts["mirror"] = counts["scheduler"]
    counts[topology.LOCKSTEP] = int(any(e.startswith("coordinator.0>scheduler.") for e in edges))
    return counts


async def _status(url: str) -> Any:
    async with RemoteServer(url) as server:
        return await server.get("/status")


def _write(file: str, text: str) -> None:
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {file}: {error.strerror}") from None
