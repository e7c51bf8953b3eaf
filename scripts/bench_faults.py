"""scripts/bench faults: kill -9 of each kind of process at random moments, and what users notice.

A real `ringcast serve` with the fake device, which takes 10 ms for a step, so that each text can be
compared with what it must be (--real: the default model, of whose output only the length is known).
A process of its own holds the streams (peers/fault_load.py). For each kind of actor there is one
server and --kills kills:

1. All streams flow. After a random moment more, one process gets SIGKILL: three times of four after
   1 to 2 s, otherwise at once (less than 0.3 s), but so no more than twice in a row: no unit dies
   so often within a second of being ready that --max-restarts would matter.
2. The actor is back when /status says that its new process is ready. Recovery is the time from the
   kill until each stream has had a token after that; a pause is the longest that one stream had no
   token.
3. Then the processes, segments and descriptors are counted.

When the supervisor dies there is nobody to restart anything: its connections end, and all of its
processes must end too. Ends with status 1 if anything was lost or left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import machine, number, percentile, table

SCRIPTS = Path(__file__).resolve().parent
LOAD = SCRIPTS / "peers" / "fault_load.py"
KINDS = ("worker", "scheduler", "tokenizer", "detokenizer", "client", "supervisor")
ENGINE = ("worker", "scheduler")  # die and come back as one
PATIENCE = 60.0  # seconds for anything that should come at once
LEFT_PATIENCE = 5.0  # seconds for what is dead to be gone
SUPERVISOR_KILLS = 10
STEP_SECONDS = "0.01"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", default=",".join(KINDS), help="by commas")
    parser.add_argument(
        "--kills",
        type=int,
        default=50,
        help=f"of each kind; {SUPERVISOR_KILLS} at most of the supervisor",
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the requests")
    parser.add_argument("--real", action="store_true", help="the default model, on the CPU")
    parser.add_argument(
        "--option", action="append", default=[], help="a flag of `ringcast serve`: --option=--x=1"
    )


class Stalled(Exception):
    """Something that must come again did not."""


class Server:
    """A running `ringcast serve`. `said` is what it has said on stderr, with the times."""

    def __init__(self, command: list[str], temporary: Path) -> None:
        own = {"RINGCAST_FAKE_STEP_SECONDS": STEP_SECONDS, "TMPDIR": str(temporary)}
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **own}
        )
        self.said: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self.pid = self._process.pid
        try:
            line = self.find(r"ready in .* at http://\S+/v1", 0.0)[1]
        except BaseException:
            self.kill()
            raise
        self.url = line.split(" at ")[1].split("/v1")[0]

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append((time.monotonic(), line.rstrip()))

    def find(self, pattern: str, after: float) -> tuple[float, str]:
        """The first line that was said after `after` and has this in it."""

        def look() -> tuple[float, str] | None:
            fitting = (s for s in list(self.said) if s[0] >= after and re.search(pattern, s[1]))
            return next(fitting, None)

        return self.until(look, f"{pattern!r} on stderr")

    def until(self, look: Callable[[], Any], what: str) -> Any:
        """What `look` finds. Raises Stalled if the server ends, or it takes too long."""
        deadline = time.monotonic() + PATIENCE
        while not (found := look()):
            status = self._process.poll()
            late = time.monotonic() > deadline
            if late or status is not None:
                self._thread.join(1)
                end = f"ended with status {status}" if status is not None else "runs"
                last = "\n    ".join(text for _, text in self.said[-8:])
                raise Stalled(f"no {what}; the server {end}; it said last:\n    {last}")
            time.sleep(0.01)
        return found

    def status(self) -> dict[str, Any]:
        """Raises OSError while there is no API server."""
        with urllib.request.urlopen(f"{self.url}/status", timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def pids(self) -> dict[str, int]:
        return {actor["name"]: actor["pid"] for actor in self.status()["actors"]}

    def wait_until_back(self, before: dict[str, int], unit: set[str]) -> None:
        """Until each of `unit` is ready as another process than `before`."""

        def back() -> bool:
            try:
                actors = self.status()["actors"]
            except OSError:
                return False
            return all(
                actor["state"] == "ready" and actor["pid"] != before[actor["name"]]
                for actor in actors
                if actor["name"] in unit
            )

        self.until(back, f"new process of {' and '.join(sorted(unit))}")

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def idle_blocks(self) -> int:
        """Free KV-cache blocks, once no request is in the engine; 0 as long as there is one."""
        values = self.status()["statistics"]
        busy = any(values.get(f"scheduler.0.{key}", 1) for key in ("running", "waiting"))
        return 0 if busy else int(values["scheduler.0.free_blocks"])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join(1)

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL


class Load:
    """The process that holds the streams."""

    def __init__(self, streams: int, seed: int, folder: Path | None) -> None:
        command = [sys.executable, str(LOAD), str(streams), str(seed)]
        paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [*command, *([str(folder)] if folder is not None else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._answer()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@@"):
                found: dict[str, Any] = json.loads(line[2:])
                return found
        raise SystemExit(f"the load ended with status {self._process.wait()}")

    def flow(self, after: float) -> dict[str, Any]:
        """Until each stream has had a token after that."""
        found = self.ask("wait", after=after, timeout=PATIENCE)
        if found["silent"]:
            raise Stalled(f"no token on streams {found['silent']} for {PATIENCE:g} s")
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class Row:
    """What became of one kind's kills. Times are seconds."""

    kind: str
    kills: int = 0
    detections: list[float] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    changed: int = 0
    left: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("processes", "segments", "folders", "descriptors", "blocks"), 0
        )
    )
    counts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def is_clean(self) -> bool:
        bad = (self.counts["failed"], self.counts["lost"], self.counts["repeated"], self.changed)
        return not (any(bad) or any(self.left.values()) or self.wrong)


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = None if args.real else folder
        ringcast = str(Path(sys.executable).parent / "ringcast")
        fake = [str(folder), "--device", "fake", "--load-format", "dummy"]
        self.command = [ringcast, "serve", *([] if args.real else fake), *args.option]
        self._segments = segment_names()
        self._temporary = folder / "tmp"
        self._temporary.mkdir()

    def run(self, kind: str) -> Row:
        row, rng = Row(kind), random.Random(f"{self._args.seed}/{kind}")
        load = Load(self._args.streams, self._args.seed, self._folder)
        servers: list[Server] = []
        try:
            if kind == "supervisor":
                for _ in range(min(self._args.kills, SUPERVISOR_KILLS)):
                    self._kill_supervisor(row, rng, load, servers)
            else:
                self._kill_actors(row, rng, load, servers)
        except (Stalled, OSError) as error:
            row.wrong.append(str(error))
        finally:
            row.counts = load.ask("counts")
            load.close()
            for server in servers:
                server.kill()
        row.wrong += row.counts["reasons"]
        return row

    def _start(self, servers: list[Server]) -> Server:
        server = Server([*self.command, "--port", "0"], self._temporary)
        servers.append(server)
        return server

    def _kill_actors(self, row: Row, rng: random.Random, load: Load, servers: list[Server]) -> None:
        server = self._start(servers)
        blocks = server.until(server.idle_blocks, "free blocks")
        load.ask("url", url=server.url)
        load.flow(time.monotonic())
        descriptors, pids = server.num_descriptors(), set(server.pids().values())
        for pause in moments(rng, self._args.kills):
            load.flow(time.monotonic())
            time.sleep(pause)
            self._kill_actor(row, load, server)
            pids |= set(server.pids().values())
        row.left["descriptors"] += max(0, server.num_descriptors() - descriptors)
        load.ask("stop")
        left = blocks - server.until(server.idle_blocks, "idle engine")
        if not self._args.real:  # whose memory is measured anew by each engine
            row.left["blocks"] += left
        if (status := server.end()) != 0:
            row.wrong.append(f"SIGTERM ended it with status {status}")
        self._count_left(row, pids)
        self._count_folders(row)

    def _kill_actor(self, row: Row, load: Load, server: Server) -> None:
        victim, before = f"{row.kind}.0", server.pids()
        unit = (
            {n for n in before if n.partition(".")[0] in ENGINE} if row.kind in ENGINE else {victim}
        )
        load.ask("mark")
        load.ask("breaks", expected="connections" if row.kind == "client" else "")
        start = time.monotonic()
        os.kill(before[victim], signal.SIGKILL)
        row.kills += 1
        server.wait_until_back(before, unit)
        found = load.flow(time.monotonic())
        load.ask("breaks", expected="")
        said = server.find(rf"\b{victim} \(pid {before[victim]}\) died", start)
        row.detections.append(said[0] - start)
        row.recoveries.append(found["last"] - start)
        row.pauses += found["pauses"]
        after = server.pids()
        row.changed += sum(after[name] != pid for name, pid in before.items() if name not in unit)
        self._count_left(row, {before[name] for name in unit})

    def _kill_supervisor(
        self, row: Row, rng: random.Random, load: Load, servers: list[Server]
    ) -> None:
        load.ask("breaks", expected="anything")
        server = self._start(servers)
        load.ask("url", url=server.url)
        load.flow(time.monotonic())
        time.sleep(rng.uniform(0.0, 2.0))
        pids = {server.pid, *server.pids().values()}
        start = time.monotonic()
        server.kill()
        row.kills += 1
        self._count_left(row, pids)
        row.ends.append(time.monotonic() - start)
        self._count_folders(row)

    def _count_left(self, row: Row, pids: set[int]) -> None:
        """What is still there of dead processes, once they have had time to go."""
        deadline = time.monotonic() + LEFT_PATIENCE
        # The dead of a dead supervisor wait for init; those of a living one, for it.
        zombies = row.kind != "supervisor"
        while (processes := living(pids, zombies)) and time.monotonic() < deadline:
            time.sleep(0.002)
        segments = segment_names() - self._segments
        self._segments |= segments
        row.left["processes"] += len(processes)
        row.left["segments"] += len(segments)

    def _count_folders(self, row: Row) -> None:
        """What a server that is gone has left where temporary files go."""
        for path in self._temporary.iterdir():
            row.left["folders"] += 1
            shutil.rmtree(path)


def moments(rng: random.Random, count: int) -> Iterator[float]:
    """Seconds between the flow of all streams and each kill."""
    soon = 0
    for _ in range(count):
        soon = soon + 1 if rng.random() < 0.25 and soon < 2 else 0
        yield rng.uniform(0.0, 0.3) if soon else rng.uniform(1.0, 2.0)


def living(pids: set[int], zombies: bool) -> set[int]:
    """Those that are there. zombies: also the dead that nobody has waited for."""
    return {pid for pid in pids if state(pid) not in ("", *("" if zombies else "ZX"))}


def state(pid: int) -> str:
    """One letter, as in /proc; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def segment_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("ringcast")}


def cells(row: Row) -> list[str]:
    def both(values: list[float], scale: float) -> str:
        if not values:
            return ""
        return f"{number(scale * percentile(values, 0.5))} / {number(scale * max(values))}"

    counts = row.counts
    actor = row.kind != "supervisor"
    return [
        row.kind,
        str(row.kills),
        str(counts["failed"]),
        f"{counts['lost']} / {counts['repeated']}",
        f"{counts['finished']} ({counts['broken']})",
        both(row.detections, 1e3),
        both(row.recoveries, 1),
        both(row.pauses, 1),
        str(row.changed) if actor else "",
        str(row.left["processes"]),
        f"{row.left['segments']} / {row.left['folders']}",
        str(row.left["descriptors"]) if actor else "",
        str(row.left["blocks"]) if actor else "",
    ]


HEAD = (
    "killed",
    "kills",
    "requests lost",
    "tokens lost / repeated",
    "requests finished (connections ended with their server)",
    "seen after, ms: p50 / max",
    "recovered after, s: p50 / max",
    "pause of a stream, s: p50 / max",
    "other processes restarted",
    "processes left",
    "segments / temporary folders left",
    "descriptors left",
    "KV blocks left",
)


def run(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(LOAD.parent))
    from counting_model import make_counting_model

    kinds = args.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise SystemExit(f"--kinds: no {unknown[0]!r}; there are {', '.join(KINDS)}")
    about, rows = machine(), []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if not args.real:
            make_counting_model(Path(folder))
        bench = Bench(args, Path(folder))
        for kind in kinds:
            print(f"{args.kills} times {kind} ...", file=sys.stderr, flush=True)
            row = bench.run(kind)
            rows.append(row)
            for text in row.wrong:
                print(f"{kind}: {text}", file=sys.stderr, flush=True)
    checked = "only the number of tokens is known" if args.real else "every text is checked"
    print(
        f"`scripts/bench {' '.join(sys.argv[1:])}`: {about}; {args.streams} streams, {checked}.\n"
    )
    print(table(HEAD, [cells(row) for row in rows]))
    for row in rows:
        if row.ends:
            print(
                f"\nAfter the supervisor's death all its processes were gone within "
                f"{number(1e3 * percentile(row.ends, 0.5))} ms (median; at most "
                f"{number(1e3 * max(row.ends))})."
            )
    if not all(row.is_clean() for row in rows):
        raise SystemExit(1)
