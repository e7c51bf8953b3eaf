"""The last stage of sampling: each row's token, greedy or at random, in one launch.

A row is cut into units, and a program reads one or several units of one row. For greedy rows it
notes each unit's best (logit, token), and the row's last program to finish picks the best of all;
of equals the lowest id wins. For the others it notes each unit's largest logit and the sum of its
weights, exp((logit - largest) / temperature); the last program adds the units up, finds the one in
which the running sum passes u of the total, and reads that unit again to find the token. That is
one uniform number u by inverse CDF in the order of token ids, as executor/sampler.py has it. There
is no word between rows and units are always the same, so a row's token depends on nothing but its
logits and its draw. A row of NaN or -inf alone gets token 0.

Letters: S sequences of the step (capacity), R rows of the batch, V vocabulary, U units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sampling_draws import SAMPLE, clean, clean_reference, uniform, uniform_reference

UNIT = 2048
_FEW_ROWS = 16  # up to here a program takes one unit, so that one row keeps all processors busy
_MANY_UNITS = 4
_NO_INDEX = tl.constexpr(2**31 - 1)


class DrawScratch(NamedTuple):
    """best: int64 [S, U]; tops, sums: float32 [S, U]; arrived: int32 [S], zero between launches."""

    best: torch.Tensor
    tops: torch.Tensor
    sums: torch.Tensor
    arrived: torch.Tensor


class Draw(NamedTuple):
    """How each row of the batch draws: temperature float32 [R], 0 for greedy, and seeds int32
    [R, 3]: the seed's low and high word and the choice, as bits.
    """

    temperature_R: torch.Tensor
    seeds_R3: torch.Tensor


class Kept(NamedTuple):
    """What of each row may be drawn (top_mask.py): tokens that weigh more than `floor`, and of
    those that weigh as much the ids up to `last`. float32, float32, int32 [S]. A floor of 0 keeps
    all. top_S: the row's largest logit, which weighs 1.
    """

    top_S: torch.Tensor
    floor_S: torch.Tensor
    last_S: torch.Tensor


def draw_scratch(max_rows: int, vocab_size: int, device: torch.device) -> DrawScratch:
    shape = (max_rows, triton.cdiv(vocab_size, UNIT))
    return DrawScratch(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.zeros(max_rows, dtype=torch.int32, device=device),
    )


@triton.jit
def pack_best(score, token):
    """Sorts by score, then the lower token first."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (token ^ _NO_INDEX).to(tl.int64)


@triton.jit
def packed_token(packed):
    return (packed & 0x7FFFFFFF).to(tl.int32) ^ _NO_INDEX


@triton.jit
def packed_score(packed):
    bits = (packed >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, top, temperature):
    """The likeliest token weighs 1. The same bits wherever it is computed."""
    return tl.exp((x - top) / temperature)


@triton.jit
def is_last(arrived, num_programs):
    """Whether this program is the last of `num_programs` to get here; what they stored is then
    visible, past the first-level cache.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == num_programs - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def _load_kept(line, ids, vocab_size, top, floor, last_id, divisor, CUT: tl.constexpr):
    """Logits of these tokens, -inf for those that may not be drawn."""
    x = clean(tl.load(line + ids, mask=ids < vocab_size, other=float("-inf")))
    if CUT:
        weight = weight_of(x, top, divisor)
        kept = (weight > floor) | ((weight == floor) & (ids <= last_id))
        x = tl.where(kept, x, float("-inf"))
    return x


@triton.jit
def _finite(top):
    """What to subtract where all is impossible."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _draw(
    line, tops, sums, u, temperature, num_units, vocab_size, cut_top, floor, last_id,
    UNIT: tl.constexpr, ALL_UNITS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The token where the running sum of a row's weights passes `u` of their total."""
    units = tl.arange(0, ALL_UNITS)
    real = units < num_units
    unit_tops = tl.load(tops + units, mask=real, other=float("-inf"), cache_modifier=".cg")
    unit_sums = tl.load(sums + units, mask=real, other=0.0, cache_modifier=".cg")
    top = _finite(tl.max(unit_tops, 0))
    running = tl.cumsum((unit_sums * tl.exp((unit_tops - top) / temperature)).to(tl.float64), 0)
    target = u * tl.max(running, 0)
    unit = tl.min(tl.where(running > target, units, num_units - 1), 0)
    below = tl.max(tl.where(units < unit, running, 0.0), 0)
    ids = unit * UNIT + tl.arange(0, UNIT)
    x = _load_kept(line, ids, vocab_size, cut_top, floor, last_id, temperature, CUT)
    weights = tl.exp((x - top) / temperature)
    running = below + tl.cumsum(weights.to(tl.float64), 0)
    token = tl.min(tl.where((running > target) & (weights > 0.0), ids, _NO_INDEX), 0)
    # The unit's sum was rounded otherwise: what is left over belongs to its last token.
    last = tl.max(tl.where(weights > 0.0, ids, 0), 0)
    return tl.where(token == _NO_INDEX, last, token)


@triton.jit(do_not_specialize_on_alignment=["rows", "positions", "out"])
def _draw_kernel(
    logits,
    rows,
    positions,
    temperatures,
    seeds,
    tops,
    floors,
    lasts,
    out,
    best,
    unit_tops,
    unit_sums,
    arrived,
    stride,
    unit_stride,
    vocab_size,
    num_units,
    PURPOSE: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    ALL_UNITS: tl.constexpr,
    CUT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + s)
    if row < 0:
        return
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    cut_top, floor, last_id = 0.0, 0.0, 0
    if CUT:
        cut_top, floor, last_id = tl.load(tops + s), tl.load(floors + s), tl.load(lasts + s)
        floor = tl.where(floor > 0.0, floor, -1.0)
    line = logits + s * stride
    units = chunk * UNITS + tl.arange(0, UNITS)
    ids = units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    x = _load_kept(line, ids, vocab_size, cut_top, floor, last_id, divisor, CUT)
    top = tl.max(x, 1)
    at = s * unit_stride + units
    if temperature > 0.0:
        weights = tl.exp((x - _finite(top)[:, None]) * (1.0 / divisor))
        tl.store(unit_tops + at, top, mask=units < num_units)
        tl.store(unit_sums + at, tl.sum(weights, 1), mask=units < num_units)
    else:
        token = tl.min(tl.where(x == top[:, None], ids, _NO_INDEX), 1)
        tl.store(best + at, pack_best(top, token), mask=units < num_units)
    if is_last(arrived + s, tl.num_programs(0)):
        if temperature > 0.0:
            seed_low = tl.load(seeds + row * 3).to(tl.uint32, bitcast=True)
            seed_high = tl.load(seeds + row * 3 + 1).to(tl.uint32, bitcast=True)
            choice = tl.load(seeds + row * 3 + 2).to(tl.uint32, bitcast=True)
            position = tl.load(positions + s).to(tl.uint32)
            token = _draw(
                line,
                unit_tops + s * unit_stride,
                unit_sums + s * unit_stride,
                uniform(position, PURPOSE, choice, seed_low, seed_high),
                temperature,
                num_units,
                vocab_size,
                cut_top,
                floor,
                last_id,
                UNIT,
                ALL_UNITS,
                CUT,
            )
            tl.store(out + s, token)
        else:
            all_units = tl.arange(0, ALL_UNITS)
            packed = tl.load(
                best + s * unit_stride + all_units,
                mask=all_units < num_units,
                other=tl.full([ALL_UNITS], -(2**63), tl.int64),
                cache_modifier=".cg",
            )
            tl.store(out + s, packed_token(tl.max(packed, 0)))


def sample_plain(
    logits_SV: torch.Tensor,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    draw: Draw,
    out_S: torch.Tensor,
    scratch: DrawScratch,
    *,
    vocab_size: int,
    kept: Kept | None = None,
    purpose: int = SAMPLE,
    pdl: bool = False,
) -> None:
    """A token for each sequence, into out_S (int32).

    logits: bf16, fp16 or fp32, columns contiguous; those from vocab_size on are padding. rows:
    batch row of each sequence; of -1 nothing is read or written. positions: the place in its
    sequence of the token that is chosen.
    """
    num_rows = len(logits_SV)
    assert logits_SV.stride(1) == 1
    assert num_rows <= len(scratch.arrived)
    if not num_rows:
        return
    units = 1 if num_rows <= _FEW_ROWS else _MANY_UNITS
    num_units = triton.cdiv(vocab_size, UNIT)
    tops, floors, lasts = kept or (draw.temperature_R, draw.temperature_R, rows_S)
    _draw_kernel[(triton.cdiv(num_units, units), num_rows)](
        logits_SV,
        rows_S,
        positions_S,
        draw.temperature_R,
        draw.seeds_R3,
        tops,
        floors,
        lasts,
        out_S,
        *scratch,
        logits_SV.stride(0),
        scratch.best.stride(0),
        vocab_size,
        num_units,
        PURPOSE=purpose,
        UNIT=UNIT,
        UNITS=units,
        ALL_UNITS=triton.next_power_of_2(num_units),
        CUT=kept is not None,
        PDL=pdl,
        num_warps=4 if units == 1 else 8,
        **({"launch_pdl": True} if pdl else {}),
    )


def sample_plain_reference(
    logits_SV: torch.Tensor,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    draw: Draw,
    out_S: torch.Tensor,
    scratch: DrawScratch | None = None,
    *,
    vocab_size: int,
    kept: Kept | None = None,
    purpose: int = SAMPLE,
    pdl: bool = False,
) -> None:
    there = (rows_S >= 0).nonzero().flatten()
    rows = rows_S[there].long()
    x = clean_reference(logits_SV[there, :vocab_size])
    temperature = draw.temperature_R[rows][:, None]
    if kept is not None:
        weights = ((x - kept.top_S[there, None]) / temperature).exp()
        floor, last = kept.floor_S[there, None], kept.last_S[there, None]
        ids = torch.arange(vocab_size, device=x.device)
        keeps = (weights > floor) | ((weights == floor) & (ids <= last)) | (floor <= 0)
        x = torch.where(keeps, x, -torch.inf)
    top = x.amax(-1, keepdim=True)
    safe_top = top.where(top > -torch.inf, 0.0)
    weights = ((x - safe_top) / temperature.where(temperature > 0, 1.0)).exp().double()
    running = weights.cumsum(-1)
    u = uniform_reference(positions_S[there], draw.seeds_R3[rows], purpose)
    passed = (running > u[:, None] * running[:, -1:]) & (weights > 0)
    hits = torch.where(temperature > 0, passed, x == top)
    # The first of them, which argmax promises nowhere.
    first = hits.int().cummax(-1).values.eq(0).sum(-1)
    out_S[there] = first.where(hits.any(-1), 0).to(out_S.dtype)
