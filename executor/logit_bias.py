"""logit_bias: what requests add to the logits of single tokens."""

from __future__ import annotations

import numpy as np
import torch

from ..mq.sampling_params import SamplingParams
from .row_lists import Ints, RowLists


class LogitBias:
    """The biases of every row of the batch."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases = RowLists(max_num_seqs, np.int64, np.float32)

    def enter(self, row: int, params: SamplingParams) -> None:
        biases = {i: bias for i, bias in (params.logit_bias or {}).items() if i < self._vocab_size}
        self._biases.put(row, list(biases), list(biases.values()))

    def apply(self, logits: torch.Tensor, rows: Ints) -> None:
        """Add to float32 `logits` [S, V] of `rows` [S], in place."""
        place, ids, biases = self._biases.gather(rows)
        if place.size:
            where = torch.from_numpy(place), torch.from_numpy(ids)
            logits[where] += torch.from_numpy(biases)
