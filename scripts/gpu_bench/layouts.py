"""What several devices gain: the cases of scripts/bench offline through `LLM`, one layout after the
other, and how often the first one's figure each has.

    layouts.py 1 tp2 dp2 pp2 tp2+ep [--model llama-3.1-8b] [--case "batch 64" ...]

tp, dp, pp: how many ranks, replicas, stages; ep: whole experts on each rank. Weights are random.
Each layout is a process of its own, ended after --limit seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
MODELS = HERE.parents[1] / "data" / "models"
PEER = HERE.parents[1] / "peers" / "ringcast_offline.py"
CASES = ["batch 1", "batch 64", "offline256"]
OPTIONS = {
    "tp": "tensor_parallel_size",
    "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layouts", nargs="+", metavar="LAYOUT")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--case", action="append", default=[], help=f"not {', '.join(CASES)}")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--limit", type=float, default=180, help="seconds for a layout")
    args = parser.parse_args()
    cases = args.case or CASES
    first: dict[str, float] = {}
    for layout in args.layouts:
        options = [*options_of(layout), *args.option]
        for name, figure in measure(args.model, options, cases, args.limit).items():
            first.setdefault(name, figure)
            ratio = figure / first[name] if unit(name) == "tok/s" else first[name] / figure
            print(f"{args.model}  {layout:8} {name:28} {figure:10.4g} {unit(name):10} {ratio:.2f}x")
        sys.stdout.flush()


def options_of(layout: str) -> list[str]:
    """Of `LLM`, as name=json."""
    options = ['device="cuda"']
    for part in layout.split("+"):
        if part == "ep":
            options.append("enable_expert_parallel=true")
        elif part != "1":
            options.append(f"{OPTIONS[part[:2]]}={int(part[2:])}")
    return options


def measure(model: str, options: list[str], cases: list[str], limit: float) -> dict[str, float]:
    """Medians of the cases that were done in time."""
    command = [sys.executable, str(PEER), str(time.time()), str(MODELS / model)]
    process = subprocess.Popen(
        [*command, json.dumps(cases), *options], stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        print(f"{options}: not done after {limit:.0f} s", flush=True)
    if process.returncode:
        print(f"{options}: exit status {process.returncode}", flush=True)
    figures: dict[str, list[float]] = {}
    for line in output.splitlines():
        if line.startswith("@@"):
            name, spent, _, num_out = json.loads(line[2:])
            figures.setdefault(name, []).append(figure_of(name, spent, num_out))
    return {name: statistics.median(values) for name, values in figures.items()}


def unit(name: str) -> str:
    return {"offline256": "tok/s", "offline512": "tok/s", "first token": "s"}.get(name, "ms/step")


def figure_of(name: str, spent: float, num_out: int) -> float:
    if unit(name) == "tok/s":
        return num_out / spent
    return spent if name == "first token" else 1e3 * spent / 128


if __name__ == "__main__":
    main()
