"""Stands for NCCL between processes whose tensors are in memory of the host: torch's gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from ringcast.executor.parallel import HostGroup


class GlooRanks:
    """A Communicator."""

    def __init__(self, members: Sequence[int], own: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size = members.index(own), len(members)
        self._members, self._group = members, group

    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self._group)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        dist.broadcast(x, self._members[root], group=self._group)

    def send(self, x: torch.Tensor, peer: int) -> None:
        dist.send(x.contiguous(), self._members[peer], group=self._group)

    def receive(self, x: torch.Tensor, peer: int) -> None:
        dist.recv(x, self._members[peer], group=self._group)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        yield


def connect(
    host: HostGroup, members: Sequence[int], device: torch.device, timeout: float
) -> GlooRanks | None:
    """As nccl.connect."""
    fd = host.share_file(0)
    if not dist.is_initialized():
        store = dist.FileStore(f"/proc/self/fd/{fd}", host.size)
        dist.init_process_group("gloo", store=store, rank=host.rank, world_size=host.size)
    own = None
    firsts = host.all_gather(np.array([members[0]], np.int32)).ravel()
    for first in sorted(set(firsts.tolist())):
        group = dist.new_group(np.flatnonzero(firsts == first).tolist())
        own = group if first == members[0] else own
    assert own is not None
    return GlooRanks(members, host.rank, own) if len(members) > 1 else None
