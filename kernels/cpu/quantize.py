"""Numbers as bytes and halves of bytes: how activations and weights are rounded and laid out.

Activations, q, high and low being signed bytes in -127 .. 127:

    with 4 bits   x = scale * q                    a scale for each group of 32 numbers of a row
    with 8 bits   x = scale * (high + low / 254)   a scale for each row
    in words      x = scale * q, q in -32767 .. 32767, a scale for each row: as good as with 8 bits

No row depends on its neighbours in the batch.

Weights [N, K], each output (a row) with a scale of its own:

    8 bits   w = scale * (u - 128), u an unsigned byte, as the instructions want one side to be
    4 bits   w = scale * (step * q + base), q in 0 .. 15, step and base float16 for each group of 32

Layout, for N and K padded to 64. Bytes that go together are neighbours, as the instructions for
products of bytes want them, which take four inputs at a time:

    8 bits   [N/16, K/4, 16 of N, 4 of K]
    4 bits   [N/16, K/8, 16 of N, 4 of K], low half: inputs 8i .. 8i + 3, high half: the next four
    groups   [N/16, K/32, 2, 16 of N]: the steps of 16 outputs, then their bases
    pairs    [N/16, K/2, 16 of N, 2 of K], signed: 8 bits for instructions that take words (`pairs`)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit

from . import vectors
from .openmp import Chunks, Kernel
from .scalars import bits_of, largest, narrow, pointer, widen

F32 = np.float32(0)
F16 = np.int16(0)  # as scalars.py holds it
I32 = np.int32(0)
U8 = np.uint8(0)

OFFSET = 128  # of stored bytes
GROUP = 32  # inputs that share a step and a base
COLUMNS = 16  # outputs that lie together
LOW = np.float32(1 / 254)  # what one step of a low byte is to one of a high byte
_STEPS = np.float32(254)
_MOST = np.float32(127)
_MOST_WORD = 32767
_LEAST = np.float32(1e-30)  # numbers that are all smaller are all zero
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, to even if halfway
_ROUND_BITS = np.int32(0x4B400000)
_CHUNKS = 64  # of a weight


class QuantizedWeight(NamedTuple):
    """As kernels read it. scales: float32 [padded N], 0 where there is no output. groups: for 4
    bits alone.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self if part is not None)


def padded(size: int) -> int:
    """A size as quantised matrices have it: the next multiple of 64."""
    return -(-size // 64) * 64


def quantize_rows(
    x_TK: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference. int8 [T, K]; scales float32 and sums of the bytes int32, both [T, K / group]. (The
    kernel has their products too, `totals`.)
    """
    x_TGI = x_TK.float().unflatten(1, (-1, group))
    most_TG = x_TGI.abs().amax(2)
    q_TGI = torch.round(x_TGI * _inverses(most_TG, 127)[..., None]).to(torch.int8)
    return q_TGI.flatten(1), most_TG / 127, q_TGI.sum(2, dtype=torch.int32)


def split_rows(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference. High and low bytes int8 [T, 2, K], scales float32 [T], sums of the bytes int32
    [T, 2].
    """
    x_TK = x_TK.float()
    most_T = x_TK.abs().amax(1)
    scaled_TK = x_TK * _inverses(most_T, 127)[:, None]
    high_TK = torch.round(scaled_TK)
    q_T2K = torch.stack([high_TK, torch.round((scaled_TK - high_TK) * _STEPS)], 1).to(torch.int8)
    return q_T2K, most_T / 127, q_T2K.sum(2, dtype=torch.int32)


def _inverses(most: torch.Tensor, whole: int) -> torch.Tensor:
    """whole / most, in one division (torch divides a number by a tensor in two steps)."""
    return torch.where(most < _LEAST, 0.0, torch.full_like(most, whole) / most)


@njit(error_model="numpy")
def _absmax(values):
    most = np.float32(0)
    for i in range(values.shape[0]):
        most = largest(most, abs(widen(values[i])))
    return most


@njit(error_model="numpy")
def _inverse(most, whole):
    return np.float32(0) if most < _LEAST else np.float32(whole) / most


@njit(error_model="numpy")
def _round(value):
    """To whole numbers, which are small."""
    rounded = vectors.as_whole(vectors.add(value, vectors.spread(_ROUND)))
    return vectors.subtract(rounded, vectors.spread(_ROUND_BITS))


@njit(error_model="numpy")
def _largest_size(x, element, element_bytes, size):
    most = vectors.spread(F32)
    for i in range(0, size, 16):
        most = vectors.largest_size(vectors.load_elements(x + i * element_bytes, element), most)
    return vectors.largest_lane(most)


@njit(error_model="numpy")
def _quantize_group(x, element, element_bytes, q, size):
    """Bytes q for `size` (a multiple of 16) elements x, both addresses. Returns scale and sum."""
    largest_one = _largest_size(x, element, element_bytes, size)
    inverse = vectors.spread(_inverse(largest_one, 127))
    total = vectors.zeros()
    for i in range(0, size, 16):
        scaled = vectors.multiply(vectors.load_elements(x + i * element_bytes, element), inverse)
        value = _round(scaled)
        vectors.store_bytes(q + i, value)
        total = vectors.add(total, value)
    return largest_one / _MOST, vectors.sum_lanes(total)


def _quantize_rows(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    groups = a.size // a.group
    scales = carray(pointer(a.scales, F32), (rows * groups,))
    totals = carray(pointer(a.totals, F32), (rows * groups,))
    sums = carray(pointer(a.sums, I32), (rows * groups,))
    first, last = rows * chunk // chunks * groups, rows * (chunk + 1) // chunks * groups
    for g in range(first, last):
        x, q = a.x + g * a.group * a.element_bytes, a.q + g * a.group
        scale, total = _quantize_group(x, a.element, a.element_bytes, q, a.group)
        scales[g], sums[g] = scale, total
        totals[g] = scale * np.float32(total)


# x [rows, size], q int8 [rows, size], scales float32, sums int32 and totals float32 [rows, size /
# group], group a multiple of 16.
quantize_rows_kernel = Kernel(
    _quantize_rows, "rows x q scales sums totals size group element_bytes"
)


@njit(error_model="numpy")
def _split_row(x, element, element_bytes, q, size):
    """High bytes, then low bytes. Returns the scale and the two sums."""
    largest_one = _largest_size(x, element, element_bytes, size)
    inverse, minus = vectors.spread(_inverse(largest_one, 127)), vectors.spread(np.float32(-1))
    steps = vectors.spread(_STEPS)
    highs, lows = vectors.zeros(), vectors.zeros()
    for i in range(0, size, 16):
        scaled = vectors.multiply(vectors.load_elements(x + i * element_bytes, element), inverse)
        high = _round(scaled)
        rest = vectors.add(scaled, vectors.multiply(vectors.to_real(high), minus))
        low = _round(vectors.multiply(rest, steps))
        vectors.store_bytes(q + i, high)
        vectors.store_bytes(q + size + i, low)
        highs, lows = vectors.add(highs, high), vectors.add(lows, low)
    return largest_one / _MOST, vectors.sum_lanes(highs), vectors.sum_lanes(lows)


def _split_rows(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    scales = carray(pointer(a.scales, F32), (rows,))
    sums = carray(pointer(a.sums, I32), (rows, 2))
    for t in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        x, q = a.x + t * a.size * a.element_bytes, a.q + t * 2 * a.size
        scale, highs, lows = _split_row(x, a.element, a.element_bytes, q, a.size)
        scales[t], sums[t, 0], sums[t, 1] = scale, highs, lows


# x [rows, size], q int8 [rows, 2, size], scales float32 [rows], sums int32 [rows, 2], size a
# multiple of 16.
split_rows_kernel = Kernel(_split_rows, "rows x q scales sums size element_bytes")


def row_words(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference. int16 [T, K] and scales float32 [T]."""
    x_TK = x_TK.float()
    most_T = x_TK.abs().amax(1)
    q_TK = torch.round(x_TK * _inverses(most_T, _MOST_WORD)[:, None])
    return q_TK.to(torch.int16), most_T / _MOST_WORD


def _row_words(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    scales = carray(pointer(a.scales, F32), (rows,))
    for t in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        x, q = a.x + t * a.size * a.element_bytes, a.q + t * a.size * 2
        largest_one = _largest_size(x, a.element, a.element_bytes, a.size)
        inverse = vectors.spread(_inverse(largest_one, _MOST_WORD))
        for i in range(0, a.size, 16):
            value = vectors.load_elements(x + i * a.element_bytes, a.element)
            vectors.store_words(q + i * 2, _round(vectors.multiply(value, inverse)))
        scales[t] = largest_one / np.float32(_MOST_WORD)


# x [rows, size], q int16 [rows, size], scales float32 [rows], size a multiple of 16.
row_words_kernel = Kernel(_row_words, "rows x q scales size element_bytes")


def quantize_bytes(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for 8 bits. u uint8 [N, K] and scales [N]."""
    weight_NK = weight_NK.float()
    most_N = weight_NK.abs().amax(1)
    scaled_NK = weight_NK * _inverses(most_N, 127)[:, None]
    return (torch.round(scaled_NK) + OFFSET).to(torch.uint8), most_N / 127


def quantize_halves(
    weight_NK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference for 4 bits, K a multiple of 32. q uint8 [N, K], scales [N], and step and base
    [N, K/32] in float32 (as float16 has them).
    """
    weight_NK = weight_NK.float()
    most_N = weight_NK.abs().amax(1)
    v_NGI = (weight_NK * _inverses(most_N, 1)[:, None]).unflatten(1, (-1, GROUP))
    base_NG = v_NGI.amin(2).half().float()
    step_NG = ((v_NGI.amax(2) - base_NG) * np.float32(1 / 15)).half().float()
    q_NGI = torch.round((v_NGI - base_NG[..., None]) * _inverses(step_NG, 1)[..., None])
    return q_NGI.clamp(0, 15).to(torch.uint8).flatten(1), most_N, step_NG, base_NG


@njit(error_model="numpy")
def _bytes_of_row(row, inverse, out, column):
    """out [K/4, 16, 4]."""
    for k in range(row.shape[0]):
        value = bits_of(widen(row[k]) * inverse + _ROUND) - _ROUND_BITS
        out[k // 4, column, k % 4] = value + OFFSET


def _quantize_bytes(p, chunk, chunks):
    a = carray(p, 1)[0]
    scales = carray(pointer(a.scales, F32), (a.outer,))
    blocks = -(-a.outer // COLUMNS)
    first, last = blocks * chunk // chunks * COLUMNS, blocks * (chunk + 1) // chunks * COLUMNS
    weight = carray(pointer(a.weight, a.element), (a.outer, a.inner))
    out = carray(pointer(a.out, U8), (blocks, a.depth // 4, COLUMNS, 4))
    for n in range(first, min(last, a.outer)):
        most = _absmax(weight[n])
        scales[n] = most / _MOST
        _bytes_of_row(weight[n], _inverse(most, 127), out[n // COLUMNS], n % COLUMNS)


@njit(error_model="numpy")
def _halves_of_group(v, q):
    """q in 0 .. 15 for each of 32 numbers v; returns their step and base, as float16."""
    low, high = v[0], v[0]
    for i in range(GROUP):
        high = largest(high, v[i])
        low = -largest(-low, -v[i])
    base = narrow(low, F16)
    step = narrow((high - widen(base)) * np.float32(1 / 15), F16)
    inverse, low = _inverse(widen(step), 1), widen(base)
    for i in range(GROUP):
        value = bits_of((v[i] - low) * inverse + _ROUND) - _ROUND_BITS
        q[i] = min(max(value, 0), 15)
    return step, base


@njit(error_model="numpy")
def _halves_of_row(row, inverse, out, groups, column, v, q):
    """out [K/8, 16, 4], groups [K/32, 2, 16]; v float32 [32] and q int32 [32] are scratch."""
    for group in range(-(-row.shape[0] // GROUP)):
        some = row[group * GROUP : (group + 1) * GROUP]
        v[:] = np.float32(0)
        for i in range(some.shape[0]):
            v[i] = widen(some[i]) * inverse
        groups[group, 0, column], groups[group, 1, column] = _halves_of_group(v, q)
        for i in range(GROUP // 8):
            for j in range(4):
                out[group * 4 + i, column, j] = q[8 * i + j] | q[8 * i + 4 + j] << 4


def _quantize_halves(p, chunk, chunks):
    a = carray(p, 1)[0]
    scales = carray(pointer(a.scales, F32), (a.outer,))
    blocks = -(-a.outer // COLUMNS)
    first, last = blocks * chunk // chunks * COLUMNS, blocks * (chunk + 1) // chunks * COLUMNS
    weight = carray(pointer(a.weight, a.element), (a.outer, a.inner))
    out = carray(pointer(a.out, U8), (blocks, a.depth // 8, COLUMNS, 4))
    groups = carray(pointer(a.groups, F16), (blocks, a.depth // GROUP, 2, COLUMNS))
    v = carray(pointer(a.scratch + chunk * 256, F32), (GROUP,))
    q = carray(pointer(a.scratch + chunk * 256 + 128, I32), (GROUP,))
    for n in range(first, min(last, a.outer)):
        block, column = n // COLUMNS, n % COLUMNS
        most = _absmax(weight[n])
        scales[n] = most
        _halves_of_row(weight[n], _inverse(most, 1), out[block], groups[block], column, v, q)


def _chunks(arguments: dict[str, object]) -> Chunks:
    return Chunks(1, _CHUNKS, _CHUNKS)


# weight [outer, inner]; scales, out and groups as above, inner padded to depth; scratch 256 bytes
# for each chunk.
quantize_bytes_kernel = Kernel(
    _quantize_bytes, "weight scales out outer inner depth", chunks=_chunks
)
quantize_halves_kernel = Kernel(
    _quantize_halves, "weight scales out groups scratch outer inner depth", chunks=_chunks
)


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """A weight [N, K] of any element type of kernels."""
    weight = weight.contiguous()
    outer, inner = weight.shape
    blocks, depth = padded(outer) // COLUMNS, padded(inner)
    scales = torch.zeros(padded(outer))
    common = {"weight": weight, "scales": scales, "outer": outer, "inner": inner, "depth": depth}
    if bits == 8:
        packed = torch.full((blocks, depth // 4, COLUMNS, 4), OFFSET, dtype=torch.uint8)
        quantize_bytes_kernel.bind(weight.dtype, **common, out=packed)()
        return QuantizedWeight(packed, scales, None)
    packed = torch.zeros((blocks, depth // 8, COLUMNS, 4), dtype=torch.uint8)
    groups = torch.zeros((blocks, depth // GROUP, 2, COLUMNS), dtype=torch.float16)
    scratch = torch.empty(_CHUNKS, 64)
    quantize_halves_kernel.bind(
        weight.dtype, **common, out=packed, groups=groups, scratch=scratch
    )()
    return QuantizedWeight(packed, scales, groups)


def pairs(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight of 8 bits as signed bytes in pairs of inputs."""
    packed = (weight.packed ^ OFFSET).view(torch.int8)
    packed = packed.unflatten(3, (2, 2)).permute(0, 1, 3, 2, 4).flatten(1, 2)
    return weight._replace(packed=packed.contiguous())


def dequantize(weight: QuantizedWeight, outer: int, inner: int) -> torch.Tensor:
    """Reference. float32 [outer, inner]."""
    packed, scales, groups = weight
    if groups is None:
        values = packed.float() - OFFSET
    else:
        halves = torch.stack([packed & 15, packed >> 4], 2).flatten(1, 2)
        each = groups.float().repeat_interleave(GROUP // 4, 1)
        values = halves * each[:, :, 0, :, None] + each[:, :, 1, :, None]
    values = values.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    return (values * scales[:, None])[:outer, :inner]
