"""From logits to the next tokens on a CUDA device, for all rows of a batch at once.

Options mean what executor/sampler.py says, in the order that it gives; only step 9 is another. A
row's token is the largest of (logit + temperature * Gumbel noise) among what is left over
(kernels/gpu/sampling.py), so the same seed draws other tokens here than on a processor, from the
same distribution, and here too a draw depends on (seed, choice, position) alone.

Nothing waits for the device. Penalties, bad words and min_tokens read the known tokens there
(tokens_RL), so the token of the step before counts before the host knows it. Two ways lead to
tokens:

    sample_plain   greedy rows and rows with a temperature: one kernel, which a CUDA graph can hold
    sample         any options, kernel by kernel. Rows with biases, processors or penalties are
                   edited in a copy in float32; masks are written to the logits as they are.

A logits processor of a user's own gets its rows' known tokens as the host's arrays, so a step with
one waits for the step before and copies them.

Letters: S sequences of a graph (capacity), N rows to sample, R rows of the batch, L longest
sequence, V vocabulary. Logits are [N, V or more]; a model may pad its vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.gpu.penalties import penalise, penalty_counts
from ...kernels.gpu.sampling import Draw, draw_scratch, sample_plain
from ...kernels.gpu.top_mask import Cuts, CutScratch, cut_scratch, find_cuts
from ...mq import codec
from ...mq.messages import NewSequence
from ...mq.sampling_params import SamplingParams
from ..logits_processor import LogitsProcessor
from .sampler_lists import SamplerLists
from .sampler_logprobs import PendingLogprobs
from .sampler_options import Mirrored, to_device

Ints = NDArray[np.int32]

_MIN_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e30  # times the noise, still a number


class Sampler:
    """The sampling options of every row of the batch, and the step from logits to tokens.

    tokens_RL: int32 [R, L] on the device, the known tokens of each row. Whoever samples appends to
    them after each step.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        tokens_RL: torch.Tensor,
        device: torch.device,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._tokens = tokens_RL
        rows = (max_num_seqs,)
        self._options = Mirrored(
            {
                "top_p": (np.float64, rows),
                "min_p": (np.float32, rows),
                "top_k": (np.int32, rows),
                "temperature": (np.float32, rows),
                "seeds": (np.int32, (max_num_seqs, 3)),
                "penalties": (np.float32, (max_num_seqs, 3)),
            },
            device,
        )
        self._options.host["top_p"][:] = 1.0
        self._options.host["penalties"][:] = (1.0, 0.0, 0.0)
        self._options.changed = True
        mirror = self._options.device
        self._draw = Draw(mirror["temperature"], mirror["seeds"])
        self._cuts = Cuts(mirror["top_k"], mirror["top_p"], mirror["min_p"])
        self._lists = SamplerLists(max_num_seqs, vocab_size, eos_token_ids, tokens_RL, device)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._is_cut = np.zeros(max_num_seqs, bool)
        self._penalised = np.zeros(max_num_seqs, bool)
        self._edited = np.zeros(max_num_seqs, bool)  # in float32: all but the masks
        self._plain = np.ones(max_num_seqs, bool)
        self._processors = [(each, np.zeros(max_num_seqs, bool)) for each in processors]
        self._known_tokens = np.zeros(tokens_RL.shape if processors else (0, 0), np.int32)
        self._draw_scratch = draw_scratch(max_num_seqs, vocab_size, device)
        self._cut_scratch: CutScratch | None = None
        self._penalty_counts: torch.Tensor | None = None

    def enter(self, new: NewSequence) -> None:
        """A sequence enters the batch. Its `params.seed` is set unless it is greedy."""
        row, params, host = new.row, new.params, self._options.host
        temperature = params.temperature if params.temperature >= _MIN_TEMPERATURE else 0.0
        assert temperature == 0.0 or params.seed is not None, "the client draws missing seeds"
        host["temperature"][row] = min(temperature, _MAX_TEMPERATURE)
        host["top_k"][row] = max(params.top_k, 0)
        host["top_p"][row] = params.top_p
        host["min_p"][row] = params.min_p
        seed = (params.seed or 0) % 2**64
        words = np.array([seed & 0xFFFFFFFF, seed >> 32, new.choice], np.uint32)
        host["seeds"][row] = words.view(np.int32)
        host["penalties"][row] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._options.changed = True
        self._lists.enter(new)
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self._is_cut[row] = temperature > 0.0 and cut
        self._penalised[row] = params.penalised
        self._edited[row] = params.penalised or self._lists.biased_R[row]
        for processor, wanted in self._processors:
            wanted[row] = processor.enter(new)
            self._edited[row] |= wanted[row]
        special = self._is_cut[row] or self._edited[row] or self._lists.masked_R[row]
        self._plain[row] = not special and params.logprobs is None

    def upload(self) -> None:
        """Before a step: options that have changed go to the device."""
        self._options.upload()
        self._lists.upload()

    def is_plain(self, rows: Ints) -> bool:
        """Whether `sample_plain` is enough for these rows."""
        return bool(self._plain[rows].all())

    def sample_plain(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        out_S: torch.Tensor,
        pdl: bool = False,
    ) -> None:
        """A token for each row, into out_S. rows: the batch row that each speaks for; of -1 nothing
        is read or written. positions: the place in its sequence of the token that is chosen now.
        """
        sample_plain(
            logits_SV,
            rows_S,
            positions_S,
            self._draw,
            out_S,
            self._draw_scratch,
            vocab_size=self._vocab_size,
            pdl=pdl,
        )

    def sample(
        self,
        logits_NV: torch.Tensor,
        rows: Ints,
        positions: Ints,
        rows_N: torch.Tensor,
        positions_N: torch.Tensor,
        out_N: torch.Tensor,
    ) -> PendingLogprobs | None:
        """A token for each row, into out_N; the logits are overwritten. rows and positions, as in
        `sample_plain`, on the host and (int32) on the device. Returns the log-probabilities of the
        rows that want any.
        """
        wanted = np.flatnonzero(self._num_logprobs[rows] >= 0).astype(np.int32)
        places = to_device(wanted, self._device) if wanted.size else None
        masked = self._lists.masked_R[rows]
        raw, raw_places = logits_NV, places
        if places is not None and masked[wanted].any():
            raw = logits_NV.index_select(0, places)
            raw_places = to_device(np.arange(len(wanted), dtype=np.int32), self._device)
        if masked.any():
            self._lists.mask(logits_NV, rows, rows_N, positions_N)
        edited = np.flatnonzero(self._edited[rows])
        if not edited.size:
            self._choose(logits_NV, rows, rows_N, positions_N, out_N)
        else:
            self._choose_edited(logits_NV, rows, positions, edited, rows_N, positions_N, out_N)
        if places is None or raw_places is None:
            return None
        chosen = out_N.index_select(0, places)
        asked = self._num_logprobs[rows[wanted]]
        return PendingLogprobs(raw, raw_places, chosen, wanted, asked, self._vocab_size)

    def warm_up(self, logits_like: torch.Tensor) -> None:
        """Run every kernel once on logits of this type and row stride, [up to R, V], before the
        first sequence enters: nothing is then compiled in somebody's step.
        """
        for params, words in _WARM_UP:
            new = NewSequence(0, "", 0, codec.pack([0]), 1, 0, b"", params, words)
            self.enter(new)
            self.upload()
            for num_rows in {1, len(logits_like)}:
                rows, positions = np.zeros(num_rows, np.int32), np.ones(num_rows, np.int32)
                arrays = [to_device(each, self._device) for each in (rows, positions, rows)]
                logits = logits_like[:num_rows].clone()
                pending = self.sample(logits, rows, positions, *arrays)
                if pending is not None:
                    pending.read()
                for pdl in (False, True) if logits.is_cuda else (False,):
                    self.sample_plain(logits_like[:num_rows], *arrays, pdl)
        self.enter(NewSequence(0, "", 0, codec.pack([0]), 1, 0, b"", SamplingParams(temperature=0)))

    def _choose(
        self,
        logits_NV: torch.Tensor,
        rows: Ints,
        rows_N: torch.Tensor,
        positions_N: torch.Tensor,
        out_N: torch.Tensor,
    ) -> None:
        """rows: those whose tokens count. Of the rest rows_N is -1."""
        kept = None
        if self._is_cut[rows].any():
            if self._cut_scratch is None:
                self._cut_scratch = cut_scratch(len(self._plain), self._vocab_size, self._device)
            kept = find_cuts(
                logits_NV,
                rows_N,
                self._draw,
                self._cuts,
                self._cut_scratch,
                vocab_size=self._vocab_size,
            )
        sample_plain(
            logits_NV,
            rows_N,
            positions_N,
            self._draw,
            out_N,
            self._draw_scratch,
            vocab_size=self._vocab_size,
            kept=kept,
        )

    def _choose_edited(
        self,
        logits_NV: torch.Tensor,
        rows: Ints,
        positions: Ints,
        edited: NDArray[np.int64],
        rows_N: torch.Tensor,
        positions_N: torch.Tensor,
        out_N: torch.Tensor,
    ) -> None:
        which = to_device(edited, self._device)
        own = logits_NV.index_select(0, which)[:, : self._vocab_size].float().contiguous()
        own_rows, own_positions = rows_N[which], positions_N[which]
        self._edit(own, rows[edited], positions[edited], own_rows, own_positions)
        chosen = torch.empty_like(own_rows)
        self._choose(own, rows[edited], own_rows, own_positions, chosen)
        if len(edited) < len(rows):
            others = rows_N.index_fill(0, which, -1)
            self._choose(logits_NV, np.delete(rows, edited), others, positions_N, out_N)
        out_N.index_copy_(0, which, chosen.to(out_N.dtype))

    def _edit(
        self,
        logits_NV: torch.Tensor,
        rows: Ints,
        positions: Ints,
        rows_N: torch.Tensor,
        positions_N: torch.Tensor,
    ) -> None:
        if self._lists.biased_R[rows].any():
            self._lists.add_biases(logits_NV, rows_N)
        self._process(logits_NV, rows, positions)
        if self._penalised[rows].any():
            if self._penalty_counts is None:
                self._penalty_counts = penalty_counts(
                    len(self._plain), self._vocab_size, self._device
                )
            penalise(
                logits_NV,
                rows_N,
                positions_N,
                self._tokens,
                self._lists.num_prompt_R,
                self._options.device["penalties"],
                self._penalty_counts,
                vocab_size=self._vocab_size,
            )

    def _process(self, logits_NV: torch.Tensor, rows: Ints, positions: Ints) -> None:
        """Logits processors, which want known tokens on the host: this waits for the device."""
        own = [row for row in rows.tolist() if any(wanted[row] for _, wanted in self._processors)]
        if not own:
            return
        self._known_tokens[own] = self._tokens[own].cpu().numpy()
        for processor, wanted in self._processors:
            which = np.flatnonzero(wanted[rows])
            if which.size:
                place = to_device(which, self._device)
                part = logits_NV.index_select(0, place)
                processor.apply(part, rows[which], self._known_tokens, positions[which])
                logits_NV.index_copy_(0, place, part)


_WORDS = [codec.pack([0, 1])]
_WARM_UP: list[tuple[SamplingParams, list[bytes]]] = [
    (SamplingParams(temperature=0.0, min_tokens=2, logprobs=0), _WORDS),
    (SamplingParams(seed=0, top_k=2, top_p=0.5, min_p=0.1, logprobs=5), []),
    (SamplingParams(temperature=0.0, logit_bias={0: 1.0}, presence_penalty=1.0, logprobs=20), []),
    (SamplingParams(seed=0, top_p=0.5, allowed_token_ids=(0,), frequency_penalty=1.0), []),
]
