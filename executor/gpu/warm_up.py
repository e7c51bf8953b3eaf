"""The launches that a runner makes once before anybody waits for one: every variant of every kernel
that a step can need, and the largest step takes its memory.

They are made twice. `variants` only asks which variants they need, so that these can be compiled
side by side (compile_ahead.py); `run` launches them, which loads them onto the device.

All of it is inert: no sequence is real, so nothing is read from the cache or written to it. Of a
model's layers one of each kind is enough. Kernels differ by the number of tokens, or of sequences
of one token, and by the bound of its context where there is one alone; by whether they are
launched programmatically, as in graphs; and by the sampling options that rows have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...kernels.gpu.blocks import copy_blocks
from .batch import TOKENS_PADDED_TO, GpuBatch
from .decoder import GpuDecoder
from .graphs import batch_sizes
from .parallel import AnySampler
from .stages import NoSampler
from .work import Work

if TYPE_CHECKING:
    from .variants import Variant

Progress = Callable[[int, int], None]
Job = Callable[[], None]

_WIDE = 1 << 31  # a stride that needs 64 bits


class WarmUp:
    """bounds_of: from a number of sequences to the bounds of their contexts that make a difference.
    programmatic: decode steps will be graphs, whose launches are programmatic.
    """

    def __init__(
        self,
        batch: GpuBatch,
        decoder: GpuDecoder,
        sampler: AnySampler | NoSampler,
        bounds_of: Callable[[int], list[int]],
        programmatic: bool,
    ) -> None:
        self._batch, self._decoder, self._sampler = batch, decoder, sampler
        self._bounds_of, self._programmatic = bounds_of, programmatic
        self._layers = decoder.representatives()

    def variants(self) -> list[Variant]:
        """What `run` and `copy_nothing` will launch, in that order, once each."""
        from .variants import collect

        with collect() as found, self._decoder.at_rest():
            for job in self._jobs():
                job()
            self._copy_in_any_cache()
        return list(found.values())

    def run(self, progress: Progress) -> None:
        jobs = self._jobs()
        for done, job in enumerate(jobs):
            progress(done, len(jobs))
            job()
        progress(len(jobs), len(jobs))

    def copy_nothing(self) -> None:
        """With the real cache, whose strides are wider than a small one's."""
        nowhere = self._nowhere()
        copy_blocks(self._decoder.cache, nowhere, nowhere)

    def _jobs(self) -> list[Job]:
        return [
            *(lambda size=size: self._decode(size) for size in self._sizes()),
            *(lambda tokens=tokens: self._prefill(tokens) for tokens in self._tokens()),
            self._sample_all,
        ]

    def _sizes(self) -> list[int]:
        return batch_sizes(self._batch.capacity)

    def _tokens(self) -> list[int]:
        """From the fewest tokens of a mixed step to the most."""
        tokens, most = [], self._batch.max_tokens
        size = TOKENS_PADDED_TO
        while size < most:
            tokens.append(size)
            size *= 4
        own = self._decoder.distinct_steps(most)
        return sorted({*tokens, most, *(size for size in own if size >= TOKENS_PADDED_TO)})

    def _nowhere(self) -> torch.Tensor:
        return torch.full((1,), -1, dtype=torch.int32, device=self._batch.inputs.device)

    def _copy_in_any_cache(self) -> None:
        """How many blocks the cache will have isn't known yet, so neither is which of its strides
        need 64 bits. Nothing is launched here, and one block stands for all.
        """
        nowhere, cache = self._nowhere(), self._decoder.cache
        for layer, part in ((16, 16), (_WIDE, 16), (_WIDE, _WIDE)):
            strides = (layer, part, *cache.stride()[2:])
            block = cache[:1, :1, :1]
            copy_blocks(block.as_strided(block.shape, strides), nowhere, nowhere)

    def _decode(self, size: int) -> None:
        """As a graph will have it, as an eager step has it, and beside prefill."""
        batch = self._batch
        ways = [True] if self._programmatic else [False]
        if self._programmatic and size > 1:  # one alone is never beside prefill
            ways.append(False)
        for pdl in ways:
            batch.prepare_decode(size, pdl)
            for bound in self._bounds_of(size):
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
