"""How the rows of replicas that share a mixture's experts come to these and back, on their devices.

The experts are dealt to all T ranks of all N replicas. Whatever the replicas' steps are else, they
have as many rows in it, P (the host sees to that: lockstep.py). A replica's ranks have its rows
alike. At each mixture, in the order of each device's stream:

    gather    all replicas' rows come to each rank, from those of its own number in the others: row
              n x P + t is row t of replica n
    experts   each rank computes all rows for the experts that it has, and makes zeros of the others
    sum       each adds up its own replica's P rows of all ranks

So a mixture is two exchanges, in every step and graph alike, and replicas stay together as long as
P is the same, whichever graphs they replay. Only where NCCL's launches are in the graphs all must
replay the same one (graphs.py): then none has the sampling in it, and that of prompts also has
sequences of one token, whether a replica has any or not. What is beyond a replica's own tokens goes
to no expert: how many are its own lies on the device, with the step's other inputs.

Which way an exchange takes follows from where the replicas are:

    on one host, short     through memory that all have mapped (kernels/gpu/all_reduce.py), as what
                           a replica's ranks say to each other (parallel.py). The sum is one launch
    on one host, long      NCCL's, not in graphs. First each rank gets its own rows, added up of the
                           ranks of its number; then the replica's ranks add up these, as they do
                           after any layer (parallel.py)
    on several hosts       as if all were long, but in graphs, too: NCCL's between hosts. A
                           replica's ranks are on one host, and have their own way

Memory of a rank, if all are on one host: what its replica's ranks exchange (parallel.py; nothing if
it has one rank), flags of the gather, its rows, flags of the sum, its part of all rows' sums.

Nothing is written again before it was read (all_reduce.py): rows are read in a gather, and the sum
of the same mixture, which all ranks have met in, comes before the next ones. Parts are read by all
ranks in a sum. Before a rank writes the next ones it has met those of its number in a gather, and
each of these the ranks of its replica after the attention before that, which was after the sum.

Legend: N replicas, T ranks of each, P rows of each replica, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from ...kernels.gpu import all_reduce as kernels
from ...kernels.gpu.norm import AddNorm, add_rms_norm
from ...mq.config import EngineConfig
from ...mq.errors import ConfigError
from .graphs import LARGEST
from .parallel import (
    FEED_FORWARD,
    MOST_READ,
    Alone,
    DeviceGroup,
    Memory,
    Shape,
    aligned,
    place_in,
    put_sum,
)


class Ranks(NamedTuple):
    """Rank `rank` of `ranks` of replica `engine` of `replicas`."""

    rank: int
    ranks: int
    engine: int
    replicas: int

    @classmethod
    def of(cls, config: EngineConfig, rank: int, engine: int) -> Ranks:
        return cls(rank, config.tensor_parallel_size, engine, config.data_parallel_size)

    @property
    def worker(self) -> int:
        """Its number among all."""
        return self.engine * self.ranks + self.rank

    @property
    def workers(self) -> int:
        return self.replicas * self.ranks

    @property
    def dealt(self) -> tuple[int, int]:
        """As Sharding has it."""
        return self.worker, self.workers

    @property
    def across(self) -> list[list[int]]:
        """Workers of one number in their replicas, by that number."""
        return [list(range(rank, self.workers, self.ranks)) for rank in range(self.ranks)]

    @property
    def within(self) -> list[list[int]]:
        """Workers of one replica."""
        numbers = range(0, self.workers, self.ranks)
        return [list(range(first, first + self.ranks)) for first in numbers]


class RowLayout:
    """Of what a rank shares with other replicas': each half begins with its flags. most_tokens: of
    steps whose exchanges are short.
    """

    def __init__(self, shape: Shape, replicas: int, ranks: int, has_long: bool) -> None:
        row = shape.hidden * shape.dtype.itemsize
        if row % kernels.READ:
            raise ConfigError(
                f"data_parallel_size = {replicas}: rows of {row} bytes can't be exchanged; with "
                f"enable_expert_parallel they must be a multiple of {kernels.READ}"
            )
        others = replicas * ranks - 1
        most = max(MOST_READ // others // row, LARGEST) if has_long else shape.tokens
        self.most_tokens = min(most, shape.tokens, kernels.MOST_PROGRAMS)
        self.sums = kernels.FLAGS_BYTES + aligned(row * self.most_tokens)
        parts = aligned(row * self.most_tokens * replicas)
        self.num_bytes = self.sums + kernels.FLAGS_BYTES + parts


class Long(NamedTuple):
    """NCCL's, among the ranks of one number. gather: (out [N x P, H], rows [P, H]). scatter: (out
    [P, H], parts [N x P, H]): the sums of a replica's own rows.
    """

    gather: Callable[[torch.Tensor, torch.Tensor], Any]
    scatter: Callable[[torch.Tensor, torch.Tensor], Any]


class RowGroup(Protocol):
    """rank, size: of the replica among all. most_tokens: of steps that a graph may hold.
    programmatic: whether launches there may be so. alike: whether all must replay the same graph.
    num_tokens: int32 [N], on the device: of the step.
    """

    rank: int
    size: int
    most_tokens: int
    programmatic: bool
    alike: bool
    num_tokens_N: torch.Tensor

    def place_rows(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Where the rows that all are to get must be written: like x, or that itself."""

    def gather_rows(self, x_PH: torch.Tensor, pdl: bool) -> torch.Tensor:
        """All replicas' rows [N x P, H], of what `place_rows` gave."""

    def place_all(self, tokens: int) -> torch.Tensor:
        """Where a rank's part of all rows' sums is to be written: [N x P, H]."""

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

    def sum_add_rms_norm(self, part_TH: torch.Tensor, norm: AddNorm, pdl: bool) -> None:
        """As DeviceGroup.sum_add_rms_norm."""

    def check_exchanges(self, mixtures: int) -> None:
        """Assert that there were two for each mixture since the last check."""

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        """As DeviceGroup.at_rest, of the replica's own group, too."""

    def leave(self) -> None:
        """After the last step; the replica's own group leaves, too."""


class LongRows:
    """A RowGroup whose exchanges are NCCL's. own: the group of the replica's ranks. long: None if
    there is nothing long.
    """

    programmatic = True  # but for what comes right behind one of NCCL's launches
    alike = True
    num_tokens_N: torch.Tensor

    def __init__(
        self,
        ranks: Ranks,
        shape: Shape,
        own: DeviceGroup | Alone,
        device: torch.device,
        long: Long | None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.size, self.most_tokens = ranks.engine, ranks.replicas, own.most_tokens
        self._own, self._long, self._close, self._exchanges = own, long, close, 0

        def buffer(rows: int) -> torch.Tensor:
            return torch.zeros(rows, shape.hidden, dtype=shape.dtype, device=device)

        self._all_x = buffer(self.size * shape.tokens)
        self._all_y = buffer(0 if long is None else self.size * shape.tokens)
        self._own_y = buffer(0 if long is None else shape.tokens)

    def place_rows(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH

    def gather_rows(self, x_PH: torch.Tensor, pdl: bool) -> torch.Tensor:
        self._exchanges += 1
        out = self._all_x[: self.size * len(x_PH)]
        self._gather(out, x_PH, pdl)
        return out

    def _gather(self, out: torch.Tensor, x_PH: torch.Tensor, pdl: bool) -> None:
        assert self._long is not None
        self._long.gather(out, x_PH)

    def place_all(self, tokens: int) -> torch.Tensor:
        return self._all_y[: self.size * tokens]

    def own_rows(self, part: torch.Tensor) -> torch.Tensor:
        self._exchanges += 1
        return self._own_rows(part)

    def _own_rows(self, part: torch.Tensor) -> torch.Tensor:
        assert self._long is not None
        out = self._own_y[: len(part) // self.size]
        if not isinstance(self._own, Alone):
            out = self._own.place(FEED_FORWARD, out)
        self._long.scatter(out, part)
        return out

    def sum(
        self,
        part_TH: torch.Tensor,
        out_TH: torch.Tensor,
        add_to_TH: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        # Behind NCCL no launch of a graph is programmatic.
        if not isinstance(self._own, Alone):
            self._own.sum(part_TH, out_TH, add_to_TH)
        else:
            put_sum(part_TH, out_TH, add_to_TH)

    def sum_add_rms_norm(self, part_TH: torch.Tensor, norm: AddNorm, pdl: bool) -> None:
        if not isinstance(self._own, Alone):
            self._own.sum_add_rms_norm(part_TH, norm, False)
        else:
            add_rms_norm(part_TH, *norm)

    def check_exchanges(self, mixtures: int) -> None:
        count, self._exchanges = self._exchanges, 0
        assert count == 2 * mixtures, f"{count} exchanges of {mixtures} mixtures of experts"

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        long, self._long = self._long, Long(lambda out, x: None, lambda out, part: None)
        try:
            with self._own.at_rest():
                yield
        finally:
            self._long = long

    def leave(self) -> None:
        if self._close is not None:
            self._close()
        self._own.leave()


class PeerRows(LongRows):
    """The same of ranks on one host, whose short exchanges go through memory that `layout` lays
    out. memory: of all ranks. long: None if there is nothing long.
    """

    alike = False  # no graph has a long one

    def __init__(
        self,
        ranks: Ranks,
        shape: Shape,
        own: DeviceGroup | Alone,
        layout: RowLayout,
        memory: Memory,
        long: Long | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(ranks, shape, own, memory.own.device, long, close)
        self.most_tokens = min(layout.most_tokens, own.most_tokens)
        self._shape, self._most = shape, layout.most_tokens
        self._rows, self._parts = memory.own[: layout.sums], memory.own[layout.sums :]
        device, addresses = memory.own.device, memory.addresses
        across = addresses[ranks.rank :: ranks.ranks]
        sums = [address + layout.sums for address in addresses]
        self._gathering = kernels.make_peers(ranks.engine, across, device)
        self._summing = kernels.make_peers(ranks.worker, sums, device)

    def place_rows(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH if len(x_TH) > self._most else self._view(self._rows, len(x_TH))

    def _gather(self, out: torch.Tensor, x_PH: torch.Tensor, pdl: bool) -> None:
        place = place_in(self._rows, x_PH)
        if place is None:
            super()._gather(out, x_PH, pdl)
        else:
            out_NPH = out.view(self.size, *x_PH.shape)
            kernels.gather_rows(self._gathering, place, out_NPH, pdl=pdl)

    def place_all(self, tokens: int) -> torch.Tensor:
        if tokens > self._most:
            return super().place_all(tokens)
        return self._view(self._parts, self.size * tokens)

    def _own_rows(self, part: torch.Tensor) -> torch.Tensor:
        if place_in(self._parts, part) is None:
            return super()._own_rows(part)
        tokens = len(part) // self.size
        return part[self.rank * tokens : (self.rank + 1) * tokens]

    def sum(
        self,
        part_TH: torch.Tensor,
        out_TH: torch.Tensor,
        add_to_TH: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        if (place := place_in(self._parts, part_TH)) is None:
            super().sum(part_TH, out_TH, add_to_TH, pdl)
        else:
            kernels.all_reduce(self._summing, place, out_TH, add_to_TH, pdl=pdl)

    def sum_add_rms_norm(self, part_TH: torch.Tensor, norm: AddNorm, pdl: bool) -> None:
        if (place := place_in(self._parts, part_TH)) is None:
            super().sum_add_rms_norm(part_TH, norm, pdl)
        else:
            kernels.all_reduce_add_rms_norm(self._summing, place, *norm, pdl=pdl)

    def _view(self, memory: torch.Tensor, rows: int) -> torch.Tensor:
        dtype, hidden = self._shape.dtype, self._shape.hidden
        end = kernels.FLAGS_BYTES + rows * hidden * dtype.itemsize
        return memory[kernels.FLAGS_BYTES : end].view(dtype).view(rows, hidden)
