"""A worker of an engine of several, ranks or stages, without the other actors.

    python -P one_rank.py WORKER FILES END ORDER     FILES: descriptors of the workers' memory, and
                                                     of an empty file (carriers.py)

END: the two of a pipe that nobody writes to. Whoever is done closes his, and all end when all are
done: until then somebody may use the memory of another. ORDER is JSON: the model's spec, engine
options, prompts, how many tokens each gets. Prints a line of JSON: the tokens, and the runner's
details.
"""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed
from executor.gpu.carriers import join_carrier, leave_carrier, move_always
from executor.gpu.conftest import (
    GREEDY,
    NUM_BLOCKS,
    TwoRunners,
    load,
    take_few_programs,
    with_defaults,
)
from executor.gpu.processes import run_together
from triton import knobs

from executor.gpu import gloo_ranks
from ringcast.executor.gpu import hosts
from ringcast.executor.gpu.parallel import Layout, Memory, PeerGroup, Shape
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.gpu.stages import Place, Plan, mail_fd
from ringcast.executor.runner import OtherHosts
from ringcast.mq.config import EngineConfig, ModelSpec, build
from ringcast.mq.sampling_params import SamplingParams

PARAMS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=1.0, seed=6, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, logprobs=3),
)


class Order(msgspec.Struct, frozen=True):
    """any_params: all kinds of PARAMS in turn; else the first. chunk: tokens of a step at most.
    hosts: as if workers were on so many.
    """

    spec: ModelSpec
    options: dict[str, Any]
    prompts: list[list[int]]
    num_tokens: int
    any_params: bool = False
    chunk: int = 64
    hosts: int = 1


class Answer(msgspec.Struct, frozen=True):
    """compiled: kernels that weren't when the runner was loaded. moved: experts that were."""

    tokens: list[list[int]]
    details: dict[str, str | int | float]
    compiled: list[str]
    moved: int = 0


def moved_by(runner: GpuModelRunner) -> int:
    balancer = runner._experts._balancer
    return 0 if balancer is None else balancer.moved


def join_on_one_device(rank: int, size: int, group_fd: int, shape: Shape) -> PeerGroup:
    """Ranks that share device 0, one after the other as its driver has it: without long steps,
    since NCCL refuses that.
    """
    layout = Layout(shape, size, has_long=False)
    memory = share_one_device(make_store(group_fd, size), rank, size, layout.num_bytes)
    return PeerGroup(rank, shape, layout, memory)


def join_stages_on_one_device(
    options: dict[str, Any], worker: int, group_fd: int, shape: Shape
) -> Place:
    """All workers of several stages alike."""
    plan = Plan(build(EngineConfig, options), worker, shape, has_long=False)
    store = make_store(group_fd, plan.workers)
    mail = plan.open_mail(mail_fd(plan, store))  # whose file ends with the process
    return plan.place(share_one_device(store, worker, plan.workers, plan.num_bytes), mail)


def make_store(group_fd: int, size: int) -> torch.distributed.FileStore:
    store = torch.distributed.FileStore(f"/proc/self/fd/{group_fd}", size)
    store.set_timeout(timedelta(seconds=60))
    return store


def share_one_device(
    store: torch.distributed.FileStore, rank: int, size: int, num_bytes: int
) -> Memory:
    own = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
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


_OPENED: list[torch.Tensor] = []  # memory of other workers, which must stay


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


def generate_in_stages(runner: Any, order: Order) -> list[list[int]]:
    """As a pipeline has it: a row is in one step at a time, and two steps with other rows are in
    flight; at the end the first row alone. Tokens are those of the last stage.
    """
    num_blocks = order.options.get("num_gpu_blocks_override") or NUM_BLOCKS
    s = TwoRunners(runner, None, 16, len(runner._decoder.groups), num_blocks)
    prompts, left = order.prompts, [len(prompt) for prompt in order.prompts]
    turns = 2 * (max(left) * len(prompts) // order.chunk + order.num_tokens)
    for turn in range(turns):
        rows = range(turn % 2, len(prompts), 2)
        for row in rows if turn < 2 else ():
            params = PARAMS[row % len(PARAMS)] if order.any_params else GREEDY
            s.enter(row, prompts[row], params=params)
        lengths = {row: max(1, min(left[row], order.chunk // len(prompts))) for row in rows}
        for row, length in lengths.items():
            left[row] -= length
        if turn >= 2:
            _read(s)
        s.launch(lengths)
    _read(s)
    _read(s)
    known = {row: list(tokens) for row, tokens in s.known.items()}
    for row in range(1, len(prompts)):
        s.remove(row)
    for _ in range(order.num_tokens):
        s.launch({0: 1})
        _read(s)
    known[0] = s.known[0]
    return [known[row] for row in range(len(prompts))]


def _read(s: TwoRunners) -> None:
    _, step = s.oldest
    assert step.wait(60), "a step is not done after 60 s"
    s.read()


def _launch(s: TwoRunners, lengths: dict[int, int]) -> None:
    assert s.launch(lengths).wait(60), "a step is not done after 60 s"


def run_ranks(order: Order, timeout: float) -> list[Answer]:
    """All workers, each a process. Raises AssertionError with what those that fail have said."""
    files = [os.memfd_create(name) for name in ("ranks", "carrier")]
    end, workers = os.pipe(), range(num_workers(order.options))
    rest = [*(f"{a},{b}" for a, b in (files, end)), msgspec.json.encode(order).decode()]
    hosts = [worker * order.hosts // len(workers) for worker in workers]
    # With one for all, NCCL refuses two workers of one device.
    own = [{"NCCL_HOSTID": f"host {host}"} if order.hosts > 1 else {} for host in hosts]
    arguments = [[str(worker), *rest] for worker in workers]
    outputs = run_together(__file__, arguments, timeout, files, end, own)
    return [msgspec.json.decode(printed.splitlines()[-1], type=Answer) for printed in outputs]


def num_workers(options: dict[str, Any]) -> int:
    return options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)


def main() -> None:
    rank = int(sys.argv[1])
    (group_fd, carrier_fd), (reads, writes) = (map(int, each.split(",")) for each in sys.argv[2:4])
    order = msgspec.json.decode(sys.argv[4], type=Order)
    size, stages = num_workers(order.options), order.options.get("pipeline_parallel_size", 1)
    place: dict[str, Any] = {}
    device = None
    if order.hosts > 1:
        place["others"] = OtherHosts(0, size // order.hosts, "127.0.0.1")
    if order.options["device"] == "cpu":
        device = torch.device("cpu")
        take_few_programs(pytest.MonkeyPatch())
        hosts.nccl.connect = gloo_ranks.connect
    elif order.hosts == 1 and torch.cuda.device_count() < size:
        device = torch.device("cuda", 0)
        place["join"] = partial(join_on_one_device, rank, size, group_fd)
        whole = with_defaults(order.options)
        place["join_stages"] = partial(join_stages_on_one_device, whole, rank, group_fd)
    if order.options.get("enable_eplb"):
        move_always()
        if device is not None:
            place["carrier"] = join_carrier(rank, size, carrier_fd, device)
    place |= {"rank": rank, "device": device, "group_fd": group_fd}
    runner = load(order.spec, partial(GpuModelRunner, **place), **order.options)
    compiled: list[str] = []
    knobs.runtime.jit_cache_hook = lambda fn, **_: compiled.append(fn.name)
    tokens = (generate if stages == 1 else generate_in_stages)(runner, order)
    answer = Answer(tokens, runner.details(), compiled, moved_by(runner))
    print(msgspec.json.encode(answer).decode(), flush=True)
    os.close(writes)
    os.read(reads, 1)
    runner.leave()
    leave_carrier()
    os._exit(0)  # as a worker ends


if __name__ == "__main__":
    main()
