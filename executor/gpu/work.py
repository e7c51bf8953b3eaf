"""What a forward pass on a device is for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .batch_linears import MOST_FEW


class Work(NamedTuple):
    """The first `decodes` of `tokens` are a sequence each; all others belong to the sequences of
    `tiles` (plan_tiles). longest: bound of the context of one sequence alone, whose attention is
    split by it; that of more goes by the step's plan (decode_plan.py).
    """

    tokens: int
    decodes: int
    longest: int
    tiles: torch.Tensor | None = None

    @property
    def is_single(self) -> bool:
        return self.tokens == 1

    @property
    def is_few(self) -> bool:
        """A decode step of some tokens."""
        return self.tiles is None and 1 < self.tokens <= MOST_FEW
