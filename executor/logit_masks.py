"""Tokens that are impossible: their logits become -inf, in whatever type they are.

    allowed_token_ids   all others are impossible
    bad_words           the last token of a word, where the output ends with those before it
    min_tokens          stop ids, EOS among them (under ignore_eos too), until enough tokens exist

A bad word is looked for in the output alone, not across the end of the prompt. A row that has
nothing left gets some token.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from ..mq import codec
from ..mq.messages import NewSequence
from .row_lists import Ints, RowLists


class LogitMasks:
    """known_tokens: the batch's own, by row. Whoever samples appends to them after each step."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: Iterable[int], known_tokens: Ints
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._known_tokens = known_tokens
        self._num_prompt = np.zeros(max_num_seqs, np.int64)
        self._stops_from = np.zeros(max_num_seqs, np.int64)
        self._stop_ids = RowLists(max_num_seqs, np.int64)
        self._allowed_ids = RowLists(max_num_seqs, np.int64)
        # The tokens of words, each with its distance from the word's last.
        self._bad_words = RowLists(max_num_seqs, np.int64, np.int64)

    def enter(self, new: NewSequence) -> None:
        """A sequence enters the batch."""
        row, params = new.row, new.params
        self._num_prompt[row] = new.num_prompt_tokens
        self._stops_from[row] = new.num_prompt_tokens + params.min_tokens
        stop_ids = self._eos.union(params.stop_token_ids) if params.min_tokens else ()
        self._stop_ids.put(row, self._in_vocabulary(stop_ids))
        self._allowed_ids.put(row, self._in_vocabulary(params.allowed_token_ids or ()))
        words = [codec.ints(word) for word in new.bad_words]
        distances = [np.arange(len(word))[::-1] for word in words]
        self._bad_words.put(row, _joined(words), _joined(distances))

    def apply(self, logits: torch.Tensor, rows: Ints, positions: Ints) -> None:
        """Mask `logits` [S, V] of `rows` [S], whose next tokens are to be at `positions` [S]."""
        self._mask_all_but_allowed(logits, rows)
        self._mask_bad_words(logits, rows, positions)
        self._mask_stops(logits, rows, positions)

    def _in_vocabulary(self, ids: Iterable[int]) -> list[int]:
        # Another id can't be chosen, so there is nothing to mask.
        return sorted({i for i in ids if i < self._vocab_size})

    def _mask_all_but_allowed(self, logits: torch.Tensor, rows: Ints) -> None:
        place, ids = self._allowed_ids.gather(rows)
        if place.size:
            where = torch.from_numpy(place), torch.from_numpy(ids)
            allowed = logits[where]
            logits[torch.from_numpy(np.unique(place))] = -torch.inf
            logits[where] = allowed

    def _mask_bad_words(self, logits: torch.Tensor, rows: Ints, positions: Ints) -> None:
        place, tokens, distance = self._bad_words.gather(rows)
        if not place.size:
            return
        row, at = rows[place], positions[place] - distance
        found = (at >= self._num_prompt[row]) & (self._known_tokens[row, at] == tokens)
        found |= distance == 0
        last = np.flatnonzero(distance == 0)
        first = np.append(0, last[:-1] + 1)
        _forbid(
            logits,
            *(column[last[np.logical_and.reduceat(found, first)]] for column in (place, tokens)),
        )

    def _mask_stops(self, logits: torch.Tensor, rows: Ints, positions: Ints) -> None:
        early = np.flatnonzero(positions < self._stops_from[rows])
        if early.size:
            place, ids = self._stop_ids.gather(rows[early])
            _forbid(logits, early[place], ids)


def _forbid(logits: torch.Tensor, place: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
    logits[torch.from_numpy(place), torch.from_numpy(ids)] = -torch.inf


def _joined(arrays: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)
