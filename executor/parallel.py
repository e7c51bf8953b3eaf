"""The ranks of a tensor-parallel engine, and what they say to each other in a step. With several
stages (pipeline.py), those of one stage.

Every rank is a worker process with its part of the weights (sharding.py). All of them run the same
steps, so they make the same calls here in the same order; a call is over when all have made it. A
rank that dies takes those that wait for it along: they are one unit (actors/topology.py), whose
processes the supervisor kills. Rank 0 is the output rank, in the last stage.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ..kernels.cpu import exchange
from ..kernels.cpu.exchange import exchange_kernel
from ..kernels.cpu.openmp import Launch
from ..mq.errors import PeerDeadError
from . import mirror

_LOOK_SECONDS = 0.002
_WORDS = exchange.LINE // 8  # int64 numbers of a line of the shared memory


class Group(Protocol):
    """rank: this process's. size: how many there are.

    Calls raise PeerDeadError when another rank has left, and TimeoutError that says for whom they
    have waited.
    """

    rank: int
    size: int

    def sum(self, rows: np.ndarray, x_TW: torch.Tensor) -> list[Launch]:
        """Operations by which the first rows[0] rows of x, float32, become the sums of all ranks'
        rows: the same bits on every rank, and whatever their number.
        """

    def gather(self, rows: np.ndarray, x_SV: torch.Tensor, size: int) -> Gathered:
        """Operations by which the output rank gets the first `size` columns of all ranks' x side
        by side, and where.
        """

    def broadcast(self, values: np.ndarray) -> None:
        """Values, int32, become those of the output rank."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def check(self) -> None:
        """Raise what has broken the operations that have run."""

    def leave(self) -> None:
        """Who waits for this rank, waits no longer."""


class Gathered:
    """operations, and the rows [S, size x V] that they make; None on other ranks."""

    def __init__(self, operations: list[Launch], rows: torch.Tensor | None) -> None:
        self.operations = operations
        self.rows = rows


class Alone:
    """A group of one, which has nobody to wait for."""

    rank, size = 0, 1

    def sum(self, rows: np.ndarray, x_TW: torch.Tensor) -> list[Launch]:
        return []

    def gather(self, rows: np.ndarray, x_SV: torch.Tensor, size: int) -> Gathered:
        return Gathered([], x_SV)

    def broadcast(self, values: np.ndarray) -> None:
        pass

    def barrier(self) -> None:
        pass

    def check(self) -> None:
        pass

    def leave(self) -> None:
        pass


def map_memory(memory_fd: int, num_bytes: int) -> np.ndarray:
    """Memory that processes share, as int64: an anonymous file, empty when it is handed out, that
    nobody else has.
    """
    os.ftruncate(memory_fd, num_bytes)  # others may have done it already: nothing changes
    return np.frombuffer(mmap.mmap(memory_fd, num_bytes), np.int64)


def map_parts(memory_fd: int, parts: Sequence[mirror.Part], num_links: int) -> list[np.ndarray]:
    """The parts of the ranks' memory. num_links: mirrors on this host, which are waited for."""
    placed, size = mirror.lay_out(parts)
    memory = map_memory(memory_fd, size)
    mirror.describe(memory, placed)
    mirror.wait_until_open(memory, num_links)
    return [memory[p.offset // 8 : (p.offset + mirror.num_bytes(p)) // 8] for p in placed]


class HostGroup:
    """Ranks on processors, through memory that they share. (Those of another host have a copy:
    mirror.py.)

    In a rank's line of it (kernels/cpu/exchange.py): the threads that it has, from when it is here;
    and how many barriers it has come to. has_left[0] is 1 once a rank has left.
    """

    def __init__(self, rank: int, size: int, memory: np.ndarray, timeout: float) -> None:
        """memory: exchange.memory_bytes(size) of it (map_memory). timeout: seconds that a call may
        take. Half as long is waited here for the others.
        """
        self.rank, self.size, self._timeout = rank, size, timeout
        self._memory = memory
        lines = self._memory[: _WORDS * (1 + size)].reshape(1 + size, _WORDS)
        self.has_left, self._threads, self._barriers = lines[0], lines[1:, 0], lines[1:, 1]
        self._status = np.zeros(1, np.int64)
        self._threads[rank] = torch.get_num_threads()
        self._wait(timeout / 2, lambda: self._threads > 0)
        self._lanes = int(self._threads.min())

    def sum(self, rows: np.ndarray, x_TW: torch.Tensor) -> list[Launch]:
        return [self._exchange(exchange.SUM, rows, x_TW, x_TW.shape[1], x_TW)]

    def gather(self, rows: np.ndarray, x_SV: torch.Tensor, size: int) -> Gathered:
        out = None if self.rank else torch.zeros(len(x_SV), self.size * size)
        return Gathered([self._exchange(exchange.SIDE_BY_SIDE, rows, x_SV, size, out)], out)

    def all_side_by_side(
        self, rows: np.ndarray, x_TW: torch.Tensor, out: torch.Tensor
    ) -> list[Launch]:
        """Operations by which every rank gets the rows of all side by side, in out
        [T, size x W].
        """
        return [self._exchange(exchange.SIDE_BY_SIDE, rows, x_TW, x_TW.shape[1], out)]

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        """The values, int32 [W], of all ranks [size, W]."""
        assert values.dtype == np.int32
        own = torch.from_numpy(values.view(np.float32))[None]
        out = torch.empty(1, self.size * len(values))
        self.all_side_by_side(np.ones(1, np.int64), own, out)[0]()
        self.check()
        return out.numpy().view(np.int32).reshape(self.size, len(values))

    def broadcast(self, values: np.ndarray) -> None:
        assert values.dtype == np.int32
        words = torch.from_numpy(values.view(np.float32))[None]
        self.hand_over(0, words, words)

    def share_file(self, root: int) -> int:
        """A file that rank `root` makes, empty, as this process has it. All ranks call it at the
        same time, with a root on their own host.
        """
        made = os.memfd_create("ringcast-ranks") if root == self.rank else -1
        pid, number = self.all_gather(np.array([os.getpid(), made], np.int32))[root].tolist()
        own = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        self.barrier()  # all have it open
        if made >= 0:
            os.close(made)
        return own

    def hand_over(self, root: int, x_TW: torch.Tensor, out_TW: torch.Tensor | None) -> None:
        """Rank `root`'s x, of four bytes each, in the out of each rank that wants it. Others' x say
        how large it is.
        """
        rows = np.array([len(x_TW)], np.int64)
        self._exchange(exchange.FROM_ONE, rows, x_TW, x_TW.shape[1], out_TW, root)()
        self.check()

    def barrier(self) -> None:
        self._barriers[self.rank] += 1
        mine = self._barriers[self.rank]
        self._wait(self._timeout, lambda: self._barriers >= mine)

    def check(self) -> None:
        if self._status[0] == exchange.LEFT:
            raise PeerDeadError(f"rank {self.rank} of {self.size}: another rank has left")
        if self._status[0]:
            raise TimeoutError(
                f"rank {self.rank} of {self.size} has waited {self._timeout:g} s for the others "
                "in a step"
            )

    def leave(self) -> None:
        self.has_left[0] = 1

    def _exchange(
        self,
        mode: int,
        rows: np.ndarray,
        x: torch.Tensor,
        width: int,
        out: torch.Tensor | None,
        root: int = 0,
    ) -> Launch:
        assert x.stride(1) == 1
        assert out is None or out.is_contiguous()
        return exchange_kernel.bind(
            torch.float32,
            rows=rows,
            memory=self._memory,
            ranks=self.size,
            rank=self.rank,
            root=root,
            lanes=self._lanes,
            mode=mode,
            width=width,
            x=x,
            x_stride=x.stride(0),
            out=out,
            out_stride=0 if out is None else out.stride(0),
            status=self._status,
            naps=int(self._timeout * 1e6 / exchange.NAP_MICROSECONDS),
        )

    def _wait(self, timeout: float, are_here: Callable[[], np.ndarray]) -> None:
        start = time.monotonic()
        while not (here := are_here()).all():
            if self.has_left[0] and not are_here().all():  # it may have come before
                raise PeerDeadError(f"rank {self.rank} of {self.size}: another rank has left")
            if time.monotonic() - start > timeout:
                missing = ", ".join(map(str, np.flatnonzero(~here)))
                raise TimeoutError(
                    f"rank {self.rank} of {self.size} has waited {timeout:g} s for the others: "
                    f"missing are {missing}"
                )
            time.sleep(_LOOK_SECONDS)
