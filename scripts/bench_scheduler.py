"""scripts/bench scheduler: microseconds of scheduling for a step in which all sequences decode.

A scheduler's core alone, without processes: N sequences run, every step gives each a token. `flush`
plans a step (one more is in flight, as with the default --max-steps-in-flight) and writes what the
detokenizer hears of the one before; `handle` takes in the worker's output of the oldest. Both are
timed as the actor calls them, messages not yet encoded, in CPU time, which a busy machine disturbs
less. A new block is due every 16 steps of a sequence, and the sequences are spread over those; "no
reuse" and "reuse" are prefix caching off and on, where each full block is hashed besides. No
sequence ends.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections import deque
from typing import NamedTuple

import numpy as np
from figures import machine, number, percentile, table


class Steps(NamedTuple):
    """CPU seconds of each step's `flush` and `handle`."""

    flush: list[float]
    handle: list[float]

    @property
    def total(self) -> list[float]:
        return [a + b for a, b in zip(self.flush, self.handle, strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="64,256,1024,4096", help="running sequences, by commas")
    parser.add_argument("--steps", type=int, default=200, help="measured, for each size")
    parser.add_argument("--rounds", type=int, default=3, help="the best of them counts")


def measure(num_sequences: int, num_steps: int, caching: bool) -> Steps:
    from ringcast.actors.scheduler.core import SchedulerCore
    from ringcast.mq import codec, messages
    from ringcast.mq.config import EngineConfig, ModelSpec
    from ringcast.mq.sampling_params import SamplingParams

    config = EngineConfig(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=64 * num_sequences,
        enable_prefix_caching=caching,
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
    for step in range(num_steps + 20):
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
        if step >= 20:  # the first are prefill and warming up
            steps.flush.append(flushed - start)
            steps.handle.append(time.thread_time() - begun)
    return steps


def run(args: argparse.Namespace) -> None:
    sizes = [int(size) for size in args.sizes.split(",")]
    about = machine()
    rows = []
    for caching in (False, True):
        for size in sizes:
            gc.collect()
            rounds = [measure(size, args.steps, caching) for _ in range(args.rounds)]
            best = min(rounds, key=lambda steps: percentile(steps.total, 0.5))
            flush, handle, total = (
                1e6 * percentile(part, 0.5) for part in (best.flush, best.handle, best.total)
            )
            cells = (flush, handle, total, 1e6 * percentile(best.total, 0.99), total / size)
            rows.append(["reuse" if caching else "no reuse", f"{size:,}", *map(number, cells)])
    print(f"`scripts/bench {shlex.join(sys.argv[1:])}`: {about}.")
    print(f"µs a step, medians of {args.steps} steps, the best of {args.rounds} rounds.\n")
    head = ["", "running", "flush", "handle", "both", "both, p99", "both, a sequence"]
    print(table(head, rows))
