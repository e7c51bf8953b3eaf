"""A rank of a replica of a model with experts, which it shares with others, without the other
actors.

    python -P one_replica.py WORKER FILES END ORDER     FILES: descriptors of three empty files

END: as one_rank.py has it. ORDER is JSON: the model's spec, engine options, and what each replica
has to do. Prints a line of JSON: the tokens, and the runner's details.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from executor.gpu.carriers import join_carrier, leave_carrier, move_always
from executor.gpu.conftest import NUM_BLOCKS, TwoRunners, load, random_tokens, take_few_programs
from executor.gpu.one_rank import (
    Answer,
    join_on_one_device,
    make_store,
    moved_by,
    share_one_device,
)
from executor.gpu.processes import run_together
from triton import knobs

from ringcast.executor.gpu import parallel
from ringcast.executor.gpu.parallel import Shape
from ringcast.executor.gpu.replica_joining import Joined, Plan
from ringcast.executor.gpu.replicas import Ranks
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.runner import OtherHosts
from ringcast.mq.config import ModelSpec

DP = {"data_parallel_size": 2, "enable_expert_parallel": True}
MODEL = "mixtral"


class Order(msgspec.Struct, frozen=True):
    """prompts: of each replica. Prompt i of replica n begins in step 3 n + i, comes in chunks, and
    gets `num_tokens` tokens. All have `num_steps` steps, with no rows before the first prompt and
    after the last token. hosts: each replica as if on a host of its own.
    """

    spec: ModelSpec
    options: dict[str, Any]
    prompts: list[list[list[int]]]
    num_tokens: int
    num_steps: int
    chunk: int = 16
    hosts: bool = False

    @property
    def ranks(self) -> int:
        """Of each replica."""
        return self.options.get("tensor_parallel_size", 1)

    def alone(self, kind: type[Any], engine: int, **options: Any) -> list[list[int]]:
        """Of a runner that has all experts."""
        ours = ("device", "enforce_eager", "tensor_parallel_size", "enable_eplb", "eplb_config")
        rest = {k: v for k, v in self.options.items() if k not in ours}
        made = load(self.spec, kind, 0, **rest | options)
        return generate(made, self, engine)


def make_order(
    spec: ModelSpec, options: dict[str, Any], lengths: list[list[int]], num_tokens: int
) -> Order:
    """lengths: of each replica's prompts."""
    prompts = [
        [random_tokens(100 * n + i, length) for i, length in enumerate(each)]
        for n, each in enumerate(lengths)
    ]
    chunk = 16
    steps = max(
        3 * n + i + -(-length // chunk) + num_tokens
        for n, each in enumerate(lengths)
        for i, length in enumerate(each)
    )
    return Order(spec, options, prompts, num_tokens, steps + 2, chunk)


def generate(runner: Any, order: Order, engine: int) -> list[list[int]]:
    """With two steps in flight."""
    model = getattr(runner, "_decoder", None) or runner._model
    num_blocks = order.options.get("num_gpu_blocks_override") or NUM_BLOCKS
    s = TwoRunners(runner, None, 16, len(model.groups), num_blocks)
    prompts, left, sent, ended = order.prompts[engine], {}, {}, {}
    for step in range(order.num_steps):
        start = step - 3 * engine
        if 0 <= start < len(prompts):
            s.enter(start, prompts[start])
            left[start], sent[start] = len(prompts[start]), 0
        over = [row for row in sent if row in s.known and sent[row] == order.num_tokens]
        lengths = {
            row: max(1, min(left[row], order.chunk))
            for row in s.known
            if sent[row] < order.num_tokens
        }
        for row, length in lengths.items():
            left[row] -= length
            sent[row] += left[row] <= 0
        pending = s.launch(lengths)
        assert pending.wait(60), "a step is not done after 60 s"
        if step:
            s.read()
        for row in over:  # its last step has been read
            if len(s.known[row]) == len(prompts[row]) + order.num_tokens:
                ended[row] = s.known[row]
                s.remove(row)
    s.read()
    return [ended.get(row) or s.known[row] for row in range(len(prompts))]


def share_all_of_one_device(ranks: Ranks, store_fd: int, shape: Shape) -> Joined:
    """Ranks of all replicas on device 0: without long steps, since NCCL refuses that."""
    plan = Plan(ranks, shape, has_long=False)
    store = make_store(store_fd, ranks.workers)
    return plan.place(share_one_device(store, ranks.worker, ranks.workers, plan.num_bytes))


def run_replicas(order: Order, timeout: float) -> list[Answer]:
    """Each rank a process; of each replica the first one's answer. Raises AssertionError with what
    those that fail have said.
    """
    ranks, workers = order.ranks, order.ranks * len(order.prompts)
    files = [os.memfd_create(name) for name in ("replicas", "store", "carrier")]
    end = os.pipe()
    text = msgspec.json.encode(order).decode()
    words = [*(",".join(map(str, each)) for each in (files, end)), text]
    # To NCCL these are hosts. Where ranks share a device, it must take each for one.
    size = ranks if torch.cuda.device_count() >= workers else 1
    hosts = [{"NCCL_HOSTID": f"host {worker // size}"} for worker in range(workers)]
    arguments = [[str(worker), *words] for worker in range(workers)]
    outputs = run_together(__file__, arguments, timeout, files, end, hosts if order.hosts else None)
    answers = [msgspec.json.decode(printed.splitlines()[-1], type=Answer) for printed in outputs]
    for worker, answer in enumerate(answers):
        assert answer.tokens == answers[worker // ranks * ranks].tokens, worker
    return answers[::ranks]


def main() -> None:
    worker = int(sys.argv[1])
    files, (reads, writes) = ([*map(int, each.split(","))] for each in sys.argv[2:4])
    memory_fd, store_fd, carrier_fd = files
    order = msgspec.json.decode(sys.argv[4], type=Order)
    engine, rank = divmod(worker, order.ranks)
    ranks = Ranks(rank, order.ranks, engine, len(order.prompts))
    place: dict[str, Any] = {"rank": rank, "engine": engine, "group_fd": memory_fd}
    num_devices = torch.cuda.device_count()
    if order.options["device"] == "cpu":
        place["device"] = torch.device("cpu")
        take_few_programs(pytest.MonkeyPatch())
    elif num_devices < ranks.workers:
        place["device"] = torch.device("cuda", 0)
        if not order.hosts:
            place["join"] = partial(share_all_of_one_device, ranks, store_fd)
        # Of a replica's ranks, which then have a file of their own.
        parallel.join_devices = lambda *given: join_on_one_device(*given[:4])
    if order.hosts:
        place["others"] = OtherHosts(0, order.ranks, "127.0.0.1")
    if order.options.get("enable_eplb"):
        move_always()
        if "device" in place:
            place["carrier"] = join_carrier(worker, ranks.workers, carrier_fd, place["device"])
    kind = partial(GpuModelRunner, **place)
    runner = load(order.spec, kind, **order.options, **DP)
    compiled: list[str] = []
    knobs.runtime.jit_cache_hook = lambda fn, **_: compiled.append(fn.name)
    tokens = generate(runner, order, engine)
    answer = Answer(tokens, runner.details(), compiled, moved_by(runner))
    print(msgspec.json.encode(answer).decode(), flush=True)
    os.close(writes)
    os.read(reads, 1)
    runner.leave()
    leave_carrier()


if __name__ == "__main__":
    main()
