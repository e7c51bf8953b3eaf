"""How `batch_linear` divides its work, and for which weights it is faster than cuBLAS.

A program takes `rows` rows of the weight (of a gated activation: half of them gates, half ups),
`tokens` rows of x, and one of `splits` pieces of the inputs, `block` inputs at a time, with
`stages` blocks in flight. `prefetch` blocks of the weight are asked into the L2 cache before the
kernel ahead has ended. With one stage a split is one block, and all of its weight is in shared
memory by then. `swap` gives the weight to the tensor core as the left operand, whose 64 rows it
then fills however few the tokens are; without, the tokens are the left operand.
"""

from __future__ import annotations

from typing import NamedTuple

MULTIPROCESSORS = 132
MOST_SPLITS = 16
# Bytes of shared memory that all stages may take, so that two programs share a multiprocessor.
SHARED_BYTES = 108 * 1024


class Config(NamedTuple):
    rows: int
    tokens: int
    block: int
    splits: int
    warps: int
    stages: int
    prefetch: int
    swap: bool


# (rows of the weight, inputs, gated) -> {tokens: configuration}, where it beats cuBLAS by more than
# 3 % in scripts/gpu_bench/batch_linear.py on an H200. None: cuBLAS was as good at so many tokens.
TUNED: dict[tuple[int, int, bool], dict[int, Config | None]] = {}


def configuration(rows: int, inputs: int, gated: bool, tokens: int) -> Config | None:
    """That of the next number of tokens measured for this shape; None: take cuBLAS.

    Shapes that weren't measured are left to cuBLAS: whether a product beats it hangs on how it
    happens to cut that shape, which no rule here foretells.
    """
    measured = TUNED.get((rows, inputs, gated), {})
    return measured.get(min((t for t in measured if t >= tokens), default=0))


def rule(rows: int, inputs: int, gated: bool, tokens: int, itemsize: int = 2) -> Config:
    """A sound configuration for any shape, for who wants this product whatever cuBLAS does."""
    tile = tokens_tile(tokens)
    block = 256 // itemsize if tile <= 64 else 128 // itemsize
    block = max(16, min(block, 1 << max(inputs - 1, 0).bit_length()))
    taken = 128 if tile >= 128 else 64
    programs = -(-rows // taken) * -(-tokens // tile)
    blocks = -(-inputs // block)
    splits = 1
    while splits < MOST_SPLITS and programs * splits < MULTIPROCESSORS and blocks >= 4 * splits:
        splits *= 2
    warps = 8 if taken * tile >= 16384 else 4
    stages = stages_within(SHARED_BYTES, taken, tile, block, itemsize)
    return Config(taken, tile, block, splits, warps, stages, min(4, blocks // splits), True)


def tokens_tile(tokens: int) -> int:
    """The power of two that holds the tokens, 16 at least and 128 at most."""
    return min(max(16, 1 << max(tokens - 1, 0).bit_length()), 128)


def stages_within(shared: int, rows: int, tokens: int, block: int, itemsize: int = 2) -> int:
    """How many blocks of the weight and of x fit into so many bytes: from 2 to 6."""
    return max(2, min(6, shared // ((rows + tokens) * block * itemsize)))
