"""`ringcast scale`: another number of replicas for a running server."""

from __future__ import annotations

import argparse
import asyncio

from .remote import DEFAULT_URL, RemoteServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, required=True, help="how many there are to be")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--drain-timeout",
        type=float,
        help="seconds that requests on a replica that goes have to end there, before they go on "
        "elsewhere (default: the server's --shutdown-timeout)",
    )


def run(args: argparse.Namespace) -> int:
    asyncio.run(_scale(args.url, args.replicas, args.drain_timeout))
    return 0


async def _scale(url: str, replicas: int, drain_timeout: float | None) -> None:
    body: dict[str, float] = {"replicas": replicas}
    if drain_timeout is not None:
        body["drain_timeout"] = drain_timeout
    async with RemoteServer(url) as server:
        answer = await server.post("/scale", body)
    print(f"replicas: {answer['replicas']}")
