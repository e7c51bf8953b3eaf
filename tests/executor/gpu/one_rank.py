"""A rank of a tensor-parallel engine without the other actors.

    python -P one_rank.py RANK FILE ORDER      FILE: descriptor of the ranks' memory

ORDER is JSON: the model's spec, engine options, prompts, how many tokens each gets. Prints a line
of JSON: the tokens, and the runner's details.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed
from executor.gpu.conftest import GREEDY, NUM_BLOCKS, TwoRunners, load, take_few_programs
from triton import knobs

from ringcast.executor.gpu.parallel import Layout, Memory, PeerGroup, Shape
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.mq.config import ModelSpec
from ringcast.mq.sampling_params import SamplingParams

PARAMS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=1.0, seed=6, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, logprobs=3),
)


class Order(msgspec.Struct, frozen=True):
    """any_params: all kinds of PARAMS in turn; else the first. chunk: tokens of a step at most."""

    spec: ModelSpec
    options: dict[str, Any]
    prompts: list[list[int]]
    num_tokens: int
    any_params: bool = False
    chunk: int = 64


class Answer(msgspec.Struct, frozen=True):
    """compiled: kernels that weren't when the runner was loaded."""

    tokens: list[list[int]]
    details: dict[str, str | int | float]
    compiled: list[str]


def join_on_one_device(rank: int, size: int, group_fd: int, shape: Shape) -> PeerGroup:
    """Ranks that share device 0, one after the other as its driver has it: without long steps,
    since NCCL refuses that.
    """
    layout = Layout(shape, size, has_long=False)
    return PeerGroup(rank, shape, layout, share_one_device(rank, size, group_fd, layout.num_bytes))


def share_one_device(rank: int, size: int, group_fd: int, num_bytes: int) -> Memory:
    own = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    store = torch.distributed.FileStore(f"/proc/self/fd/{group_fd}", size)
    store.set_timeout(timedelta(seconds=60))
    # What it has of it is ours, and so is the process that reads it.
    store.set(f"memory {rank}", pickle.dumps(own.untyped_storage()._share_cuda_()))
    addresses = []
    for other in range(size):
        memory = own
        if other != rank:
            handle = pickle.loads(store.get(f"memory {other}"))
            storage = torch.UntypedStorage._new_shared_cuda(*handle)
            memory = torch.empty(0, dtype=torch.uint8, device="cuda:0").set_(storage)
            _OPENED.append(memory)
        addresses.append(memory.data_ptr())
    return Memory(own, addresses)


_OPENED: list[torch.Tensor] = []  # memory of other ranks, which must stay


def generate(runner: Any, order: Order) -> list[list[int]]:
    """Prompts in chunks, one beginning after the other, and two steps in flight; at the end the
    first one alone.
    """
    num_blocks = order.options.get("num_gpu_blocks_override") or NUM_BLOCKS
    s = TwoRunners(runner, None, 16, len(runner._decoder.groups), num_blocks)
    prompts, left = order.prompts, {}
    for step in range(len(prompts) + order.num_tokens):
        if step < len(prompts):
            params = PARAMS[step % len(PARAMS)] if order.any_params else GREEDY
            s.enter(step, prompts[step], params=params)
            left[step] = len(prompts[step])
        lengths = {row: max(1, min(left[row], order.chunk // len(prompts))) for row in s.known}
        for row, length in lengths.items():
            left[row] -= length
        _launch(s, lengths)
        if step:
            s.read()
    s.read()
    known = {row: list(tokens) for row, tokens in s.known.items()}
    for row in range(1, len(prompts)):
        s.remove(row)
    for _ in range(order.num_tokens):
        _launch(s, {0: 1})
        s.read()
    known[0] = s.known[0]
    return [known[row] for row in range(len(prompts))]


def _launch(s: TwoRunners, lengths: dict[int, int]) -> None:
    assert s.launch(lengths).wait(60), "a step is not done after 60 s"


def run_ranks(order: Order, timeout: float) -> list[Answer]:
    """All ranks, each a process. Raises AssertionError with what those that fail have said."""
    memory_fd = os.memfd_create("ranks")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    text = msgspec.json.encode(order).decode()
    processes = []
    try:
        for rank in range(order.options["tensor_parallel_size"]):
            command = [sys.executable, "-P", __file__, str(rank), str(memory_fd), text]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(
                subprocess.Popen(command, pass_fds=[memory_fd], env=environment, **pipes)
            )
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        os.close(memory_fd)
        for process in processes:
            process.kill()
            process.communicate()
    errors = [
        f"rank {rank} ended with {process.returncode}:\n{said.decode()[-3000:]}"
        for rank, (process, (_, said)) in enumerate(zip(processes, outputs, strict=True))
        if process.returncode
    ]
    assert not errors, "\n".join(errors)
    return [msgspec.json.decode(said.splitlines()[-1], type=Answer) for said, _ in outputs]


def main() -> None:
    rank, group_fd = int(sys.argv[1]), int(sys.argv[2])
    order = msgspec.json.decode(sys.argv[3], type=Order)
    size = order.options["tensor_parallel_size"]
    device, join = None, None
    if order.options["device"] == "cpu":
        device = torch.device("cpu")
        take_few_programs(pytest.MonkeyPatch())
    elif torch.cuda.device_count() < size:
        device = torch.device("cuda", 0)
        join = partial(join_on_one_device, rank, size, group_fd)
    runner = load(order.spec, GpuModelRunner, rank, device, group_fd, join, **order.options)
    compiled: list[str] = []
    knobs.runtime.jit_cache_hook = lambda fn, **_: compiled.append(fn.name)
    tokens = generate(runner, order)
    answer = Answer(tokens, runner.details(), compiled)
    runner.leave()
    print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
