"""How `few_linear` divides its work, by the shape of the weight.

A configuration is what one program takes: `rows` outputs (a gated activation doubles the rows of
the weight), `block` inputs at a time, spread over `warps`. A warp loads 256 inputs of a row at once
(16 bytes a thread in 16-bit types).

Two things pull against each other. Many rows in a program share its loads of x and of the norm's
weight, and keep more bytes in flight. Few rows make many programs, which fill all multiprocessors
and end together.
"""

from __future__ import annotations

from typing import NamedTuple

PROGRAMS = 1024  # at least so many, as long as there are rows: about eight on a multiprocessor
MOST_BLOCK = 4096
MOST_PER_THREAD = 64  # elements of the weight in flight: eight loads of 16 bytes in 16-bit types


class Config(NamedTuple):
    rows: int
    warps: int
    block: int


# (rows of the weight, inputs, gated) -> the fastest of `scripts/tune few` on an H200,
# for shapes where it beats the rule by more than the noise.
TUNED: dict[tuple[int, int, bool], Config] = {
    (4096, 1024, False): Config(4, 2, 512),
    (1024, 2048, False): Config(2, 8, 2048),
    (1024, 3072, False): Config(4, 8, 2048),
    (4096, 4096, False): Config(2, 8, 2048),
    (4096, 14336, False): Config(2, 8, 4096),
}


def configuration(rows: int, inputs: int, gated: bool = False) -> Config:
    """For a weight of [rows, inputs]. gated: an activation halves its rows."""
    return TUNED.get((rows, inputs, gated)) or rule(rows, inputs, gated)


def rule(rows: int, inputs: int, gated: bool = False) -> Config:
    """A whole row in one block if it fits, and as many rows as leave enough programs."""
    block = _block(inputs)
    warps = min(max(block // 512, 2), 8)
    outputs, taken = (rows // 2, 2) if gated else (rows, 4)
    while taken > 1 and (
        outputs // taken < PROGRAMS
        or per_thread(Config(taken, warps, block), inputs, gated) > MOST_PER_THREAD
    ):
        taken //= 2
    return Config(taken, warps, block)


def per_thread(config: Config, inputs: int, gated: bool) -> int:
    """Elements of the weight that a thread has in flight: of this block and of the next."""
    rows = config.rows * (2 if gated else 1)
    return rows * config.block * min(2, -(-inputs // config.block)) // (32 * config.warps)


def _block(inputs: int) -> int:
    """The power of two that holds all inputs, or else cuts them with the least left over."""
    whole = 1 << max(inputs - 1, 0).bit_length()
    if whole <= MOST_BLOCK:
        return max(whole, 16)
    return min((MOST_BLOCK, MOST_BLOCK // 2), key=lambda block: (-inputs % block, -block))
