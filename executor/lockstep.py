"""How replicas that step together meet in a step (actors/scheduler/waves.py), and how their tokens
come to the experts, which are dealt to all T ranks of all N replicas.

Each step begins with a meeting of all T x N ranks: which step of which wave each is in, whether its
replica has work, and how many tokens. So all know how many rows the step's exchanges have, and that
they are in the same one.

Attention is a replica's own. At a mixture of experts, row n of t of the gathered tokens [P x N, H]
is token t of replica n, up to P, the most that a replica has; what is beyond a replica's own tokens
goes to no expert. Each rank computes all tokens for the experts that it has, all ranks add up the
results, and each goes on with its own replica's rows.

Several groups share the ranks' memory, one after another: all; and if T > 1, the T ranks of each
replica, and for each rank in a replica those of all replicas that have it. Where the replicas are
on several hosts, each host has a copy, which mirrors keep alike (mirror.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..kernels.cpu import exchange
from ..kernels.cpu.experts import pad_kernel
from ..kernels.cpu.openmp import Kernel, Launch
from ..mq.config import EngineConfig
from ..mq.errors import ConfigError
from ..mq.messages import WaveStep
from .mirror import Exchange
from .parallel import Alone, Group, HostGroup, map_parts

_NO_WAVE = WaveStep(0, 0, False)  # of the steps that warm up
_MASK = (1 << 31) - 1  # what fits of a number that grows for months


class Meeting(NamedTuple):
    """any_work: whether a replica had some. tokens: of each replica, int64 [N]."""

    any_work: bool
    tokens: np.ndarray


class Replicas:
    """One rank's view of the replicas. own: the group of its replica's ranks.

    tokens, most and rows: of the step, int64 [N], [1] (P) and [1] (P x N).
    """

    def __init__(
        self, config: EngineConfig, rank: int, engine: int, memory_fd: int, num_links: int = 0
    ) -> None:
        """num_links: as join's (pipeline.py). Raises as HostGroup where not all ranks come."""
        ranks, num, timeout = (
            config.tensor_parallel_size,
            config.data_parallel_size,
            config.startup_timeout,
        )
        self.num, self.engine, self._ranks = num, engine, ranks
        self.rank, self.size = engine * ranks + rank, num * ranks
        everyone = tuple(range(self.size))
        parts = [Exchange(everyone)]
        if ranks > 1:
            parts += [Exchange(everyone[e * ranks : (e + 1) * ranks]) for e in range(num)]
            parts += [Exchange(everyone[r::ranks]) for r in range(ranks)]
        memory = map_parts(memory_fd, parts, num_links)
        self.all = self._across = HostGroup(self.rank, self.size, memory[0], timeout)
        self.own: Group = Alone()
        if ranks > 1:
            self.own = HostGroup(rank, ranks, memory[1 + engine], timeout)
            self._across = HostGroup(engine, num, memory[1 + num + rank], timeout)
        self.tokens, self.most = np.zeros(num, np.int64), np.zeros(1, np.int64)
        self.rows = np.zeros(1, np.int64)
        self.meetings = 0

    def agree(self, element_bytes: int, width: int) -> None:
        """Rows of tokens are the same bytes on all ranks, or they would be taken for others.

        Raises ConfigError that says who has what.
        """
        heard = self.all.all_gather(np.array([element_bytes, width], np.int32))[:: self._ranks]
        check_rows(heard)

    @staticmethod
    def kernels() -> list[Kernel]:
        return [exchange.exchange_kernel, pad_kernel]

    def meet(self, place: WaveStep | None, num_tokens: int) -> Meeting:
        """Once in each step, before all else that ranks say to each other in it.

        Raises as HostGroup.check where not all come, and AssertionError where they come to
        different steps.
        """
        place = place or _NO_WAVE
        numbers = (number & _MASK for number in (self.meetings, place.wave, place.step))
        said = (*numbers, place.has_work, num_tokens)
        heard = self.all.all_gather(np.array(said, np.int32))[:: self._ranks]
        check_places(heard[:, :3])
        self.meetings += 1
        self.tokens[:] = heard[:, 4]
        self.most[0] = self.tokens.max()
        self.rows[0] = self.most[0] * self.num
        return Meeting(bool(heard[:, 3].any()), self.tokens)

    def gather(self, x_TH: torch.Tensor, out_PNH: torch.Tensor) -> list[Launch]:
        """The rows of all replicas into [P, N x H], whatever their type."""
        return self._across.all_side_by_side(
            self.most, x_TH.view(torch.float32), out_PNH.view(torch.float32)
        )

    def pad(self, experts_TC: torch.Tensor) -> Launch:
        """What is no replica's token has no experts."""
        return pad_kernel.bind(
            torch.float32,
            rows=self.rows,
            experts=experts_TC,
            tokens=self.tokens,
            replicas=self.num,
            chosen=experts_TC.shape[1],
        )

    def own_rows(self, y_PNH: torch.Tensor) -> torch.Tensor:
        """[P, H] of [P, N x H], which stay where they are."""
        width = y_PNH.shape[1] // self.num
        return y_PNH[:, self.engine * width : (self.engine + 1) * width]

    def check(self) -> None:
        """Raise what has broken the operations that have run."""
        for group in (self._across, self.all):
            group.check()

    def leave(self) -> None:
        for group in (self.own, self._across, self.all):
            group.leave()


def check_rows(rows: np.ndarray) -> None:
    """int32 [N, 2]: of each replica, an element's bytes and a row's elements."""
    if (rows != rows[0]).any():
        said = "; ".join(
            f"replica {n} has rows of {width} numbers of {size} bytes"
            for n, (size, width) in enumerate(rows.tolist())
        )
        raise ConfigError(
            f"enable_expert_parallel = True: {said}; all must have the same, so set --dtype where "
            "hosts have processors of different kinds"
        )


def compile_kernels() -> None:
    """What a meeting needs, for runners that have no list of kernels."""
    exchange.exchange_kernel.compile(torch.float32)


def check_places(places: np.ndarray) -> None:
    """int32 [N, 3]: of each replica, how many meetings it has had, its wave and its step."""
    if (places != places[0]).any():
        said = "; ".join(
            f"replica {n} is in step {step} of wave {wave}, after {meetings} meetings"
            for n, (meetings, wave, step) in enumerate(places.tolist())
        )
        raise AssertionError(f"replicas that step together have parted: {said}")
