"""scripts/bench front: what a token and a request cost each actor, in CPU time, without a model.

The real topology on the fake device, whose worker answers each step at a set pace and gives the
prompt back as output. Three ways in: `LLM.generate` of all prompts at once, `AsyncLLM` streaming
each token, and streams over HTTP from processes of their own (peers/front_load.py).

For each way and number of streams a round has two waves of as many requests, one with long outputs
and one with short ones. The CPU time of an actor (all of its threads, from /proc) is taken to be
a x tokens + b x requests, which the two waves give. Everything else is from the long waves. CPU
time says what the code costs even where users and actors share a few cores; rates and latencies
say what this machine has left for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from figures import machine, number, percentile, table

PEERS = Path(__file__).resolve().parent / "peers"
MODEL = "smollm2-135m-instruct"
ACTORS = ("client", "detokenizer", "scheduler", "tokenizer", "supervisor", "worker")
SHORT = 8  # tokens of the short outputs
WAYS = ("generate", "stream", "http")
PATIENCE = 120.0  # seconds for a start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ways", default=",".join(WAYS), help="by commas")
    parser.add_argument("--streams", default="1,16,256,1024", help="by commas")
    parser.add_argument("--tokens", type=int, default=256, help="of the long outputs")
    parser.add_argument("--words", type=int, default=64, help="of the prompts")
    parser.add_argument("--step-ms", type=float, default=10.0, help="the worker's pace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load-processes", type=int, default=2, help="that hold HTTP's streams")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="name=json, of EngineConfig (http: of the server, too)",
    )


class Engine(Protocol):
    """An engine with its users. pids: by instance, of its processes."""

    pids: dict[str, int]

    def wave(self, first: int, streams: int, tokens: int) -> list[dict[str, Any]]:
        """So many requests at once, until all have ended: what each load process saw."""


class Peer:
    """A process that obeys lines of JSON."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PEERS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._name = script

    def tell(self, *values: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@@"):
                return line[2:].strip()
        raise SystemExit(f"{self._name} ended with status {self._process.wait()}")

    def close(self) -> None:
        with self._process:  # closes its pipes, and waits
            pass


class Library:
    """`LLM` or `AsyncLLM` in a process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.pids: dict[str, int] = json.loads(peer.answer())

    def wave(self, first: int, streams: int, tokens: int) -> list[dict[str, Any]]:
        self._peer.tell(first, streams, tokens)
        return [json.loads(self._peer.answer())]


class Server:
    """`ringcast serve`, and the processes of its users."""

    def __init__(self, pids: dict[str, int], peers: list[Peer]) -> None:
        self.pids = pids
        self._peers = peers
        for peer in peers:
            peer.answer()

    def wave(self, first: int, streams: int, tokens: int) -> list[dict[str, Any]]:
        shares = [share for share in split(streams, len(self._peers)) if share]
        for peer, share in zip(self._peers, shares, strict=False):
            peer.tell(first, share, tokens)
            first += share
        return [json.loads(peer.answer()) for peer in self._peers[: len(shares)]]


@dataclass
class Cell:
    """One way with one number of streams; one entry for each round.

    per_token, per_request: by kind of actor, microseconds. first, gaps: seconds, of all streams.
    """

    way: str
    streams: int
    rates: list[float] = field(default_factory=list)
    per_token: dict[str, list[float]] = field(default_factory=dict)
    per_request: dict[str, list[float]] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def run(args: argparse.Namespace) -> None:
    """CPU microseconds per token and per request, by actor, with a worker without a model."""
    print(machine())
    streams = [int(count) for count in args.streams.split(",")]
    options = options_of(args, max(streams))
    for way in args.ways.split(","):
        cells = [Cell(way, count) for count in streams]
        with engine_of(way, args, options) as engine:
            first = 0
            for round_number in range(args.rounds + 1):
                for cell in cells:
                    first = measure(cell, engine, first, args.tokens, warm=not round_number)
        print(f"\n{way}\n\n{report(cells)}", flush=True)


def options_of(args: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Room for all streams at once, unless an --option says otherwise."""
    longest = 2 * args.words + args.tokens + 64
    options = {
        "device": "fake",
        "load_format": "dummy",
        "max_num_seqs": streams,
        "max_num_queued_reqs": streams + 16,
        "num_gpu_blocks_override": streams * (longest // 16 + 1) + 1,
    }
    given = (option.partition("=") for option in args.option)
    return options | {name: json.loads(value) for name, _, value in given}


@contextlib.contextmanager
def engine_of(way: str, args: argparse.Namespace, options: dict[str, Any]) -> Iterator[Engine]:
    os.environ["RINGCAST_FAKE_STEP_SECONDS"] = str(args.step_ms / 1000)
    os.environ["RINGCAST_FAKE_ECHO"] = os.environ["RINGCAST_FAKE_TRUST"] = "1"
    words = str(args.words)
    if way == "http":
        with served(args.model, options) as (port, pids):
            peers = [
                Peer("front_load.py", str(port), args.model, words)
                for _ in range(args.load_processes)
            ]
            yield Server(pids, peers)
            for peer in peers:
                peer.close()
    else:
        peer = Peer("front_llm.py", way, args.model, words, json.dumps(options))
        yield Library(peer)
        peer.close()


@contextlib.contextmanager
def served(model: str, options: dict[str, Any]) -> Iterator[tuple[int, dict[str, int]]]:
    """The port of a running `ringcast serve`, and its processes."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    ringcast = [sys.executable, "-P", "-m", "ringcast.frontend.cli.main"]
    command = [*ringcast, "serve", model, "--port=0", "--disable-access-log", *flags]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stderr=said)
        try:
            port = listening(process, said.fileno())
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status") as answer:
                actors = json.load(answer)["actors"]
            pids = {actor["name"]: actor["pid"] for actor in actors}
            yield port, {"supervisor": process.pid, **pids}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def listening(process: subprocess.Popen[bytes], said: int) -> int:
    """The port, as soon as the server has said it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        text = os.pread(said, 1 << 16, 0).decode()
        if (found := re.search(r"ready in .* at http://\S+?:(\d+)/v1", text)) is not None:
            return int(found[1])
        time.sleep(0.02)
    raise SystemExit(f"the server is not ready:\n{os.pread(said, 1 << 16, 0).decode()}")


def measure(cell: Cell, engine: Engine, first: int, tokens: int, warm: bool) -> int:
    """Both waves. `first` is the number of the first request; returns that of the next one.

    warm: it is only to warm up.
    """
    streams, used = cell.streams, []
    for length in (SHORT, tokens):
        before = cpu_seconds(engine.pids)
        start = time.perf_counter()
        found = engine.wave(first, streams, length)
        seconds = time.perf_counter() - start
        used.append({kind: s - before[kind] for kind, s in cpu_seconds(engine.pids).items()})
        first += streams
    events = sum(answer["events"] for answer in found)
    if not streams <= events <= streams * tokens:  # tokens that come together share an event
        raise SystemExit(f"{streams} streams of {tokens} tokens had {events} events")
    if warm:
        return first
    cell.rates.append(streams * tokens / seconds)
    for kind, (short, long) in {kind: (used[0][kind], used[1][kind]) for kind in used[0]}.items():
        token, request = shares(short / streams, long / streams, SHORT, tokens)
        cell.per_token.setdefault(kind, []).append(token * 1e6)
        cell.per_request.setdefault(kind, []).append(request * 1e6)
    for answer in found:
        cell.first += answer.get("first", [])
        cell.gaps += answer.get("gaps", [])
    return first


def shares(short: float, long: float, few: int, many: int) -> tuple[float, float]:
    """(a, b) such that a x few + b == short and a x many + b == long."""
    token = (long - short) / (many - few)
    return token, short - token * few


def split(count: int, parts: int) -> list[int]:
    """About equal parts that sum up to count."""
    return [count * (i + 1) // parts - count * i // parts for i in range(parts)]


def cpu_seconds(pids: dict[str, int]) -> dict[str, float]:
    """By kind of actor, of all threads that live."""
    used: dict[str, float] = {}
    for name, pid in pids.items():
        kind = name.partition(".")[0]
        threads = Path(f"/proc/{pid}/task").iterdir()
        nanoseconds = sum(int((t / "schedstat").read_text().split()[0]) for t in threads)
        used[kind] = used.get(kind, 0.0) + nanoseconds / 1e9
    return used


def report(cells: list[Cell]) -> str:
    """Two Markdown tables: what a token costs and how it streams, and what a request costs."""
    kinds = [kind for kind in ACTORS if kind in cells[0].per_token]
    tokens, requests = [], []
    for cell in cells:
        row = [str(cell.streams), number(statistics.median(cell.rates))]
        row += [spread(cell.per_token[kind]) for kind in kinds]
        row += latencies(cell) if cell.gaps else ["", ""]
        tokens.append(row)
        requests.append([str(cell.streams), *(spread(cell.per_request[kind]) for kind in kinds)])
    heads = [f"{kind}, µs" for kind in kinds]
    last = ["ITL p50 / p99, ms", "TTFT p50, ms"]
    return "\n\n".join(
        (
            table(["streams", "tok/s", *heads, *last], tokens),
            table(["streams: a request", *heads], requests),
        )
    )


def latencies(cell: Cell) -> list[str]:
    middle, late = (number(1000 * percentile(cell.gaps, share)) for share in (0.5, 0.99))
    return [f"{middle} / {late}", number(1000 * percentile(cell.first, 0.5))]


def spread(values: list[float]) -> str:
    """Median (least to most)."""
    middle, least, most = (
        f"{value:,.1f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least} to {most})"
