"""How a step is launched on its device, from its inputs there to its tokens: by a graph where there
is one for it, and kernel by kernel where there is none. All of it goes to the current stream.

    lay_out    finds the graph of a step with prompts, and puts what it needs into the slot
    launch     when the slot has been sent: the forward pass, logits and sampling; or the graph that
               has these in it, which only a plain decode step's has
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch

from .attention import launches_of
from .batch import GpuBatch, Slot, Step
from .decoder import GpuDecoder
from .graphs import (
    DecodeGraphs,
    Progress,
    at_least,
    context_bounds,
    distinct_bounds,
    measure_graphs,
)
from .mixed_graphs import Mixed, MixedGraphs, lay_out_tiles, token_counts
from .parallel import Alone, AnySampler, DeviceGroup
from .pending import GpuPending
from .replicas import RowGroup
from .stages import GpuStage, NoSampler
from .work import Work


class Prefill(NamedTuple):
    """Of a step with prompts in it. mixed: its graph, if it has one. tiles: how many there are of
    prefill attention, at the beginning of the slot's tail.
    """

    mixed: Mixed | None = None
    tiles: int = 0


class StepLauncher:
    """exchange: with whom this worker has its steps in common, launch by launch. sizes: what decode
    steps are padded to. alike: whether replicas must all replay the same graph. graphs,
    mixed_graphs: None until they are captured, if they are.
    """

    def __init__(
        self,
        batch: GpuBatch,
        decoder: GpuDecoder,
        sampler: AnySampler | NoSampler,
        stage: GpuStage,
        exchange: RowGroup | DeviceGroup | Alone,
        sizes: list[int],
        max_model_len: int,
        alike: bool,
    ) -> None:
        self._batch, self._decoder, self._sampler, self._stage = batch, decoder, sampler, stage
        self._exchange, self._sizes, self._alike = exchange, sizes, alike
        self._bounds = context_bounds(max_model_len)
        self.fuses = exchange.programmatic and not (stage.crosses or alike)
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self._work = Work(1, 1, 1)  # of the last step

    # --- graphs

    @property
    def num_graphs(self) -> int:
        return len(self.graphs or ()) + len(self.mixed_graphs or ())

    def bounds_of(self, size: int) -> list[int]:
        """The bounds that make a difference to steps of `size` sequences."""
        return sorted(set(distinct_bounds(size, self._bounds, self._attention_of).values()))

    def _attention_of(self, size: int, bound: int) -> Hashable:
        return launches_of(size, bound, self._decoder.config, self._decoder.cache_dtype)

    def plan_graphs(self) -> tuple[DecodeGraphs, MixedGraphs]:
        """None of them captured."""
        most = min(self._batch.max_tokens, self._exchange.most_tokens)
        counts = token_counts(*self._stage.agree(most, self._decoder.num_bytes))
        return (
            DecodeGraphs(self._sizes, self._bounds, self._attention_of, self.fuses),
            MixedGraphs(counts, self._batch.capacity, self._decoder.head_group, self._alike),
        )

    def measure_graphs(self, stream: torch.cuda.Stream, used: Callable[[], int]) -> int:
        """Bytes that all graphs will take. used: bytes that are in use."""
        graphs, mixed = self.plan_graphs()
        kinds, mixes = list(graphs.kinds()), mixed.kinds()
        like: list[tuple[Callable[[], None], int]] = [
            (partial(self.run_decode, *kinds[0]), 1),
            (partial(self.run_decode, *kinds[-1]), len(kinds) - 1),
            *((partial(self.run_mixed, kind), len(mixes)) for kind in mixes[:1]),
        ]
        return measure_graphs(like, stream, used)

    def capture(
        self,
        graphs: DecodeGraphs,
        mixed: MixedGraphs,
        stream: torch.cuda.Stream,
        progress: Progress,
    ) -> None:
        """Those that plan_graphs has planned."""
        decodes = len(list(graphs.kinds()))
        total = decodes + len(mixed.kinds())
        graphs.capture(self.run_decode, stream, lambda done, _: progress(done, total))
        mixed.capture(self.run_mixed, stream, lambda done, _: progress(decodes + done, total))
        self.graphs, self.mixed_graphs = graphs, mixed

    def run_decode(self, size: int, bound: int, whole: bool) -> None:
        """What a graph of a decode step is captured from."""
        work, pdl = Work(size, size, bound), self._exchange.programmatic
        self._batch.prepare_decode(size, pdl)
        self._decoder.forward(work, pdl=pdl)
        self._decoder.logits(self._batch.last_N[:size], work, pdl)
        if whole and self._stage.is_last:
            self._sample_plain(size, pdl)

    def run_mixed(self, mixed: Mixed) -> None:
        """What a graph of a step with prompts is captured from."""
        self._batch.prepare_mixed(mixed.tokens)
        self._decoder.forward(self._work_of(mixed))

    # --- a step

    def lay_out(self, slot: Slot, step: Step | None) -> Prefill:
        """Put the tiles of a step with prompts into its slot, before anything else."""
        if step is None or step.is_decode:
            return Prefill()
        mixed = None if self.mixed_graphs is None else self.mixed_graphs.kind_of(step)
        tiles = lay_out_tiles(step, self._decoder.head_group, mixed)
        place = slot.put(tiles)
        assert place == self._batch.tail
        return Prefill(mixed, tiles.shape[1])

    def launch(self, step: Step, prefill: Prefill, pending: GpuPending) -> None:
        """Once its slot has been sent."""
        plain = self._sampler.is_plain(step.sampled)
        whole = plain and self.fuses
        if not (replayed := self._replay(step, whole)):
            self._run(step, prefill)
        if self._stage.is_last and not (replayed and whole):
            self._sample(step, plain, pending)

    def logits(self, index: torch.Tensor) -> torch.Tensor:
        """Of tokens of the last step, as GpuDecoder.logits."""
        return self._decoder.logits(index, self._work)

    def _replay(self, step: Step, whole: bool) -> bool:
        """Run the graph of a decode step, if there is one."""
        if self.graphs is None or not step.is_decode:
            return False
        bound = at_least(self._bounds, step.longest)
        graph = self.graphs.find(step.decodes, bound, whole)
        if graph is None:
            return False
        graph.replay()
        self._work = Work(step.tokens, step.decodes, bound)
        return True

    def _run(self, step: Step, prefill: Prefill) -> None:
        """The forward pass, and the logits of the sampled tokens."""
        batch, decoder = self._batch, self._decoder
        if prefill.mixed is not None and self.mixed_graphs is not None:
            self.mixed_graphs.replay(prefill.mixed)
            decoder.resume(prefill.mixed.tokens)
            self._work = self._work_of(prefill.mixed)
        else:
            batch.apply_changes()
            sequences = step.decodes if step.is_decode else max(1, len(step.rows))
            batch.lay_out_tokens(sequences, step.tokens, step.longest_chunk)
            bound = at_least(self._bounds, step.longest) if step.decodes else 0
            self._work = Work(step.tokens, step.decodes, bound, self._tiles(prefill.tiles))
            decoder.forward(self._work)
        if len(step.sampled):
            decoder.logits(batch.last_N[: self._samples(step)], self._work)

    def _work_of(self, mixed: Mixed) -> Work:
        bound = self._bounds[-1] if mixed.decodes else 0
        return Work(mixed.tokens, mixed.decodes, bound, self._tiles(mixed.tiles))

    def _tiles(self, count: int) -> torch.Tensor | None:
        return self._batch.view(self._batch.tail, 2, count) if count else None

    def _samples(self, step: Step) -> int:  # padded: a decode step's are its sequences
        return step.decodes if step.is_decode else at_least(self._sizes, len(step.sampled))

    def _sample(self, step: Step, plain: bool, pending: GpuPending) -> None:
        batch, count = self._batch, len(step.sampled)
        if not count:
            return
        if plain:
            self._sample_plain(self._samples(step))
            return
        pending.logprobs = self._sampler.sample(
            self._decoder.logits_NV[:count],
            step.sampled,
            step.positions,
            batch.sample_rows_N[:count],
            batch.sample_positions_N[:count],
            batch.sampled_N[:count],
        )
        batch.append(count)

    def _sample_plain(self, samples: int, pdl: bool = False) -> None:
        batch = self._batch
        self._sampler.sample_plain(
            self._decoder.logits_NV[:samples],
            batch.sample_rows_N[:samples],
            batch.sample_positions_N[:samples],
            batch.sampled_N[:samples],
            pdl=pdl,
        )
        batch.append(samples, pdl)
