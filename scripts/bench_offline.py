"""scripts/bench offline: one GPU, random weights: start, decode, prefill, and 256 mixed requests.

Every figure goes through `LLM` as a user would run it; vLLM, where --vllm-python names an
environment that has it, does the same work in the same run. Engines take turns, as each takes the
GPU's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers"
MODELS = Path(__file__).resolve().parent / "data" / "models"
sys.path.append(str(PEERS))

from figures import machine, number, table  # noqa: E402
from offline_figures import Seconds, figures, shape  # noqa: E402


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = sorted(path.name for path in MODELS.iterdir())
    parser.add_argument("--model", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"], choices=known)
    parser.add_argument("--case", action="append", default=[], help="only these (offline_cases.py)")
    parser.add_argument("--option", action="append", default=[], help="name=json, of `LLM`")
    parser.add_argument("--vllm-python", help="an interpreter that has vllm")
    parser.add_argument("--limit", type=float, default=600, help="seconds that an engine may take")


def run(args: argparse.Namespace) -> None:
    print(machine())
    for model in args.model:
        folder = str(MODELS / model)
        common = [folder, json.dumps(args.case)]
        engines = {
            "ringcast": [sys.executable, str(PEERS / "ringcast_offline.py"), *common, *args.option]
        }
        if args.vllm_python:
            engines["vllm"] = [args.vllm_python, str(PEERS / "vllm_offline.py"), *common]
        taken = {name: times_of(command, args.limit) for name, command in engines.items()}
        config = json.loads((MODELS / model / "config.json").read_text())
        print(f"\n{model}\n\n{report(config, taken)}", flush=True)


def times_of(command: list[str], limit: float) -> Seconds:
    """Of one worker. What it had said by `limit` counts, and the rest is missing."""
    start = str(time.time())
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        [*command[:2], start, *command[2:]], stdout=subprocess.PIPE, text=True, env=environment
    )
    times: Seconds = {}
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        print(f"{Path(command[1]).stem}: not done after {limit:.0f} s", flush=True)
    for line in output.splitlines():
        if line.startswith("@@"):
            name, *entry = json.loads(line[2:])
            times.setdefault(name, []).append(tuple(entry))
    return times


def report(config: dict[str, object], taken: dict[str, Seconds]) -> str:
    """A Markdown table. Ratios are ours to vLLM's, above 1 where ours is better."""
    rows = []
    for figure in figures():
        values = {name: figure.read(seconds) for name, seconds in taken.items()}
        if not any(values.values()):
            continue
        row = [f"{figure.name}, {figure.unit}", number(figure.floor(shape(config)))]
        row += [spread(each) for each in values.values()]
        if len(values) > 1:
            row.append(ratio(*values.values(), more_is_better=figure.unit == "tok/s"))
        rows.append(row)
    return table(["", "floor", *taken, *(["ratio"] if len(taken) > 1 else [])], rows)


def spread(values: list[float]) -> str:
    if not values:
        return "none"
    middle = number(statistics.median(values))
    return f"{middle} ({number(min(values))} to {number(max(values))})" if values[1:] else middle


def ratio(ours: list[float], theirs: list[float], more_is_better: bool) -> str:
    if not ours or not theirs:
        return ""
    value = statistics.median(ours) / statistics.median(theirs)
    return number(value if more_is_better else 1 / value)
