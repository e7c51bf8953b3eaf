"""How the ranks of replicas that share experts find each other on their devices (replicas.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..runner import OtherHosts
from . import nccl, parallel
from .devices import check_peers
from .lockstep import Lockstep
from .parallel import Alone, DeviceGroup, Layout, Memory, PeerGroup, Shape, map_devices, map_peers
from .replicas import Long, LongRows, PeerRows, Ranks, RowGroup, RowLayout


class Joined(NamedTuple):
    """group: of the replica's ranks."""

    group: DeviceGroup | Alone
    rows: RowGroup


def join(lockstep: Lockstep, shape: Shape, device: torch.device, others: OtherHosts) -> Joined:
    """Raises ConfigError for what devices can't do, and where replicas have rows of other kinds."""
    ranks, timeout = lockstep.ranks, lockstep.timeout
    lockstep.check_rows(shape.dtype, shape.hidden)
    if others.num_here < ranks.workers:
        return join_hosts(lockstep, shape, device, others.address)
    group_fd = lockstep.share_file(0)
    if device.type != "cuda":
        return join_processes(ranks, group_fd, shape)
    return join_devices(ranks, group_fd, shape, device, timeout)


class Plan:
    """What a rank shares with the others, where all are on one host."""

    def __init__(self, ranks: Ranks, shape: Shape, has_long: bool) -> None:
        self.ranks, self.shape = ranks, shape
        self.own = Layout(shape, ranks.ranks, has_long) if ranks.ranks > 1 else None
        self.rows = RowLayout(shape, ranks.replicas, ranks.ranks, has_long)
        self._first = 0 if self.own is None else self.own.num_bytes
        self.num_bytes = self._first + self.rows.num_bytes

    def place(
        self,
        memory: Memory,
        add_up: Callable[[torch.Tensor], None] | None = None,
        long: Long | None = None,
        close: Callable[[], None] | None = None,
    ) -> Joined:
        """memory: of all workers. add_up: a tensor of the replica's ranks."""
        ranks, shape, first = self.ranks, self.shape, self._first
        own: DeviceGroup | Alone = Alone()
        if self.own is not None:
            mine = ranks.within[ranks.engine]
            peers = Memory(memory.own[:first], [memory.addresses[worker] for worker in mine])
            own = PeerGroup(ranks.rank, shape, self.own, peers, add_up)
        rest = Memory(memory.own[first:], [address + first for address in memory.addresses])
        return Joined(own, PeerRows(ranks, shape, own, self.rows, rest, long, close))


def join_devices(
    ranks: Ranks, group_fd: int, shape: Shape, device: torch.device, timeout: float
) -> Joined:
    """Of ranks on one host, who share an empty file."""
    option = "tensor_parallel_size x " if ranks.ranks > 1 else ""
    option += "data_parallel_size"
    check_peers(ranks.workers, device.index - ranks.worker, option)
    plan = Plan(ranks, shape, has_long=True)
    store = parallel.meet(group_fd, ranks.workers, timeout)
    mapped = map_devices(store, ranks.worker, ranks.workers, plan.num_bytes, device, timeout)
    import torch.distributed as dist

    across = _group_of(ranks.across, ranks.rank)
    gather = partial(dist.all_gather_into_tensor, group=across)
    long = Long(gather, partial(dist.reduce_scatter_tensor, group=across))
    add_up = None
    if ranks.ranks > 1:
        add_up = partial(dist.all_reduce, group=_group_of(ranks.within, ranks.engine))
    return plan.place(mapped.memory, add_up, long, mapped.close)


def _group_of(groups: list[list[int]], own: int) -> Any:
    """NCCL's. All workers make all of them."""
    import torch.distributed as dist

    if len(groups) == 1:
        return dist.group.WORLD
    return [dist.new_group(members) for members in groups][own]


def join_processes(ranks: Ranks, group_fd: int, shape: Shape) -> Joined:
    """The same of processes whose kernels are interpreted, for tests: without long steps."""
    plan = Plan(ranks, shape, has_long=False)
    return plan.place(map_peers(ranks.worker, ranks.workers, group_fd, plan.num_bytes))


def join_hosts(lockstep: Lockstep, shape: Shape, device: torch.device, address: str) -> Joined:
    """Of replicas on several hosts, each with all of its ranks on one. address: the master's."""
    ranks, timeout = lockstep.ranks, lockstep.timeout
    nccl.prepare(address)
    own: DeviceGroup | Alone = Alone()
    if ranks.ranks > 1:
        group_fd = lockstep.share_file(ranks.within[ranks.engine][0])
        own = parallel.join_devices(ranks.rank, ranks.ranks, group_fd, shape, device, timeout)
    members = ranks.across[ranks.rank]
    between = nccl.connect(lockstep.host, members, device, timeout)
    assert between is not None
    long = Long(between.all_gather, between.reduce_scatter)
    return Joined(own, LongRows(ranks, shape, own, device, long))
