"""Workers on several hosts against one process of the CPU's runner, token by token: as threads with
a stand-in for NCCL and references of all kernels; and as processes whose kernels are interpreted.
"""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import pytest
import torch
from executor.gpu.conftest import ReadsAtOnce, TwoRunners, load, random_tokens
from executor.gpu.fake_nccl import FakeNccl
from executor.gpu.one_rank import Order, generate, generate_in_stages, run_ranks
from executor.gpu.thread_ranks import on_all
from executor.test_mirror import Star

from executor.gpu import conftest
from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import hosts, nccl, runner
from ringcast.executor.gpu.hosts import Ways, ways_of, workers_here
from ringcast.executor.gpu.nccl_group import NcclGroup, NcclPipe
from ringcast.executor.gpu.parallel import Alone, Shape
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.gpu.stages import PeerPipe, Plan
from ringcast.executor.mirror import read_description
from ringcast.executor.runner import OtherHosts
from ringcast.kernels.gpu.blocks import copy_blocks_reference
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.sampling_params import SamplingParams

pytestmark = pytest.mark.interpreted  # test_hosts_on_device.py has a device

SHAPE = Shape(64, 128, 64, 33, torch.bfloat16)


def plans(ranks, stages, num_hosts):
    sizes = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages, "device": "fake"}
    config, workers = build(EngineConfig, sizes), ranks * stages
    others = OtherHosts(0, workers // num_hosts)
    for worker in range(workers):
        here = workers_here(worker, others, workers)
        yield Plan(config, worker, SHAPE, has_long=True, here=here)


@pytest.mark.parametrize(
    ("ranks", "stages", "num_hosts", "ways"),
    [
        (2, 1, 2, {0: ((0, 1), (0,), False), 1: ((0, 1), (1,), False)}),
        (4, 1, 2, {3: ((0, 1, 2, 3), (3,), False)}),
        (1, 2, 2, {0: ((0,), (0, 1), False)}),
        # A stage on each host.
        (2, 2, 2, {0: ((0,), (0, 2), True), 3: ((3,), (1, 3), True)}),
        # Two on each: the link in the middle is between hosts.
        (1, 4, 2, {w: ((w,), (0, 1, 2, 3), True) for w in range(4)}),
        # Halves of a stage.
        (2, 2, 4, {2: ((2, 3), (0, 2), False)}),
        # The one in the middle is on both.
        (2, 3, 2, {0: ((0,), (0, 2, 4), True), 2: ((2, 3), (0, 2, 4), True)}),
        (2, 3, 2, {5: ((5,), (1, 3, 5), True)}),
    ],
)
def test_who_needs_what(ranks, stages, num_hosts, ways):
    made = list(plans(ranks, stages, num_hosts))
    for worker, way in ways.items():
        assert ways_of(made[worker]) == Ways(*way)
    # Members agree on their groups, and those of a host on what it maps.
    every = [ways_of(plan) for plan in made]
    for plan, (group, column, maps) in zip(made, every, strict=True):
        assert all(every[member].group == group for member in group)
        assert all(every[member].column == column for member in column)
        assert all(every[other].maps == maps for other in plan.here)


def test_a_workers_device_is_its_number_on_its_host(specs, monkeypatch):
    asked = []
    monkeypatch.setattr(
        hosts, "find_device", lambda *place: asked.append(place) or torch.device("cpu")
    )
    options = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    config = build(EngineConfig, conftest.with_defaults(options))
    for worker in range(6):
        others = OtherHosts(1, 2, "127.0.0.1")
        GpuModelRunner(config, specs["llama"], worker, others=others)
    assert asked == [(number, 0, 2) for number in (0, 1)] * 3
    asked.clear()
    GpuModelRunner(config, specs["llama"], 5, engine=2)
    assert asked == [(5, 2, 6)]


class Workers:
    """Runners of all workers, each a thread and on a host of its own, which launch a plan together.
    What the output rank has launched is returned. files: the memory of each host, which is one
    unless something mirrors it.
    """

    def __init__(self, spec, files=(), **options):
        config = build(EngineConfig, conftest.with_defaults(options))
        self.output_rank, memory_fd = config.output_rank, os.memfd_create("workers")
        links = 1 if files else 0

        def make(worker):
            group_fd = files[worker] if files else memory_fd
            place = {"rank": worker, "group_fd": group_fd, "others": OtherHosts(links, 1)}
            one = GpuModelRunner(config, spec, device=torch.device("cpu"), **place)
            one.load(lambda *_: None)
            return one

        self.runners = on_all(make, range(config.num_workers))
        os.close(memory_fd)

    def launch(self, plan):
        pending = on_all(lambda runner: runner.launch(plan), self.runners)
        for worker in range(self.output_rank):
            assert pending[worker].read().token_ids == b""
        outputs = [each.read() for each in pending[self.output_rank :]]
        assert len({output.token_ids for output in outputs}) == 1
        return pending[self.output_rank]


@pytest.fixture
def workers(specs, monkeypatch):
    every = []

    def make(name, **options):
        library = FakeNccl()
        monkeypatch.setattr(nccl, "library", lambda: library)
        conftest.take_references(monkeypatch)
        conftest.take_routing_references(monkeypatch)
        monkeypatch.setattr(runner, "copy_blocks", copy_blocks_reference)
        mine = Workers(specs[name], **options)
        mine.library = library
        every.extend(mine.runners)
        ours = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "files")
        alone = {name: value for name, value in options.items() if name not in ours}
        reference = load(specs[name], CpuModelRunner, **alone)
        return TwoRunners(mine, reference, 16, len(mine.runners[0]._decoder.groups))

    yield make
    for one in every:
        one.leave()


def check(s):
    s.enter(3, random_tokens(1, 43))
    s.run({3: 43})
    s.run({3: 1})  # alone: a way of its own
    s.enter(0, random_tokens(2, 37))
    s.enter(5, random_tokens(3, 1))
    s.run({0: 10, 3: 1, 5: 1})
    s.run({3: 1, 0: 27, 5: 1})
    for _ in range(2):
        s.run({0: 1, 3: 1, 5: 1})


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gemma3", {"tensor_parallel_size": 2}),
        pytest.param("llama", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        ("gemma3", {"pipeline_parallel_size": 2}),
        pytest.param("llama", {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            "mixtral",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_hosts_have_the_tokens_of_one_process(name, sizes, workers):
    s = workers(name, **sizes)
    group, stage = s.mine.runners[0]._group, s.mine.runners[0]._stage
    if "tensor_parallel_size" in sizes:
        assert isinstance(group, NcclGroup)
        assert not group.programmatic
        assert not stage.crosses
    else:
        assert (type(group), type(stage._outlet)) == (Alone, NcclPipe)
        assert group.programmatic
        assert stage.crosses
    assert not s.mine.runners[0]._launcher.fuses
    check(s)


@pytest.fixture
def mirrored():
    """The files of two hosts whose memory is mirrored, as their gateways do it."""
    files = [os.memfd_create("host") for _ in range(2)]
    ended = threading.Event()

    def mirror():
        while not all(descriptions := [read_description(fd) for fd in files]):
            if ended.wait(0.01):
                return
        assert descriptions[0] == descriptions[1]
        memories = [np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.int64) for fd in files]
        Star((), [(0,), (1,)], memories, descriptions[0]).pump(ended)

    thread = threading.Thread(target=mirror)
    thread.start()
    yield files
    ended.set()
    thread.join()
    for fd in files:
        os.close(fd)


def test_ids_and_tokens_go_through_mirrored_memory(workers, mirrored):
    check(workers("llama", files=mirrored, pipeline_parallel_size=2))


def test_stages_of_ranks_on_four_hosts(workers):
    s = workers("qwen3", tensor_parallel_size=2, pipeline_parallel_size=2)
    check(s)
    calls = s.mine.library.calls
    calls.clear()
    s.run({0: 1, 3: 1})
    each = [[name for name, rank in calls if name == what] for what in ("send", "receive")]
    # From stage to stage twice, and the logits of one rank.
    assert [len(them) for them in each] == [3, 3]
    layers = 2 * 2 * 2  # two sums each, on two ranks
    assert len([name for name, _ in calls if name == "all_reduce"]) == layers + 2
    assert len([name for name, _ in calls if name == "broadcast"]) == 2


@pytest.mark.slow
def test_any_options_of_sampling_are_the_output_ranks(workers):
    s = workers("llama", tensor_parallel_size=2)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2, ignore_eos=True)
    s.enter(1, random_tokens(4, 30), params=params)
    s.enter(2, random_tokens(5, 20), params=SamplingParams(temperature=0.0, prompt_logprobs=2))
    assert len(s.run({1: 30, 2: 20}).prompt_logprobs) > 1
    s.enter(3, random_tokens(6, 2))
    s.run({3: 2, 1: 1})
    for _ in range(2):  # of three, which other ranks take for four
        assert s.run({1: 1, 2: 1, 3: 1}).logprobs is not None


def test_all_have_graphs_of_the_same_sizes(workers, monkeypatch):
    """Though one stage has more weights than another."""
    s = workers("gemma3", pipeline_parallel_size=2)
    first, last = s.mine.runners
    assert first._decoder.num_bytes != last._decoder.num_bytes
    said = [(900, 5 << 30), (700, (7 << 30) - 1)]
    agreed = on_all(lambda worker: s.mine.runners[worker]._stage.agree(*said[worker]), range(2))
    assert agreed == [(700, 7 << 30)] * 2


def test_what_warms_up_reaches_nobody(workers):
    s = workers("qwen3", tensor_parallel_size=2)
    group, calls = s.mine.runners[1]._group, s.mine.library.calls
    calls.clear()
    x, out = torch.ones(2, 32), torch.zeros(2, 32)
    with group.at_rest():
        group.sum(x, out, x)
        group.gather(group.own_logits(2), None, False)
        group.broadcast(torch.zeros(2, dtype=torch.int32), False)
    assert calls == []
    assert (out == 2).all()
    assert not group._is_at_rest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "stages"), [("llama", 2, 1), ("gemma3", 1, 2), ("qwen3", 2, 2)]
)
def test_processes_with_every_kernel(name, ranks, stages, specs):
    """The last one with memory that the ranks of a stage map, on each host."""
    prompts = [random_tokens(1, 5), random_tokens(2, 3)]
    sizes = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    order = Order(specs[name], {"device": "cpu"} | sizes, prompts, num_tokens=3, hosts=2)
    run = generate if stages == 1 else generate_in_stages
    want = run(ReadsAtOnce(load(specs[name], CpuModelRunner)), order)
    answers = run_ranks(order, timeout=280)
    first = (stages - 1) * ranks
    assert [answer.tokens for answer in answers[first:]] == [want] * ranks
    assert [answer.tokens for answer in answers[:first]] == [prompts] * first


def test_what_a_host_maps_lies_where_its_workers_say(monkeypatch):
    """Of four stages on two hosts: the second host's workers are 2 and 3, and have its memory."""
    memory = hosts.Memory(torch.zeros(1 << 20, dtype=torch.uint8), [1 << 32, 1 << 33])
    made = list(plans(1, 4, 2))
    ends = made[2].outlet(memory), made[3].inlet(memory)
    assert all(isinstance(end, PeerPipe) for end in ends)
    assert [int(end.end.inbox) for end in ends] == [1 << 33] * 2
    assert [int(end.end.outbox) for end in ends] == [1 << 32] * 2
