"""The workers of an engine on several hosts: who reaches whom in which way.

Workers are dealt to hosts in their order, as many to each. What lies within one host goes through
memory that its devices map, what doesn't by NCCL:

    ranks of a stage that are all on one host     PeerGroup (parallel.py)
    ranks of a stage on several                   NcclGroup (nccl_group.py), for whatever they do
    two workers of neighbouring stages, likewise  PeerPipe (stages.py), or NcclPipe (nccl_group.py)
    sampled tokens, to the stages before          memory of the processes, mirrored over hosts
                                                  (../mirror.py), as those on processors have it

In that mirrored memory the workers also find each other, and agree on the sizes of graphs: NCCL
sends as many rows as it receives, so all stages pad a step alike.

Who waits for a host that has died waits in a kernel. The link with that host ends, too; with it the
gateway ends (actors/ranks_gateway.py), and its supervisor kills the workers, which ends the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.cpu import exchange
from ...mq.config import EngineConfig
from ..mirror import Exchange, Part
from ..mirror import Pipe as TokenPipe
from ..parallel import HostGroup, map_parts
from ..pipeline import KERNELS as PIPE_KERNELS
from ..pipeline import Link
from ..runner import OtherHosts
from . import nccl
from .devices import check_access, check_ranks, find_device
from .nccl import Communicator
from .nccl_group import NcclGroup, NcclPipe
from .parallel import Alone, DeviceGroup, Memory, Shape, map_devices, map_peers, meet
from .stages import Agree, GpuStage, Place, Plan, StagePipe, sums_of_stages

_LARGEST = (1 << 31) - 1


def workers_here(worker: int, others: OtherHosts | None, workers: int) -> range:
    """All of the host that this worker of `workers` is on."""
    num_here = workers if others is None else others.num_here
    first = worker // num_here * num_here
    return range(first, first + num_here)


def device_here(
    config: EngineConfig, worker: int, engine: int, others: OtherHosts | None
) -> torch.device:
    """A worker's: by its number among those of its host, of all replicas there. Raises as
    find_device.
    """
    if config.lockstep:
        first = 0 if others is None else others.first
        return find_device(worker - first, engine, config.num_workers)
    here = workers_here(worker, others, config.num_workers)
    return find_device(worker - here.start, engine, len(here))


class Ways(NamedTuple):
    """What a worker needs. group, column: the members of what NCCL connects, itself alone if it
    needs none: the ranks of its stage, and those of its number in all stages. maps: whether devices
    of its host map each other's memory.
    """

    group: tuple[int, ...]
    column: tuple[int, ...]
    maps: bool


def ways_of(plan: Plan) -> Ways:
    workers, ranks, num_here = plan.workers, plan.ranks, len(plan.here)
    alone: tuple[int, ...] = (plan.worker,)
    group = alone if plan.are_here(*plan.members) else tuple(plan.members)
    column = tuple(range(plan.rank, workers, ranks))
    crosses = any(a // num_here != (a + ranks) // num_here for a in column[:-1])
    maps = plan.layout is not None or any(plan.are_here(a, a + ranks) for a in plan.here)
    return Ways(group, column if crosses else alone, maps)


class _Shared(NamedTuple):
    """world: all workers. tokens: this one's end of what sampled tokens go through."""

    world: HostGroup
    tokens: Link | None


class _Mapped(NamedTuple):
    """Of this host's devices. add_up: as Plan.group has it."""

    memory: Memory
    add_up: Callable[[torch.Tensor], None] | None = None
    close: Callable[[], None] | None = None


def join_hosts(
    config: EngineConfig,
    worker: int,
    others: OtherHosts,
    group_fd: int,
    shape: Shape,
    device: torch.device,
) -> Place:
    """group_fd: an empty file that the workers of this host have, and those who mirror it.

    Raises ConfigError for devices that can't be connected so, and PeerDeadError or TimeoutError
    where not all come.
    """
    here = workers_here(worker, others, config.num_workers)
    plan = Plan(config, worker, shape, device.type == "cuda", here)
    ways = ways_of(plan)
    if device.type == "cuda":
        nccl.prepare(others.address)
    shared = _meet(plan, others.num_links, group_fd)
    world = shared.world
    patience = plan.timeout / 2  # as the world has it
    ranks = nccl.connect(world, ways.group, device, patience)
    column = nccl.connect(world, ways.column, device, patience)
    fd = world.share_file(here.start)  # which torch's store opens again and again
    mapped = _map(plan, fd, device) if ways.maps else None
    group: DeviceGroup | Alone = Alone()
    if ranks is not None:
        group = NcclGroup(ranks, shape, device)
    elif plan.ranks > 1:
        assert mapped is not None
        group = plan.group(mapped.memory, mapped.add_up)
    inlet, outlet = _pipes(plan, column, mapped, device)

    def leave() -> None:
        world.leave()
        if mapped is not None and mapped.close is not None:
            mapped.close()
        os.close(fd)

    own = None if mapped is None else mapped.memory.own
    agree = _agree_in(world)
    return Place(group, GpuStage(plan.position, inlet, outlet, shared.tokens, own, leave, agree))


def _meet(plan: Plan, num_links: int, group_fd: int) -> _Shared:
    everyone, last = tuple(range(plan.workers)), plan.workers - plan.ranks
    readers, slots, words = plan.mail
    parts: list[Part] = [Exchange(everyone)]
    if readers:
        parts.append(TokenPipe(last, everyone[:last], slots, words))
    for kernel in (exchange.exchange_kernel, *(PIPE_KERNELS if readers else ())):
        kernel.compile(torch.float32)
    memory = map_parts(group_fd, parts, num_links)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is said is too short for more
    try:
        world = HostGroup(plan.worker, plan.workers, memory[0], plan.timeout)
    finally:
        torch.set_num_threads(threads)
    tokens = None
    if readers and plan.hears:
        tokens = Link(memory[1], plan.mail, plan.reader, world.has_left, plan.timeout)
    return _Shared(world, tokens)


def _map(plan: Plan, fd: int, device: torch.device) -> _Mapped:
    """fd: an empty file that this host's workers have."""
    first, size = plan.here.start, len(plan.here)
    if device.type != "cuda":  # kernels are interpreted, for tests
        return _Mapped(map_peers(plan.worker - first, size, fd, plan.num_bytes))
    if plan.layout is not None:
        check_ranks(plan.ranks)
    option = f"{plan.workers} workers, {size} on each host"
    rank = plan.worker - first
    check_access(option, device.index - rank, size)
    store = meet(fd, size, plan.timeout)
    found = map_devices(store, rank, size, plan.num_bytes, device, plan.timeout)
    return _Mapped(found.memory, sums_of_stages(plan), found.close)


def _pipes(
    plan: Plan, column: Communicator | None, mapped: _Mapped | None, device: torch.device
) -> tuple[StagePipe | None, StagePipe | None]:
    """From the stage before, and to the next one."""
    inlet: StagePipe | None = None
    outlet: StagePipe | None = None
    if not plan.position.is_first:
        if not plan.are_here(plan.worker - plan.ranks):
            inlet = _connect(plan, column, -1, device)
        elif mapped is not None:
            inlet = plan.inlet(mapped.memory)
    if not plan.position.is_last:
        if not plan.are_here(plan.worker + plan.ranks):
            outlet = _connect(plan, column, 1, device)
        elif mapped is not None:
            outlet = plan.outlet(mapped.memory)
    return inlet, outlet


def _connect(plan: Plan, column: Communicator | None, step: int, device: torch.device) -> NcclPipe:
    """The first stage's come first, so nobody waits in a circle."""
    assert column is not None
    made = NcclPipe(column, plan.number + step, plan.shape, device)
    made.connect()
    return made


def _agree_in(world: HostGroup) -> Agree:
    def agree(most_tokens: int, weight_bytes: int) -> tuple[int, int]:
        mebibytes = -(-weight_bytes >> 20)
        said = world.all_gather(np.array([min(most_tokens, _LARGEST), mebibytes], np.int32))
        return int(said[:, 0].min()), int(said[:, 1].max()) << 20

    return agree
