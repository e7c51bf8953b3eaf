"""Random numbers by counting, for kernels that sample: executor/philox.py's, bit by bit.

    key      the request's 64-bit seed
    counter  (position, purpose, lane, choice)

So a request draws the same numbers on every device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SAMPLE = 0  # purpose, as executor/philox.py numbers them

_LARGEST = tl.constexpr(3.4028234e38)


@triton.jit
def clean(x):
    """Logits as float32 without NaN (impossible) and +inf (the largest number)."""
    x = x.to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), _LARGEST)


@triton.jit
def uniform(position, purpose, choice, seed_low, seed_high):
    """A float64 in [0, 1) of 52 bits, lane 0's. All are uint32."""
    zero = position * 0
    seed = (seed_high.to(tl.uint64) << 32) | seed_low.to(tl.uint64)
    high, low, _, _ = tl.philox(seed, position, zero + purpose, zero, choice)
    bits = (high >> 6).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)
    return bits * 2.220446049250313e-16


def philox_reference(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Four words of a block, int64 tensors below 2**32 as all that goes in."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high_0, low_0 = _multiply(0xD2511F53, c0)
        high_1, low_1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def _multiply(factor: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # By halves: a product of two 32-bit words doesn't fit in 63 bits.
    low = (factor & 0xFFFF) * words
    high = (factor >> 16) * words + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def uniform_reference(
    positions_S: torch.Tensor, seeds_S3: torch.Tensor, purpose: int = SAMPLE
) -> torch.Tensor:
    """float64 [S]. seeds: low word, high word and choice, as int32 bits."""
    low, high, choice = (seeds_S3.long() & 0xFFFFFFFF).unbind(1)
    position = positions_S.long() & 0xFFFFFFFF
    zeros = torch.zeros_like(position)
    words = philox_reference((position, zeros + purpose, zeros, choice), (low, high))
    return ((words[0] >> 6).double() * 2.0**26 + (words[1] >> 6).double()) * 2.0**-52


def clean_reference(logits: torch.Tensor) -> torch.Tensor:
    x = logits.float()
    return x.where(x == x, -torch.inf).clamp(max=torch.finfo(torch.float32).max)
