"""Log-probabilities of prompts: what the model thought of each token before it was told.

The token at place p of a prompt was foreseen by the one at p - 1, so the step that computes p - 1
answers for p. All but the last of a prompt's tokens have their successor in it; the last one's
logits are what the first output token is sampled from, so no token's logits are asked for twice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..mq.messages import NewSequence, PromptLogprobs
from .input_batch import InputBatch, Step
from .logprobs import token_logprobs

_NONE = -1


class PromptLogprobsReader:
    """logits_of: from n, at most max_num_seqs, to the logits [n, V] of the step's tokens that
    batch.last names; None on a rank that only helps to make them, whose answer is empty.
    """

    def __init__(self, batch: InputBatch, logits_of: Callable[[int], torch.Tensor | None]) -> None:
        self._batch = batch
        self._logits_of = logits_of
        self._num_logprobs = np.full(len(batch.num_known), _NONE, np.int32)
        self._num_prompt = np.zeros(len(batch.num_known), np.int32)

    def enter(self, new: NewSequence) -> None:
        """A sequence enters the batch. One that has output has had its prompt's answer; of several
        choices the first one asks for all.
        """
        asked = new.params.prompt_logprobs
        first = not new.choice and len(new.token_ids) // 4 == new.num_prompt_tokens
        self._num_logprobs[new.row] = asked if asked is not None and first else _NONE
        self._num_prompt[new.row] = new.num_prompt_tokens

    def read(self, step: Step) -> list[PromptLogprobs]:
        """Of the step that the model has just computed."""
        batch = self._batch
        rows, context = (a[: step.num_sequences] for a in (batch.rows, batch.context))
        asked = self._num_logprobs[rows] != _NONE
        if not asked.any():
            return []
        before = context - step.lengths
        # `before + 1` is the first place that this step foresees.
        counts = np.minimum(context, self._num_prompt[rows] - 1) - before
        wanted = np.flatnonzero(asked & (counts > 0))
        return [
            part
            for i in wanted.tolist()
            for part in self._of_row(rows[i], batch.starts[i], before[i] + 1, counts[i])
        ]

    def _of_row(self, row: int, start: int, place: int, count: int) -> list[PromptLogprobs]:
        """Of `count` tokens from `place` on, foreseen by those from `start` on in the step."""
        parts = []
        tokens = self._batch.known_tokens[row]
        most = len(self._batch.last)
        for done in range(0, count, most):
            size = min(most, count - done)
            self._batch.last[:size] = np.arange(start + done, start + done + size)
            logits = self._logits_of(size)
            if logits is None:
                continue
            raw = torch.log_softmax(logits, -1)
            first = int(place) + done
            chosen = tokens[first : first + size]
            asked = np.full(size, self._num_logprobs[row])
            table = token_logprobs(raw, np.arange(size), chosen, asked)
            parts.append(PromptLogprobs(int(row), first, table))
        return parts
