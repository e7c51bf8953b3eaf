"""How the rows of replicas that share a mixture's experts come to these and back, on their devices.

Each replica has one device. Whatever their steps are else, they have as many rows in it, P (the
host sees to that: lockstep.py). At each mixture, in the order of each device's stream:

    gather    all replicas' rows come to each: row n x P + t is row t of replica n
    experts   each computes all rows for the experts that it has, and makes zeros of the others
    sum       each adds up its own P rows of all

So a mixture is two exchanges, in every step and graph alike, and replicas stay together though one
replays the graph of a decode step and another that of prompts, as long as P is the same. What is
beyond a replica's own tokens goes to no expert: how many are its own lies on the device, with the
step's other inputs.

Short exchanges go through memory that all have mapped, as those of ranks do (parallel.py,
kernels/gpu/all_reduce.py); long ones are NCCL's. What is gathered and what is summed take turns, so
each needs one place.

Legend: N replicas, P rows of each, T tokens of this one, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from ...kernels.gpu import all_reduce as kernels
from ...mq.errors import ConfigError
from .devices import check_peers
from .graphs import LARGEST
from .parallel import (
    MOST_READ,
    Layout,
    Memory,
    PeerGroup,
    Shape,
    aligned,
    map_devices,
    map_peers,
    meet,
)


class RowLayout(Layout):
    """Of a replica's memory: flags, its rows, its part of the sums of all rows."""

    def __init__(self, shape: Shape, size: int, has_long: bool) -> None:
        row = shape.hidden * shape.dtype.itemsize
        if row % kernels.READ:
            raise ConfigError(
                f"data_parallel_size = {size}: rows of {row} bytes can't be exchanged; with "
                f"enable_expert_parallel they must be a multiple of {kernels.READ}"
            )
        most = max(MOST_READ // (size - 1) // row, LARGEST) if has_long else shape.tokens
        self.most_tokens = min(most, shape.tokens, kernels.MOST_PROGRAMS)
        self.rows = kernels.FLAGS_BYTES
        self.parts = self.rows + aligned(row * self.most_tokens)
        self.num_bytes = self.parts + aligned(row * self.most_tokens * size)


class Long(NamedTuple):
    """NCCL's. gather: (out [N x P, H], rows [P, H]). sum: in place, of [N x P, H]."""

    gather: Callable[[torch.Tensor, torch.Tensor], Any]
    sum: Callable[[torch.Tensor], Any]


class RowGroup(Protocol):
    """rank, size: of the replica among all. num_tokens: int32 [N], on the device: of the step."""

    rank: int
    size: int
    most_tokens: int
    programmatic: bool
    num_tokens_N: torch.Tensor

    def place_rows(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Where the rows that all are to get must be written: like x, or that itself."""

    def gather_rows(self, x_PH: torch.Tensor, pdl: bool) -> torch.Tensor:
        """All replicas' rows [N x P, H], of what `place_rows` gave."""

    def place_all(self, tokens: int) -> torch.Tensor:
        """Where a replica's part of all rows' sums is to be written: [N x P, H]."""

    def own_rows(self, part: torch.Tensor) -> torch.Tensor:
        """Of what `place_all` gave: the part [P, H] that `sum` and `sum_add_rms_norm` take."""

    def sum(
        self,
        part_TH: torch.Tensor,
        out_TH: torch.Tensor,
        add_to_TH: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """As DeviceGroup.sum."""

    def sum_add_rms_norm(
        self,
        part_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        out_TH: torch.Tensor,
        eps: float,
        update_weight_H: torch.Tensor | None,
        pdl: bool,
    ) -> None:
        """As DeviceGroup.sum_add_rms_norm."""

    def check_exchanges(self, mixtures: int) -> None:
        """Assert that there were two for each mixture since the last check."""

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        """As DeviceGroup.at_rest."""

    def leave(self) -> None:
        """After the last step."""


class PeerRows(PeerGroup):
    """A RowGroup. long: None if there are no long steps."""

    num_tokens_N: torch.Tensor

    def __init__(
        self,
        rank: int,
        shape: Shape,
        layout: RowLayout,
        memory: Memory,
        long: Long | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        # A part that isn't in shared memory has been added up already, by `own_rows`.
        super().__init__(rank, shape, layout, memory, lambda _: None, close)
        self._rows_place, self._parts_place, self._long = layout.rows, layout.parts, long
        self._exchanges = 0
        device, most = memory.own.device, self.size * shape.tokens
        self._all_x = torch.zeros(most, shape.hidden, dtype=shape.dtype, device=device)
        most = most if shape.tokens > self.most_tokens else 0
        self._all_y = torch.zeros(most, shape.hidden, dtype=shape.dtype, device=device)

    def place_rows(self, x_TH: torch.Tensor) -> torch.Tensor:
        if len(x_TH) > self.most_tokens:
            return x_TH
        return self._view(self._rows_place, *x_TH.shape)

    def gather_rows(self, x_PH: torch.Tensor, pdl: bool) -> torch.Tensor:
        self._exchanges += 1
        tokens, hidden = x_PH.shape
        out = self._all_x[: self.size * tokens]
        if (place := self._place_of(x_PH)) is not None:
            kernels.gather_rows(self._peers, place, out.view(self.size, tokens, hidden), pdl=pdl)
        else:
            assert self._long is not None
            self._long.gather(out, x_PH)
        return out

    def place_all(self, tokens: int) -> torch.Tensor:
        if tokens > self.most_tokens:
            return self._all_y[: self.size * tokens]
        return self._view(self._parts_place, self.size * tokens, self._shape.hidden)

    def own_rows(self, part: torch.Tensor) -> torch.Tensor:
        self._exchanges += 1
        if self._place_of(part) is None:
            assert self._long is not None
            self._long.sum(part)
        tokens = len(part) // self.size
        return part[self.rank * tokens : (self.rank + 1) * tokens]

    def check_exchanges(self, mixtures: int) -> None:
        count, self._exchanges = self._exchanges, 0
        assert count == 2 * mixtures, f"{count} exchanges of {mixtures} mixtures of experts"

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        long, self._long = self._long, Long(lambda out, x: None, lambda part: None)
        try:
            yield
        finally:
            self._long = long


def join_device_rows(
    rank: int, size: int, group_fd: int, shape: Shape, device: torch.device, timeout: float
) -> PeerRows:
    """The group of replicas on CUDA devices of one host, which share an empty file."""
    check_peers(size, device.index - rank, "data_parallel_size")
    layout = RowLayout(shape, size, has_long=True)
    store = meet(group_fd, size, timeout)
    mapped = map_devices(store, rank, size, layout.num_bytes, device, timeout)
    import torch.distributed as dist

    long = Long(dist.all_gather_into_tensor, mapped.add_up)
    return PeerRows(rank, shape, layout, mapped.memory, long, mapped.close)


def join_process_rows(rank: int, size: int, group_fd: int, shape: Shape) -> PeerRows:
    """The same of processes whose kernels are interpreted, for tests: without long steps."""
    layout = RowLayout(shape, size, has_long=False)
    memory = map_peers(rank, size, group_fd, layout.num_bytes)
    return PeerRows(rank, shape, layout, memory)
