"""The experts that a rank on a processor has, as the balancer sees them: weights go through the
memory in which ranks exchange rows.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..kernels.cpu.exchange import SLOT_WORDS
from .expert_balancer import Steps, Transfer
from .experts import Mixture
from .parallel import HostGroup


class HostExperts:
    """DealtExperts, of whose calls none takes a step. group: those that experts are dealt to.
    num_bytes: of what is kept beside a layer's weights.

    Raises as HostGroup.check.
    """

    def __init__(self, group: HostGroup, mixtures: list[Mixture]) -> None:
        self.rank, self._group, self._mixtures = group.rank, group, mixtures
        self.routes = [mixture.routes for mixture in mixtures]
        self._weights = [_words(mixture) for mixture in mixtures]
        self._staged = [torch.empty_like(words) for words in self._weights[0]]
        self.expert_bytes = sum(words[0].nbytes for words in self._staged)
        self.num_bytes = sum(words.nbytes for words in self._staged)

    def note_loads(self) -> np.ndarray:
        return np.stack([mixture.loads_E for mixture in self._mixtures])

    def loads_between(self, begin: np.ndarray | None, end: np.ndarray) -> Steps[np.ndarray]:
        yield from ()
        return end if begin is None else end - begin

    def share(self, values: np.ndarray) -> Steps[None]:
        yield from ()
        self._group.broadcast(values)

    def send(self, layer: int, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            slot = transfer.slot if self.rank == transfer.root else 0
            for words, staged in zip(self._weights[layer], self._staged, strict=True):
                target = None
                if self.rank in transfer.takers:
                    target = staged[transfer.takers[self.rank]]
                self._group.hand_over(transfer.root, words[slot], target)

    def take(self, layer: int, slots: list[int], placement_RS: np.ndarray) -> None:
        for words, staged in zip(self._weights[layer], self._staged, strict=True):
            words[slots] = staged[slots]
        self.routes[layer].take(placement_RS)

    def waited(self) -> float:
        return 0.0


def _words(mixture: Mixture) -> list[torch.Tensor]:
    """Its weights as rows of words: [held, rows, width]."""
    found = []
    for weight in mixture.weights:
        words = weight.view(len(weight), -1).view(torch.float32)
        found.append(words.view(len(weight), -1, math.gcd(words.shape[1], SLOT_WORDS)))
    return found
