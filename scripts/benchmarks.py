"""The benchmarks of scripts/bench: each against a peer in the same run, interleaved, as ratios.

On a shared machine only the ratios of one run mean something; absolute figures come with it for
orientation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bench_balance
import bench_decode
import bench_eplb
import bench_faults
import bench_front
import bench_mq
import bench_offline
import bench_perplexity
import bench_prefix
import bench_scheduler

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"


def model_folder() -> str:
    from ringcast.frontend.hub import resolve_model
    from ringcast.mq.config import EngineConfig

    return resolve_model(EngineConfig(model=MODEL)).path


def startup(args: argparse.Namespace) -> None:
    """Seconds from `ringcast serve` to the first streamed token, the model already pulled."""
    model_folder()
    first = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        server = start_server(args)
        try:
            first.append(_first_token(args.port) - start)
            with urllib.request.urlopen(f"http://127.0.0.1:{args.port}/health") as answer:
                assert answer.status == 200
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    spread = f"{min(first):.2f} to {max(first):.2f}"
    print(f"serve to first streamed token, s: {statistics.median(first):.2f} ({spread})")


def start_server(args: argparse.Namespace) -> subprocess.Popen[bytes]:
    ringcast = str(Path(sys.executable).parent / "ringcast")
    command = [ringcast, "serve", "--port", str(args.port), *args.option]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def _post(port: int, path: str, body: dict[str, object]) -> urllib.request.Request:
    url = f"http://127.0.0.1:{port}{path}"
    data = json.dumps(body).encode()
    return urllib.request.Request(url, data, {"Content-Type": "application/json"})


def _first_token(port: int) -> float:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
    }
    request = _post(port, "/v1/chat/completions", body)
    deadline = time.perf_counter() + 120
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        return time.perf_counter()
            raise SystemExit("the stream ended without a token")
        except OSError:
            if time.perf_counter() > deadline:
                raise
            time.sleep(0.02)


def serving(args: argparse.Namespace) -> None:
    """Memory of all processes, their idle CPU, and 16 requests at once over HTTP."""
    server = start_server(args)
    try:
        _first_token(args.port)
        with urllib.request.urlopen(f"http://127.0.0.1:{args.port}/status") as answer:
            actors = json.load(answer)["actors"]
        pids = {"supervisor": server.pid, **{actor["name"]: actor["pid"] for actor in actors}}
        print(f"PSS when ready, MB: {_megabytes(pids)}")
        before = sum(_cpu_seconds(pid) for pid in pids.values())
        time.sleep(30)
        used = sum(_cpu_seconds(pid) for pid in pids.values()) - before
        print(f"idle for 30 s: {100 * used / 30:.2f} % of one core, all processes together")
        for _ in range(args.rounds):
            print(f"16 x 100 in, 64 out over HTTP: {_concurrent(args.port, 16, 64):.0f} out tok/s")
        print(f"PSS after that, MB: {_megabytes(pids)}")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def _megabytes(pids: dict[str, int]) -> dict[str, int]:
    sizes = {name: bench_decode.pss_kilobytes(pid) // 1024 for name, pid in pids.items()}
    return {"all": sum(sizes.values()), **sizes}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _concurrent(port: int, streams: int, num_out: int) -> float:
    def ask(number: int) -> int:
        prompt = f"{number} " + "word " * 98
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_out, "ignore_eos": True}
        with urllib.request.urlopen(_post(port, "/v1/completions", body), timeout=300) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    start = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        tokens = sum(pool.map(ask, range(streams)))
    return tokens / (time.perf_counter() - start)


def size(args: argparse.Namespace) -> None:
    """Installed packages and their megabytes, without the test and development extras."""
    names, todo = set(), ["ringcast"]
    from packaging.requirements import Requirement

    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in names:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        names.add(name)
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    total = 0
    for name in names:
        for file in importlib.metadata.distribution(name).files or []:
            path = Path(str(file.locate()))
            total += path.stat().st_size if path.is_file() else 0
    print(f"{len(names)} packages, {total / 1e6:,.0f} MB")


def refuse_untested() -> None:
    recorded = ROOT / ".venv" / "tested"
    tree = subprocess.run(
        ["scripts/tree_hash"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if not recorded.exists() or recorded.read_text() != tree:
        raise SystemExit(
            "this tree's tests haven't passed yet: run scripts/test first (or give --untested)"
        )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--option", action="append", default=[], help="a flag of `ringcast serve`")


BENCHMARKS = {
    "mq": (bench_mq.run, bench_mq.add_arguments),
    "faults": (bench_faults.run, bench_faults.add_arguments),
    "front": (bench_front.run, bench_front.add_arguments),
    "scheduler": (bench_scheduler.run, bench_scheduler.add_arguments),
    "perplexity": (bench_perplexity.run, bench_perplexity.add_arguments),
    "balance": (bench_balance.run, bench_balance.add_arguments),
    "eplb": (bench_eplb.run, bench_eplb.add_arguments),
    "prefix": (bench_prefix.run, bench_prefix.add_arguments),
    "decode": (bench_decode.run, bench_decode.add_arguments),
    "offline": (bench_offline.run, bench_offline.add_arguments),
    "startup": (startup, add_server_arguments),
    "serving": (serving, add_server_arguments),
    "size": (size, lambda parser: None),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parsers = parser.add_subparsers(dest="benchmark", required=True)
    for name, (run, add_arguments) in BENCHMARKS.items():
        about = (run.__doc__ or sys.modules[run.__module__].__doc__ or "").strip()
        own = parsers.add_parser(
            name,
            help=about.splitlines()[0],
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(own)
        own.add_argument(
            "--untested",
            action="store_true",
            help="measure although the tests haven't passed on this tree",
        )
    args = parser.parse_args()
    if not args.untested:
        refuse_untested()
    run, _ = BENCHMARKS[args.benchmark]
    if run.__module__ == __name__:
        versions = {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")
        }
        print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, {versions}")
    run(args)


if __name__ == "__main__":
    main()
