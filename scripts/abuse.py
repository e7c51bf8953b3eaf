"""scripts/abuse: what hostile and broken clients do to a server, and what is left of it afterwards.

One `ringcast serve` of the fake device takes all attacks (abuse_attacks.py) in turn, a short round
of them first, with as many at a time, so that what is made once, and memory that stays with the
allocator, doesn't count as a leak. After each, the server must have no request open, and an
ordinary request is timed. At the end the descriptors and threads of each process are compared with
those after the short round, its memory with the most that it had after any attack of that: how much
an allocator gives back is chance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from abuse_attacks import (
    AT_A_TIME,
    ATTACKS,
    BODY_SECONDS,
    HEADER_SECONDS,
    LAG_SECONDS,
    Target,
    ordinary,
)
from figures import machine, table
from serve_process import ServeProcess

MODEL = "smollm2-135m-instruct"
OPTIONS = ("--device", "fake", "--max-model-len", "4096", "--disable-access-log")
LIMITS = {
    "--header-timeout": HEADER_SECONDS,
    "--body-timeout": BODY_SECONDS,
    "--max-client-lag": LAG_SECONDS,
}
STEP_SECONDS = "0.002"
PATIENCE = 30.0  # seconds for requests to end and descriptors to close
MOST_SECONDS = 2.0  # of an ordinary request after an attack
MOST_GROWTH = 24  # MB that a process may have grown by


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=PATIENCE) as answer:
        return json.load(answer)


class Census:
    """What the server's processes have: descriptors, threads, MB."""

    def __init__(self, url: str) -> None:
        self.processes = {}
        for actor in get(url, "/status")["actors"]:
            place = Path(f"/proc/{actor['pid']}")
            fds, threads = (len(list((place / kind).iterdir())) for kind in ("fd", "task"))
            rollup = (place / "smaps_rollup").read_text()
            (line,) = [line for line in rollup.splitlines() if line.startswith("Pss:")]
            pid, megabytes = actor["pid"], int(line.split()[1]) // 1024
            self.processes[actor["name"]] = (pid, fds, threads, megabytes)

    def most_memory(self, others: dict[str, int]) -> dict[str, int]:
        """MB of each process, here or in others."""
        return {name: max(now[3], others.get(name, 0)) for name, now in self.processes.items()}


def open_requests(url: str) -> dict[str, float]:
    counts = {"load": get(url, "/load")["server_load"]}
    counts |= {
        name: value
        for name, value in get(url, "/status")["statistics"].items()
        if name in ("num_running", "num_waiting")
    }
    return {name: value for name, value in counts.items() if value}


def wait_idle(url: str) -> str:
    """What is open after all patience; nothing if all is well."""
    deadline = time.monotonic() + PATIENCE
    while (left := open_requests(url)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return ", ".join(f"{name} {value:g}" for name, value in left.items())


def attack(name: str, url: str, target: Target, times: int, seed: int) -> tuple[list[str], bool]:
    """A row of the table, and whether all was well."""
    _, run = ATTACKS[name]
    begun, well = time.perf_counter(), True
    try:
        outcome = asyncio.run(run(target, times, random.Random(seed)))
    except (Exception, ExceptionGroup) as error:
        outcome, well = f"BROKE: {first_of(error)}", False
    took = time.perf_counter() - begun
    left = wait_idle(url)
    seconds = asyncio.run(ordinary(target))
    well = well and not left and seconds < MOST_SECONDS
    row = [name, f"{times:,}", outcome, f"{took:.0f}", left or "nothing", f"{1000 * seconds:.0f}"]
    return row, well


def first_of(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:500]


def compare(url: str, before: Census, most: dict[str, int]) -> tuple[list[list[str]], list[str]]:
    """The rows of the processes' table, and what leaked.

    most: MB of each process that are no leak; MOST_GROWTH may come on top.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        after, leaks, rows = Census(url), [], []
        for name, (pid, fds, threads, megabytes) in after.processes.items():
            was = before.processes[name]
            rows.append(
                [
                    name,
                    f"{was[1]} -> {fds}",
                    f"{was[2]} -> {threads}",
                    f"{most[name]} -> {megabytes}",
                ]
            )
            if pid != was[0]:
                leaks.append(f"{name} was restarted")
            if fds > was[1] or threads > was[2]:
                leaks.append(
                    f"{name}: descriptors {was[1]} -> {fds}, threads {was[2]} -> {threads}"
                )
            if megabytes > most[name] + MOST_GROWTH:
                leaks.append(f"{name}: {most[name]} -> {megabytes} MB")
        if not leaks or time.monotonic() > deadline:
            return rows, leaks
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/abuse", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(ATTACKS))
    parser.add_argument("--scale", type=float, default=1.0, help="of how often (default: 1)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended on the way out
    names = args.only or list(ATTACKS)
    times = {name: max(1, round(ATTACKS[name][0] * args.scale)) for name in names}
    print(machine())
    with tempfile.TemporaryDirectory(prefix="abuse-") as work:
        limits = [text for name, value in LIMITS.items() for text in (name, f"{value:g}")]
        variables = {"RINGCAST_FAKE_STEP_SECONDS": STEP_SECONDS}
        server = ServeProcess((MODEL, *OPTIONS, *limits), variables, Path(work) / "server.log")
        parts = urlsplit(server.url)
        target = Target(str(parts.hostname), int(parts.port or 0), MODEL)
        rows, bad = [], []
        try:
            most: dict[str, int] = {}
            for name in names:
                attack(name, server.url, target, min(times[name], AT_A_TIME), args.seed)
                before = Census(server.url)
                most = before.most_memory(most)
            for name in names:
                row, well = attack(name, server.url, target, times[name], args.seed)
                print(*row, sep=" | ", file=sys.stderr)
                rows.append(row)
                bad += [] if well else [f"{name}: {row[2]}; open: {row[4]}; then {row[5]} ms"]
            processes, leaks = compare(server.url, before, most)
        finally:
            wrong = server.end()
    head = ["tried", "times", "what came of it", "s", "open after it", "ordinary request, ms"]
    print(table(head, rows))
    print()
    print(table(["process", "descriptors", "threads", "MB (PSS)"], processes))
    print("\nbroke:", "; ".join(bad + wrong) or "nothing")
    print("leaked:", "; ".join(leaks) or "nothing")
    sys.exit(bool(bad or wrong or leaks))


if __name__ == "__main__":
    main()
