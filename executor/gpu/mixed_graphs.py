"""CUDA graphs of steps that have prompts in them: from what changes in the batch to the last layer.
Logits, which only some tokens have, and sampling follow outside.

Launched kernel by kernel such a step keeps the host busy for longer than its device, up to
thousands of tokens of a small model; and a short prompt alone waits for its launches, not for its
computing. Beyond that (BUSY_SECONDS) padding would cost more than the launches.

There is a graph for each padded number of tokens, with and without sequences of one token, whose
attention is decode attention's. What a step has of the rest is read on the device, and padded with
what is inert: sequences to the batch's capacity, tiles of prefill attention, which say how many
there are, to as many as so many tokens and sequences can make. A graph with sequences of one token
serves a step that has none, too: where replicas must all replay the same one (replicas.py), there
are no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.gpu.prefill_attention import plan_tiles, tile_tokens
from .batch import Ints, Step
from .graphs import Progress, at_least, capture_graphs

SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
BUSY_SECONDS = 20e-3  # about twice of what the launches of a step take
RATE = 600e12  # operations in a second, of a step with many tokens


class Mixed(NamedTuple):
    """tokens: of the step, padded. decodes: of these, the first so many may be a sequence each, for
    decode attention; 0: none is. tiles: columns of prefill attention's plan, padded.
    """

    tokens: int
    decodes: int
    tiles: int


Run = Callable[[Mixed], None]


def token_counts(most: int, weight_bytes: int) -> list[int]:
    """What steps of at most `most` tokens are padded to. A weight of two bytes takes two operations
    a token, one of fewer bytes the time of fewer.
    """
    longest = int(BUSY_SECONDS * RATE / weight_bytes)
    counts = [size for size in SIZES if size < most and size <= longest]
    return [*counts, most] if most <= longest else counts


class MixedGraphs:
    """counts: of tokens. capacity: most sequences of a step. group: query heads of a key head.
    alike: whether replicas must all replay the same one.
    """

    def __init__(self, counts: list[int], capacity: int, group: int, alike: bool = False) -> None:
        self.counts, self._capacity, self._alike = counts, capacity, alike
        self._tile_tokens = tile_tokens(group)
        self._graphs: dict[Mixed, torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def kinds(self) -> list[Mixed]:
        """Of every graph, the largest first."""
        return [
            self._kind(tokens, decodes)
            for tokens in reversed(self.counts)
            for decodes in ((True,) if self._alike else (True, False))
        ]

    def _kind(self, tokens: int, decodes: bool) -> Mixed:
        sequences = min(self._capacity, tokens)
        tiles = 1 + -(-tokens // self._tile_tokens) + sequences
        return Mixed(tokens, sequences if decodes else 0, tiles)

    def kind_of(self, step: Step) -> Mixed | None:
        """What serves a step; None where it is too large."""
        # What replicas have agreed on is a graph's, or too large for all.
        tokens = step.tokens if step.num_tokens is not None else int(step.ends[-1])
        if not self.counts or tokens > self.counts[-1]:
            return None
        return self._kind(at_least(self.counts, tokens), self._alike or step.decodes > 0)

    def capture(self, run: Run, stream: torch.cuda.Stream, progress: Progress) -> None:
        """All of them, as capture_graphs."""
        self._graphs = capture_graphs(self.kinds(), run, stream, progress)

    def replay(self, kind: Mixed) -> None:
        self._graphs[kind].replay()


def lay_out_tiles(step: Step, head_group: int, mixed: Mixed | None) -> Ints:
    """`plan_tiles` of the sequences of a step with prompts that prefill attention serves. mixed:
    its graph, if it has one, to whose size the plan is padded.
    """
    first = int(np.count_nonzero(step.lengths == 1)) if step.decodes else 0
    tiles = plan_tiles(step.lengths[first:], head_group, step.context[first:])
    tiles[0, 1:] += first
    if mixed is not None:
        tiles = np.pad(tiles, ((0, 0), (0, mixed.tiles - tiles.shape[1])))
    return tiles
