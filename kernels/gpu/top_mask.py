"""min_p, top_k and top_p without a sort: the smallest weight that may be drawn, of each row.

A token weighs exp((logit - largest logit) / temperature), so the likeliest weighs 1. Of tokens that
weigh min_p (and 1e-38) or more, top_k keeps those as heavy as the k-th or heavier; of what they
weigh together, top_p keeps the heaviest that reach the share p, and of the last equals the lowest
ids. The meaning is that of `truncate` in executor/sampler.py.

    range     the largest and the smallest logit of each row
    narrow    twice: how many tokens weigh at least as much as each of PIVOTS weights, and how much
              together. That tells between which two the cuts are: a hull. Pivots are closer
              together near 1 at first, and then even in the logarithm.
    collect   the hull's tokens (some hundreds) go to a buffer, and the row's last program searches
              the cuts among them by halving, more finely: PIVOTS weights at a time, over the bits.

In each a program reads one chunk of one row, and the row's last program to finish decides. Should
more tokens be in the hull than the buffer has room for (a row of equal logits), that program reads
the whole row instead: slow and right. Weights in the hull are added up as integers, so that the
order in which they came does not matter.

Letters: N rows of logits, R rows of the batch, V vocabulary, C chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sampling import Draw, Kept, clean_reference, is_last, weight_of
from .sampling_draws import clean

CAPACITY = 8192
_BLOCK = 2048
_TILE = 1024
_PIVOTS = 8
_TINY = tl.constexpr(1e-38)
_ABOVE_ALL = tl.constexpr(2.0)
_ALL_IDS = tl.constexpr(2**31 - 1)
_UNIT_WEIGHT = tl.constexpr(2.0**40)  # integers of weights; 2**22 tokens can be added up


class Cuts(NamedTuple):
    """Of each row of the batch: int32 [R] (0 is none), float64 [R] (1 is none), float32 [R]."""

    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor


class CutScratch(NamedTuple):
    """kept: what `find_cuts` answers. hull float64 [N, 6]: lowest weight in it, lowest above it,
    count and weight of what is above, weight of all, number of all. parts float32 [N, C, 16].
    weights, ids [N, CAPACITY]: what is in it; filled [N]. arrived [N] is zero between launches.
    """

    kept: Kept
    hull: torch.Tensor
    parts: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    filled: torch.Tensor
    arrived: torch.Tensor


def cut_scratch(
    max_rows: int, vocab_size: int, device: torch.device, capacity: int = CAPACITY
) -> CutScratch:
    """64 KB a row with the usual capacity."""

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(max_rows, *shape, dtype=dtype, device=device)

    f32, i32 = torch.float32, torch.int32
    return CutScratch(
        Kept(empty(f32), empty(f32), empty(i32)),
        empty(torch.float64, 6),
        empty(f32, triton.cdiv(vocab_size, _BLOCK), 2 * _PIVOTS),
        empty(f32, capacity),
        empty(i32, capacity),
        empty(i32),
        torch.zeros(max_rows, dtype=i32, device=device),
    )


@triton.jit
def _range_kernel(
    logits, rows, temperatures, top_ks, top_ps, min_ps,
    tops, floors, lasts, hull, parts, filled, arrived,
    stride, parts_stride, vocab_size,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(0)
    row = tl.load(rows + n)
    if row < 0:
        return
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    is_cut = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if (tl.load(temperatures + row) <= 0.0) | (is_cut == 0):
        if chunk == 0:
            tl.store(tops + n, 0.0)
            tl.store(floors + n, 0.0)
        return
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = clean(tl.load(logits + n * stride + ids, mask=ids < vocab_size, other=float("-inf")))
    part = parts + n * parts_stride + chunk * WIDTH
    tl.store(part, tl.max(x, 0))
    tl.store(part + 1, tl.min(tl.where(x == float("-inf"), float("inf"), x), 0))
    if is_last(arrived + n, num_chunks):
        chunks = tl.arange(0, CHUNKS)
        there = chunks < num_chunks
        every = parts + n * parts_stride + chunks * WIDTH
        top = tl.max(tl.load(every, there, other=float("-inf"), cache_modifier=".cg"), 0)
        low = tl.min(tl.load(every + 1, there, other=float("inf"), cache_modifier=".cg"), 0)
        tl.store(tops + n, tl.where(top == float("-inf"), 0.0, top))
        least = tl.maximum(min_p, _TINY)
        tl.store(floors + n, least)  # stands where min_p is all
        tl.store(lasts + n, _ALL_IDS)
        tl.store(filled + n, 0)
        state = hull + n * 6
        tl.store(state, least.to(tl.float64))
        tl.store(state + 1, _ABOVE_ALL)
        tl.store(state + 2, 0.0)
        tl.store(state + 3, 0.0)
        # Until it is known what all weigh: how far down the row reaches.
        tl.store(state + 4, tl.where(top == float("-inf"), 0.0, top - low).to(tl.float64))


@triton.jit
def _pivots(low, high, reach, temperature, FIRST: tl.constexpr, PIVOTS: tl.constexpr):
    """Falling weights; the last is `low` itself. high: the lowest weight above the hull."""
    j = tl.arange(0, PIVOTS)
    share = (j + 1).to(tl.float32) / PIVOTS
    deepest = -tl.log(low)
    if FIRST:
        deepest = tl.minimum(deepest, reach / temperature)
        depth = deepest * share * share
    else:
        highest = tl.maximum(-tl.log(high), 0.0)
        depth = highest + (deepest - highest) * share
    return tl.where(j == PIVOTS - 1, low, tl.maximum(tl.exp(-depth), low))


@triton.jit
def _narrow_kernel(
    logits, rows, temperatures, top_ks, top_ps,
    tops, hull, parts, arrived,
    stride, parts_stride, vocab_size,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(0)
    row = tl.load(rows + n)
    if row < 0:
        return
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    if (temperature <= 0.0) | ((top_k <= 0) & (top_p >= 1.0)):
        return
    state = hull + n * 6
    low, high = tl.load(state).to(tl.float32), tl.load(state + 1).to(tl.float32)
    whole = tl.load(state + 4)
    pivots = _pivots(low, high, whole.to(tl.float32), temperature, FIRST, PIVOTS)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = clean(tl.load(logits + n * stride + ids, mask=ids < vocab_size, other=float("-inf")))
    weight = weight_of(x, tl.load(tops + n), temperature)
    reaches = weight[None, :] >= pivots[:, None]
    part = parts + n * parts_stride + chunk * 2 * PIVOTS + tl.arange(0, PIVOTS)
    tl.store(part, tl.sum(reaches.to(tl.float32), 1))
    tl.store(part + PIVOTS, tl.sum(tl.where(reaches, weight[None, :], 0.0), 1))
    if is_last(arrived + n, num_chunks):
        chunks, j = tl.arange(0, CHUNKS)[:, None], tl.arange(0, PIVOTS)[None, :]
        every = parts + n * parts_stride + chunks * 2 * PIVOTS + j
        there = chunks < num_chunks
        counts = tl.load(every, there, other=0.0, cache_modifier=".cg").to(tl.float64)
        masses = tl.load(every + PIVOTS, there, other=0.0, cache_modifier=".cg").to(tl.float64)
        count, mass = tl.sum(counts, 0), tl.sum(masses, 0)
        if FIRST:
            whole = tl.max(mass, 0)
            tl.store(state + 4, whole)
            tl.store(state + 5, tl.max(count, 0))
        number = tl.load(state + 5) if not FIRST else tl.max(count, 0)
        exact = pivots.to(tl.float64)
        above = tl.load(state + 1)
        by_k = (top_k > 0) & (top_k.to(tl.float64) < number)
        new_low, new_high = low.to(tl.float64), low.to(tl.float64)
        least_mass, most_mass = whole, whole
        if by_k:
            reached = count >= top_k
            new_low = tl.maximum(new_low, tl.max(tl.where(reached, exact, 0.0), 0))
            new_high = tl.minimum(above, tl.min(tl.where(reached, above, exact), 0))
            most_mass = tl.max(tl.where(exact == new_low, mass, 0.0), 0)
            least_mass = tl.max(tl.where(reached, tl.load(state + 3), mass), 0)
        if top_p < 1.0:
            # float32 added these up: what is that close to the target may be on either side.
            surely = mass >= top_p * most_mass * 1.000001
            if by_k == 0:
                new_low = tl.maximum(new_low, tl.max(tl.where(surely, exact, 0.0), 0))
            short = mass < top_p * least_mass * 0.999999
            new_high = tl.maximum(new_high, tl.min(tl.where(short, exact, above), 0))
        is_above = exact >= new_high
        tl.store(state + 2, tl.max(tl.where(is_above, count, tl.load(state + 2)), 0))
        tl.store(state + 3, tl.max(tl.where(is_above, mass, tl.load(state + 3)), 0))
        tl.store(state, new_low)
        tl.store(state + 1, new_high)


@triton.jit
def _tile(
    at, number, overflows, weights, row, top, temperature, low, high, vocab_size
):  # fmt: skip
    """Weights of the hull's tokens at `at`; what isn't in it weighs 0."""
    weight = tl.zeros(at.shape, tl.float32)
    if overflows:
        x = clean(tl.load(row + at, mask=at < vocab_size, other=float("-inf")))
        weight = weight_of(x, top, temperature)
    else:
        weight = tl.load(weights + at, mask=at < number, other=0.0, cache_modifier=".cg")
    return tl.where((weight >= low) & (weight < high), weight, 0.0)


@triton.jit
def _reaching(
    pivots, number, overflows, weights, row, top, temperature, low, high, vocab_size,
    TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """How many tokens of the hull weigh at least each of `pivots`, and how much together."""
    counts = tl.zeros([PIVOTS], tl.int64)
    masses = tl.zeros([PIVOTS], tl.int64)
    start = number * 0
    while start < number:
        at = start + tl.arange(0, TILE)
        weight = _tile(at, number, overflows, weights, row, top, temperature, low, high, vocab_size)
        reaches = weight[None, :] >= pivots[:, None]
        counts += tl.sum(reaches.to(tl.int64), 1)
        units = (weight * _UNIT_WEIGHT).to(tl.int64)
        masses += tl.sum(tl.where(reaches, units[None, :], 0), 1)
        start += TILE
    return counts.to(tl.float64), masses.to(tl.float64) / _UNIT_WEIGHT


@triton.jit
def _cut(
    target, by_mass, before, lowest, number, overflows, weights, row, top, temperature,
    low, high, vocab_size, TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The largest weight w such that all that weigh w or more reach `target`, counted or added up;
    `before` is what those above the hull reach. `lowest` does reach it, if any does.
    """
    low_bits = lowest.to(tl.int32, bitcast=True).to(tl.int64)
    high_bits = high.to(tl.int32, bitcast=True).to(tl.int64)
    j = tl.arange(0, PIVOTS).to(tl.int64)
    while low_bits + 1 < high_bits:
        bits = low_bits + (high_bits - low_bits) * (j + 1) // (PIVOTS + 1)
        pivots = bits.to(tl.int32).to(tl.float32, bitcast=True)
        counts, masses = _reaching(
            pivots, number, overflows, weights, row, top, temperature, low, high, vocab_size,
            TILE, PIVOTS,
        )  # fmt: skip
        reached = before + tl.where(by_mass, masses, counts) >= target
        low_bits = tl.maximum(low_bits, tl.max(tl.where(reached, bits, low_bits), 0))
        high_bits = tl.minimum(high_bits, tl.min(tl.where(reached, high_bits, bits), 0))
    return low_bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _nth_id(
    nth, floor, number, overflows, weights, ids, row, top, temperature, low, high, vocab_size,
    TILE: tl.constexpr,
):  # fmt: skip
    """The nth-lowest id, from 1, of the tokens that weigh `floor`."""
    least, most = vocab_size * 0, vocab_size - 1
    while least < most:
        middle = (least + most) // 2
        count = tl.zeros([TILE], tl.int32)
        start = number * 0
        while start < number:
            at = start + tl.arange(0, TILE)
            weight = _tile(
                at, number, overflows, weights, row, top, temperature, low, high, vocab_size
            )
            token = at
            if overflows == 0:
                token = tl.load(ids + at, mask=at < number, other=0, cache_modifier=".cg")
            count += ((weight == floor) & (token <= middle)).to(tl.int32)
            start += TILE
        if tl.sum(count, 0) >= nth:
            most = middle
        else:
            least = middle + 1
    return least


@triton.jit
def _collect_kernel(
    logits, rows, temperatures, top_ks, top_ps,
    tops, floors, lasts, hull, all_weights, all_ids, filled, arrived,
    stride, capacity, vocab_size,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + n)
    if row < 0:
        return
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    if (temperature <= 0.0) | ((top_k <= 0) & (top_p >= 1.0)):
        return
    state = hull + n * 6
    low, high = tl.load(state).to(tl.float32), tl.load(state + 1).to(tl.float32)
    top = tl.load(tops + n)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = clean(tl.load(logits + n * stride + ids, mask=ids < vocab_size, other=float("-inf")))
    weight = weight_of(x, top, temperature)
    inside = (weight >= low) & (weight < high)
    own = tl.sum(inside.to(tl.int32), 0)
    weights, kept_ids = all_weights + n * capacity, all_ids + n * capacity
    if own > 0:
        place = tl.atomic_add(filled + n, own, sem="relaxed")
        place += tl.cumsum(inside.to(tl.int32), 0) - 1
        inside = inside & (place < capacity)
        tl.store(weights + place, weight, mask=inside)
        tl.store(kept_ids + place, ids, mask=inside)
    if is_last(arrived + n, tl.num_programs(0)):
        number = tl.load(filled + n, cache_modifier=".cg")
        overflows = number > capacity
        number = tl.where(overflows, vocab_size, number)
        line = logits + n * stride
        count_above, mass_above = tl.load(state + 2), tl.load(state + 3)
        floor = low
        mass = tl.load(state + 4)
        if (top_k > 0) & (top_k.to(tl.float64) < tl.load(state + 5)):
            floor = _cut(
                top_k.to(tl.float64), False, count_above, low, number, overflows, weights, line,
                top, temperature, low, high, vocab_size, TILE, PIVOTS,
            )  # fmt: skip
            _, masses = _reaching(
                tl.zeros([PIVOTS], tl.float32) + floor, number, overflows, weights, line, top,
                temperature, low, high, vocab_size, TILE, PIVOTS,
            )  # fmt: skip
            mass = mass_above + tl.max(masses, 0)
        if top_p < 1.0:
            target = tl.maximum(top_p * mass, 1e-300)
            floor = _cut(
                target, True, mass_above, floor, number, overflows, weights, line,
                top, temperature, low, high, vocab_size, TILE, PIVOTS,
            )  # fmt: skip
            # The next weight up, to tell those above from the equals.
            higher = (floor.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
            pair = tl.where(tl.arange(0, PIVOTS) == 0, higher, floor)
            counts, masses = _reaching(
                pair, number, overflows, weights, line, top, temperature, low, high, vocab_size,
                TILE, PIVOTS,
            )  # fmt: skip
            equals = tl.max(counts, 0) - tl.min(counts, 0)
            missing = target - mass_above - tl.min(masses, 0)
            wanted = tl.maximum(tl.ceil(missing / floor.to(tl.float64)), 1.0)
            if wanted < equals:
                last = _nth_id(
                    wanted.to(tl.int32), floor, number, overflows, weights, kept_ids, line, top,
                    temperature, low, high, vocab_size, TILE,
                )  # fmt: skip
                tl.store(lasts + n, last)
        tl.store(floors + n, floor)


def find_cuts(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    draw: Draw,
    cuts: Cuts,
    scratch: CutScratch,
    *,
    vocab_size: int,
) -> Kept:
    """What of each row may be drawn, for `sample_plain` on the same logits. Rows of -1 are left
    out; greedy ones and those without an option have a floor of 0.
    """
    num_rows = len(logits_NV)
    assert logits_NV.stride(1) == 1
    assert num_rows <= len(scratch.arrived)
    chunks = triton.cdiv(vocab_size, _BLOCK)
    kept, temperatures = scratch.kept, draw.temperature_R
    if not num_rows:
        return kept
    grid, padded, stride = (chunks, num_rows), triton.next_power_of_2(chunks), logits_NV.stride(0)
    common = (logits_NV, rows_N, temperatures, cuts.top_k_R, cuts.top_p_R)
    parts_stride = scratch.parts.stride(0)
    _range_kernel[grid](
        *common, cuts.min_p_R, *kept, scratch.hull, scratch.parts, scratch.filled,
        scratch.arrived, stride, parts_stride, vocab_size,
        BLOCK=_BLOCK, CHUNKS=padded, WIDTH=2 * _PIVOTS, num_warps=4,
    )  # fmt: skip
    for first in (True, False):
        _narrow_kernel[grid](
            *common, kept.top_S, scratch.hull, scratch.parts, scratch.arrived,
            stride, parts_stride, vocab_size,
            FIRST=first, BLOCK=_BLOCK, CHUNKS=padded, PIVOTS=_PIVOTS, num_warps=4,
        )  # fmt: skip
    _collect_kernel[grid](
        *common, *kept, scratch.hull, scratch.weights, scratch.ids, scratch.filled,
        scratch.arrived, stride, scratch.weights.stride(0), vocab_size,
        BLOCK=_BLOCK, TILE=_TILE, PIVOTS=_PIVOTS, num_warps=4,
    )  # fmt: skip
    return kept


def find_cuts_reference(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    draw: Draw,
    cuts: Cuts,
    scratch: CutScratch | None = None,
    *,
    vocab_size: int,
) -> Kept:
    """By sorting."""
    x = clean_reference(logits_NV[:, :vocab_size])
    top = x.amax(-1)
    top = top.where(top > -torch.inf, 0.0)
    floors, lasts = torch.zeros_like(top), torch.full_like(rows_N, _ALL_IDS.value)
    for n, row in enumerate(rows_N.tolist()):
        temperature = draw.temperature_R[row]
        k, p, min_p = (float(each[row]) for each in cuts)
        if row < 0 or temperature <= 0 or (k <= 0 and p >= 1 and min_p <= 0):
            continue
        weights = ((x[n] - top[n]) / temperature).exp()
        order = weights.sort(descending=True, stable=True)
        sorted_weights = order.values[order.values >= max(min_p, 1e-38)]
        floors[n] = max(min_p, 1e-38)
        if 0 < k < len(sorted_weights):
            floors[n] = sorted_weights[int(k) - 1]
            sorted_weights = sorted_weights[sorted_weights >= floors[n]]
        if p < 1 and len(sorted_weights):
            reached = sorted_weights.double().cumsum(0)
            last = int((reached < p * reached[-1]).sum())
            floors[n] = sorted_weights[last]
            lasts[n] = order.indices[last]
    return Kept(top, floors, lasts)
