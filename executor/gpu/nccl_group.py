"""What ranks and stages on several hosts do together, as parallel.py and stages.py say: by NCCL.

A sum is one launch, in place, in the model's type; what follows (the residual addition, a norm) is
another. Logits are sent to rank 0, which puts them side by side. All of it can be in graphs, of any
size, but not tokens: graphs.py says why. No launch here may be programmatic, nor what comes right
behind one of NCCL's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from ...kernels.gpu.norm import AddNorm, add_rms_norm
from ...kernels.gpu.stage_pipe import Item, add_update
from .nccl import Communicator
from .parallel import Shape, put_sum


class NcclGroup:
    """A DeviceGroup."""

    most_tokens, programmatic = sys.maxsize, False

    def __init__(self, ranks: Communicator, shape: Shape, device: torch.device) -> None:
        self.rank, self.size, self._ranks = ranks.rank, ranks.size, ranks
        self._is_at_rest = False
        self._tokens = torch.zeros(shape.samples, dtype=torch.int32, device=device)
        # Rank 0: everybody's logits, its own first. Others: their own.
        parts = 1 if self.rank else self.size
        self._logits = torch.zeros(
            parts, shape.samples, shape.vocab, dtype=shape.dtype, device=device
        )

    def place(self, which: int, update_TH: torch.Tensor) -> torch.Tensor:
        return update_TH

    def sum(
        self,
        part_TH: torch.Tensor,
        out_TH: torch.Tensor,
        add_to_TH: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        self._add_up(part_TH)
        put_sum(part_TH, out_TH, add_to_TH)

    def sum_add_rms_norm(self, part_TH: torch.Tensor, norm: AddNorm, pdl: bool) -> None:
        self._add_up(part_TH)
        add_rms_norm(part_TH, *norm)

    def own_logits(self, count: int) -> torch.Tensor:
        return self._logits[0, :count]

    def gather(self, own_NV: torch.Tensor, out: torch.Tensor | None, pdl: bool) -> None:
        if self._is_at_rest:
            return
        if out is None:
            self._ranks.send(own_NV, 0)
            return
        count, columns = own_NV.shape
        with self._ranks.together():
            for rank in range(1, self.size):
                self._ranks.receive(self._logits[rank, :count], rank)
        out.view(count, self.size, columns).copy_(self._logits[:, :count].transpose(0, 1))

    def broadcast(self, values_N: torch.Tensor, pdl: bool) -> None:
        """All that there can be: on other ranks than rank 0 their number may be padded."""
        if self._is_at_rest:
            return
        tokens_N = self._tokens[: len(values_N)]
        if not self.rank:
            tokens_N.copy_(values_N)
        self._ranks.broadcast(self._tokens)
        if self.rank:
            values_N.copy_(tokens_N)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        self._is_at_rest = True
        try:
            yield
        finally:
            self._is_at_rest = False

    def leave(self) -> None:
        pass

    def _add_up(self, part_TH: torch.Tensor) -> None:
        if not self._is_at_rest:
            self._ranks.all_reduce(part_TH)


class NcclPipe:
    """An end of a StagePipe. peer: the other end's rank among `workers`."""

    crosses = True

    def __init__(
        self, workers: Communicator, peer: int, shape: Shape, device: torch.device
    ) -> None:
        self._workers, self._peer = workers, peer
        self._rows_TH = torch.zeros(shape.tokens, shape.hidden, dtype=shape.dtype, device=device)

    def connect(self) -> None:
        """Before anything is captured, at both ends."""
        if self._peer < self._workers.rank:
            self._workers.receive(self._rows_TH[:1], self._peer)
        else:
            self._workers.send(self._rows_TH[:1], self._peer)

    def receive(self, out_TH: torch.Tensor, is_open: bool, pdl: bool) -> None:
        rows_TH = self._rows_TH[: len(out_TH)]
        if is_open:
            self._workers.receive(rows_TH, self._peer)
        # Not programmatic, so that what follows may be.
        add_update(rows_TH, out_TH)

    def send(self, item: Item, is_open: bool, pdl: bool) -> None:
        residual_TH, update_TH, update_weight_H, eps = item
        rows_TH = self._rows_TH[: len(residual_TH)]
        add_update(residual_TH, rows_TH, update_TH, update_weight_H, eps, pdl=pdl)
        if is_open:
            self._workers.send(rows_TH, self._peer)
