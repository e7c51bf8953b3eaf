"""Gumbel noise by counting, for kernels that sample: argmax(logit + temperature * noise) draws a
token from the softmax (Gumbel, "Statistical theory of extreme values", 1954).

Noise of a token comes from Philox4x32-10, as executor/philox.py counts:

    key      the request's 64-bit seed
    counter  (position, purpose, lane, choice)

A block of Philox has four words, so a lane serves four tokens. Tokens come in units of 4 * LANES:
token `unit * 4 * LANES + word * LANES + j` takes `word` of lane `unit * LANES + j`. A lane's tokens
are thus apart, and neighbouring tokens are read together.

A word w gives v = (w + 1/2) / 2**32, and -log(-log(1 - v)) is the noise. What wins has a small v,
where float32 is finest; at the other end v stops short of 1. Constants that all tokens share are
left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LANES = 512
SAMPLE = 0  # purpose, as executor/philox.py numbers them

_LARGEST = tl.constexpr(3.4028234e38)
_LAST_V = tl.constexpr(1.0 - 2.0**-24)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def clean(x):
    """Logits as float32 without NaN (impossible) and +inf (the largest number)."""
    x = x.to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), _LARGEST)


@triton.jit
def gumbel(word):
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _LAST_V)
    near = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * 0.25))) * _LOG2_E
    return tl.log2(tl.where(v < 0.03125, near, -tl.log2(1.0 - v))) * -_LN_2


@triton.jit
def gumbel_of_lanes(lanes, position, purpose, choice, seed_low, seed_high):
    """Noise of each lane's four tokens. All are uint32."""
    zeros = lanes * 0
    seed = (seed_high.to(tl.uint64) << 32) | seed_low.to(tl.uint64)
    a, b, c, d = tl.philox(seed, zeros + position, zeros + purpose, lanes, zeros + choice)
    return gumbel(a), gumbel(b), gumbel(c), gumbel(d)


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


def gumbel_reference(
    vocab_size: int,
    positions_S: torch.Tensor,
    seeds_S3: torch.Tensor,
    purpose: int = SAMPLE,
) -> torch.Tensor:
    """Noise float32 [S, vocab_size]. seeds: low word, high word and choice, as int32 bits."""
    units = -(-vocab_size // (4 * LANES))
    device = positions_S.device
    width = min(LANES, vocab_size)  # a small vocabulary needs no more of the first word's lanes
    lanes = torch.arange(units * width, device=device)[None]
    low, high, choice = (seeds_S3.long() & 0xFFFFFFFF).unbind(1)
    position = positions_S.long()[:, None]
    words = philox_reference(
        (position, torch.full_like(position, purpose), lanes, choice[:, None]),
        (low[:, None], high[:, None]),
    )
    together = torch.stack([word.expand(len(position), -1) for word in words], 1)
    tokens = together.reshape(len(position), 4, units, width).transpose(1, 2)
    v = (tokens.flatten(1)[:, :vocab_size].double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v) * _LOG2_E.value).float()
