"""How `batch_linear` divides its work, and for which weights it is faster than cuBLAS.

A program takes `rows` rows of the weight (of a gated activation: half of them gates, half ups),
`tokens` rows of x, and one of `splits` pieces of the inputs, `block` inputs at a time, with
`stages` blocks in flight. `prefetch` blocks of the weight are asked into the L2 cache before the
kernel ahead has ended. With one stage a split is one block, and all of its weight is in shared
memory by then. `swap` gives the weight to the tensor core as the left operand, whose 64 rows it
then fills however few the tokens are; without, the tokens are the left operand. `tma` is the kernel
of tile_linear.py, whose splits are a power of two.

TUNED is what `scripts/tune dense` writes.
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
    tma: bool = False


# (rows of the weight, inputs, gated) -> {tokens: configuration}, where it beats cuBLAS by more than
# 3 % in `scripts/tune dense` on an H200. None: cuBLAS was as good at so many tokens.
TUNED: dict[tuple[int, int, bool], dict[int, Config | None]] = {
    (4096, 1024, False): {
        2: Config(64, 16, 512, 2, 8, 1, 0, True),
        8: Config(64, 16, 512, 2, 4, 1, 1, True),
        16: Config(128, 16, 256, 4, 8, 1, 0, True),
        32: Config(64, 32, 128, 2, 4, 5, 4, True),
        64: Config(64, 64, 128, 1, 4, 6, 4, True, True),
        128: Config(64, 64, 128, 1, 4, 6, 1, False, True),
        192: Config(128, 64, 128, 1, 4, 4, 2, False, True),
        256: Config(64, 128, 128, 1, 4, 4, 1, False, True),
    },
    (1024, 2048, False): {
        2: Config(32, 16, 512, 4, 4, 1, 0, False),
        8: Config(32, 16, 512, 4, 4, 1, 0, False),
        16: Config(32, 16, 512, 4, 4, 1, 0, False),
        32: Config(32, 32, 512, 4, 4, 1, 1, False),
        64: Config(32, 64, 128, 4, 4, 4, 4, False),
        128: Config(32, 64, 256, 2, 4, 3, 1, False),
        192: Config(64, 64, 128, 1, 4, 6, 1, False, True),
        256: Config(64, 64, 128, 1, 4, 6, 1, False, True),
    },
    (6144, 1024, True): {
        2: Config(64, 16, 128, 1, 4, 6, 0, True),
        8: Config(64, 16, 128, 1, 4, 6, 0, True),
        16: Config(64, 16, 128, 1, 4, 6, 0, True),
        32: Config(64, 32, 128, 1, 4, 5, 4, True),
        64: Config(64, 64, 128, 1, 4, 5, 4, True),
        128: Config(128, 64, 128, 1, 4, 4, 2, False, True),
        192: None,
        256: None,
    },
    (1024, 3072, False): {
        2: Config(64, 16, 512, 6, 4, 1, 1, True),
        8: Config(64, 16, 512, 6, 4, 1, 1, True),
        16: Config(64, 16, 512, 6, 4, 1, 1, True),
        32: Config(32, 32, 512, 6, 4, 1, 0, False),
        64: Config(32, 64, 128, 4, 4, 5, 4, False),
        128: Config(64, 64, 128, 4, 4, 5, 1, True),
        192: Config(64, 64, 128, 1, 4, 6, 4, False, True),
        256: Config(64, 64, 128, 1, 4, 6, 4, False, True),
    },
    (151936, 1024, False): {
        2: Config(128, 16, 128, 1, 4, 5, 0, True),
        8: Config(128, 16, 128, 1, 8, 5, 2, True),
        16: Config(128, 16, 128, 1, 4, 5, 2, True),
        32: Config(64, 32, 128, 1, 4, 4, 0, True),
        64: Config(64, 64, 128, 1, 4, 3, 0, False, True),
        128: None,
        192: None,
        256: None,
    },
    (6144, 4096, False): {
        2: Config(64, 16, 128, 1, 4, 6, 0, True),
        8: None,
        16: None,
        32: None,
        64: Config(64, 64, 128, 1, 4, 6, 4, True, True),
        128: None,
        192: None,
        256: None,
    },
    (4096, 4096, False): {
        2: Config(64, 16, 128, 2, 4, 6, 4, True),
        8: Config(64, 16, 128, 2, 4, 6, 4, True),
        16: Config(64, 16, 128, 2, 4, 6, 4, True),
        32: Config(64, 32, 128, 2, 4, 6, 4, True),
        64: Config(64, 64, 128, 1, 4, 6, 4, True, True),
        128: None,
        192: None,
        256: None,
    },
    (28672, 4096, True): {
        2: None,
        8: None,
        16: None,
        32: None,
        64: Config(128, 64, 128, 1, 4, 4, 1, True, True),
        128: Config(256, 128, 64, 1, 8, 4, 2, True, True),
        192: None,
        256: None,
    },
    (4096, 14336, False): {
        2: Config(64, 16, 128, 2, 4, 6, 4, True),
        8: Config(64, 16, 128, 2, 4, 6, 0, True),
        16: Config(64, 16, 128, 2, 4, 6, 4, True),
        32: Config(64, 32, 128, 2, 4, 5, 4, True),
        64: Config(64, 64, 128, 2, 4, 5, 1, True),
        128: None,
        192: None,
        256: None,
    },
    (128256, 4096, False): {
        2: Config(128, 16, 128, 1, 4, 3, 2, True),
        8: Config(128, 16, 128, 1, 8, 3, 2, True),
        16: Config(128, 16, 128, 1, 8, 3, 2, True),
        32: Config(128, 32, 128, 1, 8, 2, 2, True),
        64: Config(128, 64, 128, 1, 4, 2, 0, False),
        128: None,
        192: None,
        256: None,
    },
}


def configuration(
    rows: int, inputs: int, gated: bool, tokens: int, itemsize: int = 2
) -> Config | None:
    """That of the next number of tokens measured for this shape; None: take cuBLAS.

    Shapes that weren't measured are left to cuBLAS: whether a product beats it hangs on how it
    happens to cut that shape, which no rule here foretells.
    """
    # What was measured is 16 bits; wider elements may not fit into shared memory.
    measured = TUNED.get((rows, inputs, gated), {}) if itemsize == 2 else {}
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
