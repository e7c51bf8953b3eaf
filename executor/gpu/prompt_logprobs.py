"""Log-probabilities of prompts on a device: what the model thought of tokens before it was told.

As executor/prompt_logprobs.py, which has the rule, but nothing waits: a step's tables are on their
way to the host when the step has been launched, and are read when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ...mq.messages import NewSequence, PromptLogprobs
from .batch import GpuBatch, Ints, Step
from .sampler_logprobs import PendingLogprobs, token_logprobs_of

_NONE = -1


class PendingTable(NamedTuple):
    """Of tokens of a row, from place `first` on."""

    row: int
    first: int
    logprobs: PendingLogprobs

    def read(self) -> PromptLogprobs:
        return PromptLogprobs(self.row, self.first, self.logprobs.read())


class PromptLogprobsReader:
    """logits_of: from token numbers of the step [n], at most batch.capacity, to logits [n, V];
    None on a rank that isn't to answer.
    """

    def __init__(
        self,
        batch: GpuBatch,
        logits_of: Callable[[torch.Tensor], torch.Tensor | None],
        vocab_size: int,
    ) -> None:
        self._batch, self._vocab_size = batch, vocab_size
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

    def asks(self, rows: Ints) -> bool:
        """Whether one of these rows has still to be answered, before the step is laid out."""
        return bool(
            np.any(
                (self._num_logprobs[rows] != _NONE)
                & (self._batch.num_computed[rows] < self._num_prompt[rows] - 1)
            )
        )

    def launch(self, step: Step) -> list[PendingTable]:
        """Of the step whose forward pass has been launched."""
        before = step.context - step.lengths
        # `before + 1` is the first place that this step foresees.
        counts = np.minimum(step.context, self._num_prompt[step.rows] - 1) - before
        asked = self._num_logprobs[step.rows] != _NONE
        starts = step.ends - step.lengths
        return [
            table
            for i in np.flatnonzero(asked & (counts > 0)).tolist()
            for table in self._of_row(
                int(step.rows[i]), int(starts[i]), int(before[i]) + 1, int(counts[i])
            )
        ]

    def _of_row(self, row: int, start: int, place: int, count: int) -> list[PendingTable]:
        """Of `count` tokens from `place` on, foreseen by those from `start` on in the step."""
        most, tables = self._batch.capacity, []
        for done in range(0, count, most):
            size, first = min(most, count - done), place + done
            begin = start + done
            index = torch.arange(
                begin, begin + size, dtype=torch.int32, device=self._batch.inputs.device
            )
            logits = self._logits_of(index)
            if logits is None:
                continue
            # Aligned, as the kernel was compiled for.
            tokens = self._batch.tokens_RL[row, first : first + size].clone()
            pending = token_logprobs_of(
                logits, tokens, int(self._num_logprobs[row]), self._vocab_size
            )
            tables.append(PendingTable(row, first, pending))
        return tables
