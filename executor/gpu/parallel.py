"""What the ranks of a tensor-parallel engine do together on their devices, in the order of each
rank's stream.

Every rank launches the same of it, in the same order (also while it warms up, or captures graphs):

    embedding, attention's output, feed-forward layer    sums, before the residual addition
    logits                                               come together on rank 0
    sampled tokens                                       rank 0's, to all

What is short goes through memory of each rank that the others have mapped, in a kernel that may do
what follows, too (kernels/gpu/all_reduce.py). Sums of long steps are NCCL's. Whatever a graph
holds is short: NCCL's launches by way of torch are on a stream of their own, between which and ours
no launch can be programmatic. Ranks on several hosts map nothing: nccl_group.py has theirs.

A sum is of what the ranks have in the model's type, added up in float32 with the residual and
rounded once. A long one is rounded before the residual is added, too, as it is with one rank.

Memory of a rank, in bytes: flags, three places for sums in turn, the rank's logits, tokens. An
embedding, an attention and a feed-forward layer have a place each, so that no two sums in a row
share one (kernels/gpu/all_reduce.py says why). All sums of a step are alike, short or long.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ...kernels.gpu import all_reduce as kernels
from ...kernels.gpu.norm import AddNorm, add_rms_norm
from ...mq.messages import NewSequence
from .batch import Ints
from .devices import check_peers
from .graphs import LARGEST
from .sampler import Sampler
from .sampler_logprobs import PendingLogprobs

EMBEDDING, ATTENTION, FEED_FORWARD = range(3)
# Bytes that one rank reads from all others in a sum; longer ones are NCCL's.
MOST_READ = 4 << 20
# NCCL and torch, on one host: no network but its own, and no multicast over NVLink, which needs
# rights that a container may lack. What doesn't end is ended by the worker (--step-timeout), not by
# NCCL's watchdog, which would abort in the middle of a message.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


class Shape(NamedTuple):
    """What the ranks exchange. tokens: most of a step. hidden: size of a sum's row. vocab: of a
    rank's logits. samples: most sampled tokens of a step.
    """

    tokens: int
    hidden: int
    vocab: int
    samples: int
    dtype: torch.dtype


class Layout:
    """Of a rank's memory. most_tokens: of steps whose sums are short."""

    def __init__(self, shape: Shape, size: int, has_long: bool) -> None:
        row = shape.hidden * shape.dtype.itemsize
        most = max(MOST_READ // (size - 1) // row, LARGEST) if has_long else shape.tokens
        self.most_tokens = min(most, shape.tokens, kernels.MOST_PROGRAMS)
        sizes = [row * self.most_tokens] * 3
        sizes += [shape.samples * shape.vocab * shape.dtype.itemsize, 4 * shape.samples]
        ends = kernels.FLAGS_BYTES + np.cumsum([aligned(each) for each in sizes])
        starts = [kernels.FLAGS_BYTES, *ends[:-1].tolist()]
        self.sums, self.logits, self.tokens = starts[:3], starts[3], starts[4]
        self.num_bytes = int(ends[-1])


class Memory(NamedTuple):
    """own: uint8, on this rank's device. addresses: of each rank's, as this process has it."""

    own: torch.Tensor
    addresses: list[int]


class DeviceGroup(Protocol):
    """rank: this process's. size: how many there are; with one, nothing is called. most_tokens: of
    steps that a graph may hold. programmatic: whether its launches are kernels of ours alone, which
    may be programmatic, and in a graph on one rank while another makes them one by one.
    """

    rank: int
    size: int
    most_tokens: int
    programmatic: bool

    def place(self, which: int, update_TH: torch.Tensor) -> torch.Tensor:
        """Where a product that is part of a sum is to be written: like update, or that itself."""

    def sum(
        self,
        part_TH: torch.Tensor,
        out_TH: torch.Tensor,
        add_to_TH: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """out = [add_to +] the sum of all ranks' parts, which `place` gave."""

    def sum_add_rms_norm(self, part_TH: torch.Tensor, norm: AddNorm, pdl: bool) -> None:
        """add_rms_norm (kernels/gpu/norm.py) of the sum of all ranks' parts."""

    def own_logits(self, count: int) -> torch.Tensor:
        """Where a rank is to write its logits [count, V]."""

    def gather(self, own_NV: torch.Tensor, out: torch.Tensor | None, pdl: bool) -> None:
        """Rank 0: out = all ranks' logits side by side. Other ranks have no `out`."""

    def broadcast(self, values_N: torch.Tensor, pdl: bool) -> None:
        """Values, int32, become those of rank 0."""

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within, nothing runs that isn't a kernel of Triton's."""

    def leave(self) -> None:
        """After the last step."""


class Alone:
    """A group of one."""

    rank, size, most_tokens, programmatic = 0, 1, sys.maxsize, True

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        yield

    def leave(self) -> None:
        pass


class PeerGroup:
    """long_sum: adds up a tensor of all ranks in place; None if there are no long steps."""

    programmatic = True

    def __init__(
        self,
        rank: int,
        shape: Shape,
        layout: Layout,
        memory: Memory,
        long_sum: Callable[[torch.Tensor], None] | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.size = rank, len(memory.addresses)
        self.most_tokens = layout.most_tokens
        self._shape, self._layout, self._own = shape, layout, memory.own
        self._long_sum, self._close = long_sum, close
        self._peers = kernels.make_peers(rank, memory.addresses, memory.own.device)

    def place(self, which: int, update_TH: torch.Tensor) -> torch.Tensor:
        if len(update_TH) > self._layout.most_tokens:
            return update_TH
        return self._view(self._layout.sums[which], *update_TH.shape)

    def sum(
        self,
        part_TH: torch.Tensor,
        out_TH: torch.Tensor,
        add_to_TH: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        if (place := place_in(self._own, part_TH)) is not None:
            kernels.all_reduce(self._peers, place, out_TH, add_to_TH, pdl=pdl)
            return
        self._sum_long(part_TH)
        put_sum(part_TH, out_TH, add_to_TH)

    def sum_add_rms_norm(self, part_TH: torch.Tensor, norm: AddNorm, pdl: bool) -> None:
        if (place := place_in(self._own, part_TH)) is not None:
            kernels.all_reduce_add_rms_norm(self._peers, place, *norm, pdl=pdl)
            return
        self._sum_long(part_TH)
        add_rms_norm(part_TH, *norm, pdl=pdl)

    def own_logits(self, count: int) -> torch.Tensor:
        return self._view(self._layout.logits, count, self._shape.vocab)

    def gather(self, own_NV: torch.Tensor, out: torch.Tensor | None, pdl: bool) -> None:
        kernels.gather_columns(self._peers, self._layout.logits, own_NV, out, pdl=pdl)

    def broadcast(self, values_N: torch.Tensor, pdl: bool) -> None:
        capacity = self._shape.samples
        kernels.broadcast(self._peers, self._layout.tokens, values_N, capacity, pdl=pdl)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        long_sum, self._long_sum = self._long_sum, lambda _: None
        try:
            yield
        finally:
            self._long_sum = long_sum

    def leave(self) -> None:
        if self._close is not None:
            self._close()

    def _view(self, place: int, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape)) * self._shape.dtype.itemsize
        return self._own[place : place + size].view(self._shape.dtype).view(shape)

    def _sum_long(self, part_TH: torch.Tensor) -> None:
        assert self._long_sum is not None
        self._long_sum(part_TH)


def place_in(memory: torch.Tensor, x: torch.Tensor) -> int | None:
    """Where x begins in a rank's memory, in bytes; None for what is elsewhere."""
    place = x.data_ptr() - memory.data_ptr()
    return place if 0 <= place < len(memory) else None


def put_sum(sum_TH: torch.Tensor, out_TH: torch.Tensor, add_to_TH: torch.Tensor | None) -> None:
    """out = [add_to +] a sum that has been made; out may be it."""
    if add_to_TH is not None:
        torch.add(add_to_TH, sum_TH, out=out_TH)
    elif out_TH.data_ptr() != sum_TH.data_ptr():
        out_TH.copy_(sum_TH)


def join_devices(
    rank: int, size: int, group_fd: int, shape: Shape, device: torch.device, timeout: float
) -> PeerGroup:
    """The group of the ranks on CUDA devices of one host."""
    check_peers(size, device.index - rank)
    layout = Layout(shape, size, has_long=True)
    store = meet(group_fd, size, timeout)
    mapped = map_devices(store, rank, size, layout.num_bytes, device, timeout)
    return PeerGroup(rank, shape, layout, mapped.memory, mapped.add_up, mapped.close)


def meet(group_fd: int, size: int, timeout: float) -> Any:
    """A store (torch.distributed) of those who have the anonymous file, which is empty at first."""
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    import torch.distributed as dist

    store = dist.FileStore(f"/proc/self/fd/{group_fd}", size)
    store.set_timeout(timedelta(seconds=timeout))
    return store


class Mapped(NamedTuple):
    """add_up: a tensor of all, in place, by NCCL. close: at the end."""

    memory: Memory
    add_up: Callable[[torch.Tensor], None]
    close: Callable[[], None]


def map_devices(
    store: Any, rank: int, size: int, num_bytes: int, device: torch.device, timeout: float
) -> Mapped:
    """Memory of all, zeros at first. When this returns all have it."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    dist.init_process_group(
        "nccl",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle: Any = symmetric.rendezvous(own, dist.group.WORLD)
    assert handle is not None
    shift = own.data_ptr() - handle.buffer_ptrs[rank]
    own.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(device_ids=[device.index])
    torch.cuda.synchronize(device)

    def close() -> None:
        """A rank that another has left in the middle of a step is ended as it is."""
        if torch.cuda.current_stream(device).query():
            dist.destroy_process_group()

    addresses = [address + shift for address in handle.buffer_ptrs]
    return Mapped(Memory(own, addresses), dist.all_reduce, close)


def join_processes(rank: int, size: int, group_fd: int, shape: Shape) -> PeerGroup:
    """The same of processes whose kernels are interpreted, for tests: without long steps."""
    layout = Layout(shape, size, has_long=False)
    return PeerGroup(rank, shape, layout, map_peers(rank, size, group_fd, layout.num_bytes))


def map_peers(rank: int, size: int, group_fd: int, num_bytes: int) -> Memory:
    num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    os.ftruncate(group_fd, num_bytes * size)
    whole = torch.frombuffer(mmap.mmap(group_fd, num_bytes * size), dtype=torch.uint8)
    addresses = [whole.data_ptr() + num_bytes * each for each in range(size)]
    return Memory(whole[num_bytes * rank : num_bytes * (rank + 1)], addresses)


class OutputSampler:
    """Rank 0's: what it samples, all ranks get."""

    def __init__(self, sampler: Sampler, group: DeviceGroup) -> None:
        self._sampler, self._group = sampler, group
        self.enter, self.upload = sampler.enter, sampler.upload
        self.is_plain, self.warm_up = sampler.is_plain, sampler.warm_up

    def sample_plain(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        out_S: torch.Tensor,
        pdl: bool = False,
    ) -> None:
        self._sampler.sample_plain(logits_SV, rows_S, positions_S, out_S, pdl)
        self._group.broadcast(out_S, pdl)

    def sample(
        self,
        logits_NV: torch.Tensor,
        rows: Ints,
        positions: Ints,
        rows_N: torch.Tensor,
        positions_N: torch.Tensor,
        out_N: torch.Tensor,
    ) -> PendingLogprobs | None:
        pending = self._sampler.sample(logits_NV, rows, positions, rows_N, positions_N, out_N)
        self._group.broadcast(out_N, pdl=False)
        return pending


class FollowingSampler:
    """Another rank's, which has no logits: it gets rank 0's tokens. All its steps are plain ones,
    whatever their options.
    """

    def __init__(self, group: DeviceGroup) -> None:
        self._group = group

    def enter(self, new: NewSequence) -> None:
        pass

    def upload(self) -> None:
        pass

    def is_plain(self, rows: Ints) -> bool:
        return True

    def warm_up(self, logits_like: torch.Tensor) -> None:
        pass

    def sample_plain(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        out_S: torch.Tensor,
        pdl: bool = False,
    ) -> None:
        self._group.broadcast(out_S, pdl)


AnySampler = Sampler | OutputSampler | FollowingSampler


def make_sampler(make: Callable[[], Sampler], group: DeviceGroup | Alone) -> AnySampler:
    """A rank's. make: what makes the one that samples."""
    if isinstance(group, Alone):
        return make()
    return FollowingSampler(group) if group.rank else OutputSampler(make(), group)


def aligned(size: int) -> int:
    return -(-size // kernels.ALIGNMENT) * kernels.ALIGNMENT
