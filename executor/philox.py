"""Random numbers by counting: Philox4x32-10 (Salmon et al., "Parallel random numbers", SC 2011).

A draw has a name, and the name alone fixes its value, so that what else is in the batch, and when
a step runs, can't change it:

    key      the request's 64-bit seed
    counter  (position, purpose, lane, choice), 32 bits each

position is the place of the token in its sequence, purpose says what the number is for, lane tells
several numbers of one purpose apart, choice is which of the request's n outputs draws. Philox maps
the names of one seed one to one to blocks of 128 random bits: no two of them share a number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

SAMPLE = 0  # purpose: choosing the next token

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_HIGH_26_OF_32 = np.uint64(6)
_TWO_26 = 2.0**26
_TWO_MINUS_52 = 2.0**-52


@njit("UniTuple(uint64, 4)(uint64, uint64, uint64, uint64, uint64, uint64)", cache=True)
def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Ten rounds on four 32-bit counter words under two 32-bit key words, all held in uint64."""
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0 = (product_1 >> _WORD) ^ c1 ^ k0
        c1 = product_1 & _LOW
        c2 = (product_0 >> _WORD) ^ c3 ^ k1
        c3 = product_0 & _LOW
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


@njit("float64[::1](uint64[::1], uint64[::1], uint64[::1], int64, int64)", cache=True)
def uniforms(seeds: Any, choices: Any, positions: Any, purpose: Any, lane: Any) -> Any:
    """One number in [0, 1) per (seed, choice, position), all uint64 [N].

    It has 52 bits, so that `u * x < x` for every normal x > 0.
    """
    out = np.empty(len(seeds))
    for i in range(len(seeds)):
        seed = seeds[i]
        high, low, _, _ = philox4x32(
            positions[i],
            np.uint64(purpose),
            np.uint64(lane),
            choices[i],
            seed & _LOW,
            seed >> _WORD,
        )
        bits = np.float64(high >> _HIGH_26_OF_32) * _TWO_26 + np.float64(low >> _HIGH_26_OF_32)
        out[i] = bits * _TWO_MINUS_52
    return out
