"""Penalties on tokens that there are already: repetition, then frequency and presence.

    repetition   logits of tokens of the prompt or the output: divided where positive, else
                 multiplied (Keskar et al., "CTRL", 2019)
    frequency    times the token's count in the output, subtracted
    presence     subtracted from each token of the output

What is known of a penalised row is which tokens it has, as a list, and how often each is in its
output. Both grow by each sampled token; a sequence that comes again (after preemption) brings its
tokens along. So a step costs a row its different tokens, not its length or the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from ..mq import codec
from ..mq.messages import NewSequence
from .row_lists import Ints

_UNSEEN = 0  # counts are one more than the occurrences in the output


class Penalties:
    """max_length: most tokens of a sequence."""

    def __init__(self, max_num_seqs: int, vocab_size: int, max_length: int) -> None:
        self._vocab_size = vocab_size
        self._penalised = np.zeros(max_num_seqs, bool)
        self._penalties = np.zeros((max_num_seqs, 3), np.float32)
        # What no row has used yet takes no memory.
        self._counts = np.zeros((max_num_seqs, vocab_size), np.int32)
        self._tokens = np.zeros((max_num_seqs, min(vocab_size, max_length)), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)

    def enter(self, new: NewSequence) -> None:
        """A sequence enters the batch, with the tokens that it has."""
        row, params = new.row, new.params
        self._counts[row, self._tokens[row, : self._num_tokens[row]]] = _UNSEEN
        self._num_tokens[row] = 0
        self._penalised[row] = params.penalised
        if params.penalised:
            self._penalties[row] = (
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            tokens = codec.ints(new.token_ids)
            self._enter(row, tokens[: new.num_prompt_tokens], 0)
            self._enter(row, tokens[new.num_prompt_tokens :], 1)

    def record(self, rows: Ints, tokens: Ints) -> None:
        """These tokens have been sampled for these rows."""
        which = np.flatnonzero(self._penalised[rows])
        if which.size:
            self._count(rows[which], tokens[which], 1)

    def apply(self, logits: torch.Tensor, rows: Ints) -> None:
        """Penalise float32 `logits` [S, V] of `rows` [S], in place."""
        which = np.flatnonzero(self._penalised[rows])
        if which.size:
            _penalise(
                logits.numpy(),
                which,
                rows[which],
                self._penalties,
                self._counts,
                self._tokens,
                self._num_tokens,
            )

    def _enter(self, row: int, tokens: Ints, times: int) -> None:
        tokens = tokens[tokens < self._vocab_size]  # a prompt may have others, which have no logit
        self._count(np.full(len(tokens), row, np.int32), tokens, times)

    def _count(self, rows: Ints, tokens: Ints, times: int) -> None:
        _count(self._counts, self._tokens, self._num_tokens, rows, tokens, times)


@njit(
    "void(int32[:, ::1], int32[:, ::1], int64[::1], int32[::1], int32[::1], int64)",
    cache=True,
)
def _count(
    counts: Any, distinct: Any, num_distinct: Any, rows: Any, tokens: Any, times: Any
) -> None:
    for i in range(len(rows)):
        row, token = rows[i], tokens[i]
        if counts[row, token] == _UNSEEN:
            counts[row, token] = 1
            distinct[row, num_distinct[row]] = token
            num_distinct[row] += 1
        counts[row, token] += times


@njit(
    "void(float32[:, ::1], int64[::1], int32[::1], float32[:, ::1], int32[:, ::1], int32[:, ::1],"
    " int64[::1])",
    cache=True,
    error_model="numpy",
)
def _penalise(
    logits: Any,
    places: Any,
    rows: Any,
    penalties: Any,
    counts: Any,
    distinct: Any,
    num_distinct: Any,
) -> None:
    for i in range(len(rows)):
        place, row = places[i], rows[i]
        repetition, frequency, presence = penalties[row, 0], penalties[row, 1], penalties[row, 2]
        for j in range(num_distinct[row]):
            token = distinct[row, j]
            logit = logits[place, token]
            logit = logit / repetition if logit > 0 else logit * repetition
            times = counts[row, token] - 1
            if times > 0:
                logit -= np.float32(times) * frequency
                logit -= presence
            logits[place, token] = logit
