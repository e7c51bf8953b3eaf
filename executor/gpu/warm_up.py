"""The launches that a runner makes once before anybody waits for one: every variant of every kernel
that a step can need is compiled and loaded by them, and the largest step takes its memory.

All of it is inert: no sequence is real, so nothing is read from the cache or written to it. Of a
model's layers one of each kind is enough. Kernels differ by the number of tokens, or of sequences
of one token, and by the bound of their context; by whether they are launched programmatically, as
in graphs; and by the sampling options that rows have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kernels.gpu.blocks import copy_blocks
from .batch import TOKENS_PADDED_TO, GpuBatch
from .decoder import GpuDecoder, Work
from .graphs import batch_sizes
from .sampler import Sampler

Progress = Callable[[int, int], None]


class WarmUp:
    """programmatic: decode steps will be graphs, whose launches are programmatic."""

    def __init__(
        self, batch: GpuBatch, decoder: GpuDecoder, sampler: Sampler, programmatic: bool
    ) -> None:
        self._batch, self._decoder, self._sampler = batch, decoder, sampler
        self._programmatic = programmatic
        self._layers = decoder.representatives()

    def run(self, bounds: list[int], progress: Progress) -> None:
        jobs = [
            *(lambda size=size: self._decode(size, bounds) for size in self._sizes()),
            *(lambda tokens=tokens: self._prefill(tokens) for tokens in self._tokens()),
            self._sample_all,
        ]
        for done, job in enumerate(jobs):
            progress(done, len(jobs))
            job()
        progress(len(jobs), len(jobs))

    def copy_nothing(self) -> None:
        """With the real cache, whose strides are wider than a small one's."""
        nowhere = torch.full((1,), -1, dtype=torch.int32, device=self._batch.inputs.device)
        copy_blocks(self._decoder.cache, nowhere, nowhere)

    def _sizes(self) -> list[int]:
        return batch_sizes(self._batch.capacity)

    def _tokens(self) -> list[int]:
        """From the fewest tokens of a mixed step to the most."""
        tokens, most = [], self._batch.max_tokens
        size = TOKENS_PADDED_TO
        while size < most:
            tokens.append(size)
            size *= 4
        return [*tokens, most]

    def _decode(self, size: int, bounds: list[int]) -> None:
        """As a graph will have it, as an eager step has it, and beside prefill."""
        batch = self._batch
        ways = [True] if self._programmatic else [False]
        if self._programmatic and size > 1:  # one alone is never beside prefill
            ways.append(False)
        for pdl in ways:
            batch.prepare_decode(size, pdl)
            for bound in bounds:
                work = Work(size, size, bound)
                self._decoder.forward(work, self._layers, pdl)
                logits_NV = self._decoder.logits(batch.last_N[:size], work, pdl)
            self._sampler.sample_plain(
                logits_NV,
                batch.sample_rows_N[:size],
                batch.sample_positions_N[:size],
                batch.sampled_N[:size],
                pdl=pdl,
            )
            batch.append(size, pdl)

    def _prefill(self, tokens: int) -> None:
        batch = self._batch
        batch.lay_out_tokens(1, TOKENS_PADDED_TO, tokens)
        nobody = torch.full((2, 1), -1, dtype=torch.int32, device=batch.inputs.device)
        work = Work(tokens, 0, 0, nobody)
        self._decoder.forward(work, self._layers)
        self._decoder.logits(batch.last_N[: batch.capacity], work)

    def _sample_all(self) -> None:
        """All rows at once take the most memory; numbers of rows differ in what divides them."""
        logits_NV = self._decoder.logits_NV
        for count in (3, len(logits_NV)):
            self._sampler.warm_up(logits_NV[:count])
