"""What requests say of single tokens, on the device: masks and biases, with the meaning that
executor/logit_masks.py and logit_bias.py give them.

    allowed_token_ids   all others are impossible
    bad_words           the last token of a word, where the output ends with those before it
    min_tokens          stop ids, EOS among them (under ignore_eos too), until enough tokens exist
    logit_bias          added to the logits of these tokens
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.gpu.logit_masks import BadWords, StopTokens, forbid, mask_all_but_allowed
from ...kernels.gpu.sampling_bias import Biases, add_biases
from ...mq import codec
from ...mq.messages import NewSequence
from .sampler_options import FlatLists, Mirrored, to_device

_WORD_BITS = 32


class SamplerLists:
    """masked_R, biased_R: which rows want `mask` and `add_biases`, on the host.

    tokens_RL: the known tokens of each row, on the device.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        tokens_RL: torch.Tensor,
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._tokens = tokens_RL
        self._device = device
        self.masked_R = np.zeros(max_num_seqs, bool)
        self.biased_R = np.zeros(max_num_seqs, bool)
        self._allows = np.zeros(max_num_seqs, bool)
        self._forbids = np.zeros(max_num_seqs, bool)
        names = "num_prompt stops_from stop_first stop_number word_first word_number longest"
        names += " tokens_first tokens_number bias_first bias_number has_mask"
        self._rows = Mirrored(dict.fromkeys(names.split(), (np.int32, (max_num_seqs,))), device)
        host = self._rows.host
        self._stops = FlatLists(host["stop_first"], host["stop_number"], (np.int32,), device)
        self._words = FlatLists(
            host["word_first"], host["word_number"], (np.int32, np.int32), device
        )
        self._word_tokens = FlatLists(
            host["tokens_first"], host["tokens_number"], (np.int32,), device
        )
        self._biases = FlatLists(
            host["bias_first"], host["bias_number"], (np.int32, np.float32), device
        )
        num_words = -(-vocab_size // _WORD_BITS)
        self._allowed = torch.zeros(max_num_seqs, num_words, dtype=torch.int32, device=device)

    @property
    def num_prompt_R(self) -> torch.Tensor:
        """How many tokens each row's prompt has, int32 on the device."""
        return self._rows.device["num_prompt"]

    def enter(self, new: NewSequence) -> None:
        """A sequence enters the batch."""
        row, params, host = new.row, new.params, self._rows.host
        host["num_prompt"][row] = new.num_prompt_tokens
        host["stops_from"][row] = new.num_prompt_tokens + params.min_tokens
        stop_ids = self._eos.union(params.stop_token_ids) if params.min_tokens else ()
        self._stops.put(row, self._in_vocabulary(stop_ids))
        self._enter_allowed(row, params.allowed_token_ids)
        self._enter_words(row, [codec.ints(word) for word in new.bad_words])
        biases = {i: bias for i, bias in (params.logit_bias or {}).items() if i < self._vocab_size}
        self._biases.put(row, list(biases), list(biases.values()))
        self._forbids[row] = bool(params.min_tokens or new.bad_words)
        self.masked_R[row] = self._forbids[row] or self._allows[row]
        self.biased_R[row] = bool(biases)
        self._rows.changed = True

    def _in_vocabulary(self, ids: Iterable[int]) -> list[int]:
        # Another id can't be chosen, so there is nothing to mask.
        return sorted({i for i in ids if i < self._vocab_size})

    def _enter_allowed(self, row: int, allowed: tuple[int, ...] | None) -> None:
        # Ids outside the vocabulary are nothing, and if there are no others all is allowed.
        ids = np.array(self._in_vocabulary(allowed or ()), np.int64)
        self._allows[row] = ids.size > 0
        self._rows.host["has_mask"][row] = ids.size > 0
        if ids.size:
            words = np.zeros(self._allowed.shape[1], np.uint32)
            bits = np.uint32(1) << (ids % _WORD_BITS).astype(np.uint32)
            np.bitwise_or.at(words, ids // _WORD_BITS, bits)
            # After the steps in flight, as everything on the stream.
            self._allowed[row].copy_(to_device(words.view(np.int32), self._device))

    def _enter_words(self, row: int, words: list[NDArray[np.int32]]) -> None:
        lengths = np.array([len(word) for word in words], np.int32)
        self._rows.host["longest"][row] = lengths.max(initial=0)
        self._words.put(row, np.cumsum(lengths) - lengths, lengths)
        self._word_tokens.put(row, np.concatenate(words) if words else ())

    def upload(self) -> None:
        """Before a step: what has changed goes to the device."""
        for lists in (self._stops, self._words, self._word_tokens, self._biases):
            lists.upload()
        self._rows.upload()

    def mask(
        self,
        logits_NV: torch.Tensor,
        rows: NDArray[np.int32],
        rows_N: torch.Tensor,
        positions_N: torch.Tensor,
    ) -> None:
        """Mask logits in place. rows: the batch rows, on the host and on the device. positions: the
        place of the token that is chosen now.
        """
        device = self._rows.device
        if self._allows[rows].any():
            mask_all_but_allowed(
                logits_NV,
                rows_N,
                device["has_mask"],
                self._allowed,
                vocab_size=self._vocab_size,
            )
        if self._forbids[rows].any():
            forbid(
                logits_NV,
                rows_N,
                positions_N,
                self._tokens,
                self.num_prompt_R,
                StopTokens(
                    device["stops_from"],
                    device["stop_first"],
                    device["stop_number"],
                    *self._stops.columns,
                ),
                BadWords(
                    device["word_first"],
                    device["word_number"],
                    device["longest"],
                    device["tokens_first"],
                    *self._words.columns,
                    *self._word_tokens.columns,
                ),
                vocab_size=self._vocab_size,
            )

    def add_biases(self, logits_NV: torch.Tensor, rows_N: torch.Tensor) -> None:
        """Add to float32 logits in place."""
        device = self._rows.device
        lists = Biases(device["bias_first"], device["bias_number"], *self._biases.columns)
        add_biases(logits_NV, rows_N, lists)
