"""The load balancer of experts that are dealt to ranks (EPLB): now and then it places them anew by
what they have had to do (expert_placement.py), and moves their weights while the engine serves.

All ranks count the same steps, those in which any of them has tokens, so all do the same between
the same two steps:

1. Every step_interval steps the loads of the last window_size steps are noted, and a round begins:
   layer by layer, one layer in a step at most. A round that is due while one runs is left out.
2. For a layer rank 0 says where everything is to be, and the others hear it: they can't disagree.
3. Each expert that a rank is to have and hasn't goes there from the first rank that has it, through
   the memory in which they exchange rows. It is kept beside the layer's weights, which the steps
   meanwhile still use. When a step has moved BYTES_PER_STEP, the next ones are the next step's.
4. When all of a layer's are there, they are copied into their slots, and from this step on tokens
   go by the new placement: on all ranks, since all have moved equally much.

A weight that has moved has the bits that it had: nothing is read from files, or packed again. What
it costs is memory for one layer's experts of a rank, and a pause of some milliseconds in each step
of a round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import torch

from ..kernels.cpu.exchange import SLOT_WORDS
from ..mq.eplb_config import EplbConfig
from .expert_placement import place
from .experts import Mixture
from .load_window import LoadWindow
from .parallel import HostGroup

BYTES_PER_STEP = 32 << 20


class ExpertBalancer:
    """rounds: that are done. moved: experts that came to a rank, in all. seconds: spent on it here,
    the most in one step among them as most_seconds.
    """

    def __init__(
        self, config: EplbConfig, group: HostGroup, mixtures: list[Mixture], turn: np.ndarray
    ) -> None:
        """group: those that the experts are dealt to. turn: ExpertBuffers.turn."""
        self.rounds = self.moved = 0
        self.seconds = self.most_seconds = 0.0
        self._group, self._mixtures, self._turn = group, mixtures, turn
        self._window = LoadWindow(config.window_size, config.step_interval)
        self._round: Iterator[None] | None = None
        self._staged = [torch.empty_like(words) for words in _words(mixtures[0])]

    def before_step(self) -> None:
        """To be called by all ranks before each step in which any of them has tokens.

        Raises as HostGroup.check.
        """
        start = time.perf_counter()
        loads_LE = self._window.step(self._totals)
        if loads_LE is not None and self._round is None:
            self._round = self._rounds(loads_LE)
        if self._round is not None:
            try:
                next(self._round)
            except StopIteration:
                self._round = None
                self.rounds += 1
            taken = time.perf_counter() - start
            self.seconds += taken
            self.most_seconds = max(self.most_seconds, taken)
        self._turn[0] = self._window.steps

    def _totals(self) -> np.ndarray:
        return np.stack([mixture.routes.loads_E for mixture in self._mixtures])

    def _rounds(self, loads_LE: np.ndarray) -> Iterator[None]:
        """Yields where a step is to run."""
        for mixture, loads_E in zip(self._mixtures, loads_LE, strict=True):
            placed_RS = mixture.routes.placement_RS.copy()
            if not self._group.rank:
                placed_RS[:] = place(loads_E, placed_RS)
            self._group.broadcast(placed_RS.reshape(-1))
            yield from self._move(mixture, placed_RS)
            yield

    def _move(self, mixture: Mixture, placed_RS: np.ndarray) -> Iterator[None]:
        rank, current_RS = self._group.rank, mixture.routes.placement_RS
        weights, num_bytes = _words(mixture), 0
        arrived = np.flatnonzero(~np.isin(placed_RS[rank], current_RS[rank]))
        for e, takers in _transfers(current_RS, placed_RS):
            root = int(np.flatnonzero((current_RS == e).any(1))[0])
            for words, staged in zip(weights, self._staged, strict=True):
                if rank in takers:
                    target = staged[np.flatnonzero(placed_RS[rank] == e)[0]]
                    self._group.hand_over(root, target, target)
                else:
                    own = np.flatnonzero(current_RS[rank] == e) if rank == root else [0]
                    self._group.hand_over(root, words[own[0]], None)
                num_bytes += words[0].nbytes
            self.moved += len(takers)
            if num_bytes >= BYTES_PER_STEP:
                num_bytes = 0
                yield
        for words, staged in zip(weights, self._staged, strict=True):
            words[arrived] = staged[arrived]
        mixture.routes.take(placed_RS)


def _transfers(current_RS: np.ndarray, placed_RS: np.ndarray) -> Iterator[tuple[int, list[int]]]:
    """Each expert that some ranks are to have and haven't, and these ranks."""
    for e in np.unique(placed_RS).tolist():
        comes_R = (placed_RS == e).any(1) & ~(current_RS == e).any(1)
        if comes_R.any():
            yield e, np.flatnonzero(comes_R).tolist()


def _words(mixture: Mixture) -> list[torch.Tensor]:
    """Its weights as rows of words: [held, rows, width]."""
    found = []
    for weight in mixture.weights:
        words = weight.view(len(weight), -1).view(torch.float32)
        found.append(words.view(len(weight), -1, math.gcd(words.shape[1], SLOT_WORDS)))
    return found
