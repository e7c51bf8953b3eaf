"""Groups of layers that share one pool of KV blocks, and how many blocks sequences need.

Layers that see alike (all keys, or a window of them) are dealt into groups of equal size. A block
holds keys and values of block_size tokens in all layers of one group, so every block has as many
bytes as every other, whichever group it serves, and one pool serves all. A sequence has a block
table for each group. (Jenga: Zhang et al., 2025.)

    spec                a token at place p sees    of blocks before that, a sequence
    FullAttentionSpec   0 .. p                     keeps all
    SlidingWindowSpec   p - window + 1 .. p        gives back all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .config import EngineConfig
from .messages import FullAttentionSpec, KVSpec, SlidingWindowSpec

_PLENTY = 1 << 32  # of blocks


class Group(NamedTuple):
    spec: KVSpec
    layers: list[int]


def deal(windows: Sequence[int]) -> list[Group]:
    """windows: each layer's sliding window, 0 for none. Groups are as large as the rarest kind has
    layers; the last one of a kind may have fewer.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in kinds.values())
    return [
        Group(spec_of(window), layers[first : first + size])
        for window, layers in sorted(kinds.items())
        for first in range(0, len(layers), size)
    ]


def spec_of(window: int) -> KVSpec:
    return SlidingWindowSpec(window) if window else FullAttentionSpec()


def window_of(spec: KVSpec) -> int:
    """0 for none."""
    return spec.window if isinstance(spec, SlidingWindowSpec) else 0


def longest_chunk(config: EngineConfig) -> int:
    """Tokens that one sequence computes in one step at most."""
    budget = config.max_num_batched_tokens
    return min(budget, config.long_prefill_token_threshold or budget)


def most_blocks(spec: KVSpec, chunk: int, block_size: int) -> int:
    """That a sequence holds in one group, however long it gets: those that a chunk's first token
    sees, and the chunk's own.
    """
    window = window_of(spec)
    return -(-(window - 1 + chunk) // block_size) + 1 if window else _PLENTY


def blocks_for(specs: Sequence[KVSpec], num_tokens: int, chunk: int, block_size: int) -> int:
    """That a sequence of this length holds at most, in all groups."""
    whole = -(-num_tokens // block_size)
    return sum(min(whole, most_blocks(spec, chunk, block_size)) for spec in specs)


def longest_sequence(specs: Sequence[KVSpec], blocks: int, chunk: int, block_size: int) -> int:
    """How many tokens a sequence can have that holds at most so many blocks."""
    least, most = 0, _PLENTY  # whole blocks in each group
    while least < most:
        middle = (least + most + 1) // 2
        fits = blocks_for(specs, middle * block_size, chunk, block_size) <= blocks
        least, most = (middle, most) if fits else (least, middle - 1)
    return least * block_size
