"""The last stage of sampling: each row's token, greedy or at random, in one launch.

A program reads one chunk of one row and notes its best (score, token); the row's last program to
finish picks the best of all. The score is the logit, plus Gumbel noise times the temperature where
that is above 0 (sampling_noise.py): no softmax, no second pass, and no word between rows, so a
row's token depends on nothing but its logits and its draw. Of equal scores the lowest id wins. A
row of NaN or -inf alone gets token 0.

Letters: S sequences of the step (capacity), R rows of the batch, V vocabulary, C chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sampling_noise import LANES, SAMPLE, clean, gumbel_of_lanes, gumbel_reference

UNIT = 4 * LANES
_FEW_ROWS = 16  # up to here a chunk is one unit, so that one row keeps all processors busy
_MANY_UNITS = 4
_NO_INDEX = tl.constexpr(2**31 - 1)


class DrawScratch(NamedTuple):
    """best: int64 [S, C], arrived: int32 [S], zero between launches."""

    best: torch.Tensor
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
    return DrawScratch(
        torch.empty(max_rows, triton.cdiv(vocab_size, UNIT), dtype=torch.int64, device=device),
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
    arrived,
    stride,
    best_stride,
    vocab_size,
    PURPOSE: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
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
    seed_low = tl.load(seeds + row * 3).to(tl.uint32, bitcast=True)
    seed_high = tl.load(seeds + row * 3 + 1).to(tl.uint32, bitcast=True)
    choice = tl.load(seeds + row * 3 + 2).to(tl.uint32, bitcast=True)
    position = tl.load(positions + s).to(tl.uint32)
    if CUT:
        top, floor, last_id = tl.load(tops + s), tl.load(floors + s), tl.load(lasts + s)
        floor = tl.where(floor > 0.0, floor, -1.0)
        divisor = tl.where(temperature > 0.0, temperature, 1.0)
    lanes = tl.arange(0, LANES)
    first = chunk * UNITS * 4 * LANES
    scores = tl.full([LANES], float("-inf"), tl.float32)
    tokens = first + lanes
    for unit in tl.static_range(UNITS):
        noise = (tl.zeros([LANES], tl.float32),) * 4
        if temperature > 0.0:
            noise = gumbel_of_lanes(
                ((chunk * UNITS + unit) * LANES + lanes).to(tl.uint32),
                position,
                PURPOSE,
                choice,
                seed_low,
                seed_high,
            )
        for word in tl.static_range(4):
            ids = first + (unit * 4 + word) * LANES + lanes
            x = tl.load(logits + s * stride + ids, mask=ids < vocab_size, other=float("-inf"))
            x = clean(x)
            if CUT:
                weight = weight_of(x, top, divisor)
                kept = (weight > floor) | ((weight == floor) & (ids <= last_id))
                x = tl.where(kept, x, float("-inf"))
            score = x + noise[word] * temperature
            better = score > scores
            scores = tl.where(better, score, scores)
            tokens = tl.where(better, ids, tokens)
    score = tl.max(scores, 0)
    token = tl.min(tl.where(scores == score, tokens, _NO_INDEX), 0)
    tl.store(best + s * best_stride + chunk, pack_best(score, token))
    num_chunks = tl.num_programs(0)
    if is_last(arrived + s, num_chunks):
        chunks = tl.arange(0, CHUNKS)
        lowest = tl.full([CHUNKS], -(2**63), tl.int64)
        packed = tl.load(
            best + s * best_stride + chunks,
            mask=chunks < num_chunks,
            other=lowest,
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
    num_chunks = triton.cdiv(vocab_size, units * UNIT)
    tops, floors, lasts = kept or (draw.temperature_R, draw.temperature_R, rows_S)
    _draw_kernel[(num_chunks, num_rows)](
        logits_SV,
        rows_S,
        positions_S,
        draw.temperature_R,
        draw.seeds_R3,
        tops,
        floors,
        lasts,
        out_S,
        scratch.best,
        scratch.arrived,
        logits_SV.stride(0),
        scratch.best.stride(0),
        vocab_size,
        PURPOSE=purpose,
        UNITS=units,
        CHUNKS=triton.next_power_of_2(num_chunks),
        LANES=LANES,
        CUT=kept is not None,
        PDL=pdl,
        num_warps=4,
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
    noise = gumbel_reference(vocab_size, positions_S[there], draw.seeds_R3[rows], purpose)
    # Of equals the lowest id, which argmax promises nowhere.
    scores = x + noise * temperature
    best = scores == scores.amax(-1, keepdim=True)
    out_S[there] = best.int().cummax(-1).values.eq(0).sum(-1).to(out_S.dtype)


def clean_reference(logits: torch.Tensor) -> torch.Tensor:
    x = logits.float()
    return x.where(x == x, -torch.inf).clamp(max=torch.finfo(torch.float32).max)
