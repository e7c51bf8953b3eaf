"""A mixture of experts (Shazeer et al., 2017): which experts a token has, its way to them and back,
and the products between.

    route      a token's most likely experts, and their weights
    dispatch   a slot for each pair of a token and one of its experts, in the order of the experts;
               and how many tokens each expert has had
    gather     the tokens' rows into the slots
    (row_experts or tile_experts, the activation, and the same again)
    combine    the weighted sum of a token's slots, in the order in which its experts were chosen

So each expert has its rows in one piece, and its weight is read once. Experts that aren't held here
(they are another rank's) get no slots. A token's result doesn't depend on the others.

Of an expert with several replicas, on as many ranks, pair n of a step (from 0 on, in the order of
tokens) is replica (turn + n) % count. All ranks see all pairs, and have the same `turn`: it goes
up from step to step, so that of single tokens each replica has its share.

Legend: T tokens, E experts, R replicas at most, C chosen of each token, S slots, H hidden size,
K inputs, N outputs. What is held are E experts, or replicas of them; its numbers are places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit

from . import tiles
from .linear import CACHED_BYTES, dots, tile_16, tile_32
from .openmp import Chunks, Kernel
from .scalars import exp, pointer

_F32, _I32, _I64 = np.float32(0), np.int32(0), np.int64(0)


def route(
    logits_TE: torch.Tensor, chosen: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference. Experts int32 and weights float32 [T, C]; of two alike the first is chosen."""
    order_TE = logits_TE.sort(dim=-1, descending=True, stable=True).indices
    experts_TC = order_TE[:, :chosen]
    weights_TC = logits_TE.float().softmax(-1).gather(1, experts_TC)
    if renormalize:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    return experts_TC.int(), weights_TC


def dispatch(
    experts_TC: torch.Tensor, counts_E: torch.Tensor, places_ER: torch.Tensor, held: int, turn: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference. Where the slots of each place begin [held + 1], the token of each slot [S], and
    the slot of each pair [T, C], -1 for none.

    counts: replicas of each expert. places: where each of them is held, -1 for elsewhere.
    """
    place_P = torch.full((experts_TC.numel(),), -1)
    for e in range(len(counts_E)):
        pairs = (experts_TC.flatten() == e).nonzero().flatten()
        replicas = (turn + torch.arange(len(pairs))) % int(counts_E[e])
        place_P[pairs] = places_ER[e, replicas].long()
    pairs_S = (place_P >= 0).nonzero().flatten()
    pairs_S = pairs_S[place_P[pairs_S].argsort(stable=True)]
    counts = torch.bincount(place_P[pairs_S], minlength=held)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    slots_P = torch.full_like(place_P, -1)
    slots_P[pairs_S] = torch.arange(len(pairs_S))
    return offsets, (pairs_S // experts_TC.shape[1]).int(), slots_P.view_as(experts_TC).int()


def expert_linear(
    x_SK: torch.Tensor, weight_ENK: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Reference of row_experts and tile_experts. float32 [S, N]."""
    places = offsets.tolist()
    parts = [
        x_SK[start:end].float() @ weight_NK.float().T
        for start, end, weight_NK in zip(places, places[1:], weight_ENK, strict=False)
    ]
    return torch.cat(parts)


def combine(y_SH: torch.Tensor, weights_TC: torch.Tensor, slots_TC: torch.Tensor) -> torch.Tensor:
    """Reference. float32 [T, H]."""
    parts_TCH = y_SH[slots_TC.long()] * weights_TC[..., None]
    return torch.where(slots_TC[..., None] < 0, 0.0, parts_TCH).sum(1)


@njit(error_model="numpy")
def _choose(logits, experts, weights, renormalize):
    """A logit that is no number is never greater than another: where nothing else is left, the
    weight is none either.
    """
    most = logits[0]
    for e in range(logits.shape[0]):
        most = max(most, logits[e])
    total = np.float32(0)
    for e in range(logits.shape[0]):
        total += exp(logits[e] - most)
    last, before = -1, np.float32(np.inf)
    for i in range(experts.shape[0]):
        found, best = -1, np.float32(-np.inf)
        for e in range(logits.shape[0]):
            left = logits[e] < before or (logits[e] == before and e > last)
            if left and (logits[e] > best or found < 0):
                found, best = e, logits[e]
        if found < 0:
            experts[i], weights[i] = i, np.float32(np.nan)
        else:
            experts[i], weights[i] = found, exp(best - most) / total
            last, before = found, best
    if renormalize:
        chosen = np.float32(0)
        for i in range(experts.shape[0]):
            chosen += weights[i]
        for i in range(experts.shape[0]):
            weights[i] /= chosen


def _route(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, _I64), (1,))[0]
    for t in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        logits = carray(pointer(a.logits + t * a.stride * 4, _F32), (a.num,))
        experts = carray(pointer(a.experts + t * a.chosen * 4, _I32), (a.chosen,))
        weights = carray(pointer(a.weights + t * a.chosen * 4, _F32), (a.chosen,))
        _choose(logits, experts, weights, a.renormalize)


# rows: address of the number of tokens. logits float32 [T, stride], of which `num` are experts';
# experts int32 and weights float32 [T, chosen].
route_kernel = Kernel(_route, "rows logits experts weights num stride chosen renormalize")


def _pad(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, _I64), (1,))[0]
    tokens = carray(pointer(a.tokens, _I64), (a.replicas,))
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        if row // a.replicas >= tokens[row % a.replicas]:
            experts = carray(pointer(a.experts + row * a.chosen * 4, _I32), (a.chosen,))
            experts[:] = -1


# Row t of each of `replicas` after row t - 1 of each: experts int32 [T, chosen] becomes -1, which
# is nobody's, in what is beyond a replica's own tokens, int64 [replicas].
pad_kernel = Kernel(_pad, "rows experts tokens replicas chosen")


def _dispatch(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, _I64), (1,))[0]
    turn = carray(pointer(a.turn, _I64), (1,))[0]
    pairs = rows * a.chosen
    experts = carray(pointer(a.experts, _I32), (pairs,))
    slots = carray(pointer(a.slots, _I32), (pairs,))
    tokens = carray(pointer(a.tokens, _I32), (pairs,))
    offsets = carray(pointer(a.offsets, _I64), (a.held + 1,))
    counts = carray(pointer(a.counts, _I32), (a.num,))
    places = carray(pointer(a.places, _I32), (a.num, a.most))
    seen = carray(pointer(a.seen, _I64), (a.num,))
    load = carray(pointer(a.load, _I64), (a.num,))
    offsets[:] = 0
    seen[:] = 0
    for pair in range(pairs):
        e, place = experts[pair], np.int32(-1)
        if e >= 0:
            replica = np.int64(0)
            if counts[e] > 1:
                replica = (turn + seen[e]) % counts[e]
            seen[e] += 1
            place = places[e, replica]
            if place >= 0:
                offsets[place] += 1
        slots[pair] = place
    for e in range(a.num):
        load[e] += seen[e]
    total = 0
    for i in range(a.held):
        total += offsets[i]
        offsets[i] = total
    offsets[a.held] = total
    # Each place's end goes back to its beginning, as its slots are taken from the last on.
    for i in range(pairs):
        pair = pairs - 1 - i
        place = slots[pair]
        if place >= 0:
            offsets[place] -= 1
            slots[pair] = offsets[place]
            tokens[offsets[place]] = pair // a.chosen
    carray(pointer(a.used, _I64), (1,))[0] = total


# experts, slots int32 [T, chosen]; tokens int32 [S]; offsets int64 [held + 1]; used int64 [1], the
# number of slots; turn int64 [1]; counts int32 [num] and places int32 [num, most]; seen int64
# [num], of the step; load int64 [num], which it adds to.
dispatch_kernel = Kernel(
    _dispatch,
    "rows experts slots tokens offsets used turn counts places seen load chosen num most held",
    chunks=lambda a: Chunks(1),
)


def _gather(p, chunk, chunks):
    a = carray(p, 1)[0]
    used = carray(pointer(a.rows, _I64), (1,))[0]
    tokens = carray(pointer(a.tokens, _I32), (used,))
    for slot in range(used * chunk // chunks, used * (chunk + 1) // chunks):
        token = np.int64(tokens[slot])
        source = carray(pointer(a.x + token * a.width * a.element_bytes, a.element), (a.width,))
        target = carray(pointer(a.out + slot * a.width * a.element_bytes, a.element), (a.width,))
        for i in range(a.width):
            target[i] = source[i]


# rows: address of the number of slots. x [T, width], out [S, width].
gather_kernel = Kernel(_gather, "rows tokens x out width element_bytes")


def _row_experts(p, chunk, chunks):
    a = carray(p, 1)[0]
    offsets = carray(pointer(a.offsets, _I64), (a.held + 1,))
    first, last = a.outer * chunk // chunks, a.outer * (chunk + 1) // chunks
    no_bias = carray(pointer(a.y, _F32), (1,))
    for e in range(a.held):
        start, rows = offsets[e], offsets[e + 1] - offsets[e]
        if rows > 0:
            places = a.weight + e * a.outer * a.inner * a.element_bytes
            weight = carray(pointer(places, a.element), (a.outer, a.inner))
            x = a.x + start * a.inner * a.element_bytes
            x_rows = carray(pointer(x, a.element), (rows, a.inner))
            y = carray(pointer(a.y + start * a.outer * 4, _F32), (rows, a.outer))
            dots(x_rows, weight, no_bias, False, y, first, last)


def _tile_experts(p, chunk, chunks):
    a = carray(p, 1)[0]
    offsets = carray(pointer(a.offsets, _I64), (a.held + 1,))
    depth, pairs = a.inner // 32, a.outer // 32
    first, last = pairs * chunk // chunks, pairs * (chunk + 1) // chunks
    some = max(1, CACHED_BYTES // (depth * 2048))
    for e in range(a.held):
        start, end = offsets[e], offsets[e + 1]
        weight = a.weight + e * a.inner * a.outer * 2
        begin = first if start < end else last
        while begin < last:
            stop = min(begin + some, last)
            t = start
            while t < end:
                here = min(end - t, 32)
                tiles.configure(a.configurations + (here - 1) * 64)
                x, y = a.x + t * a.inner * 2, a.y + t * a.outer * 4
                for pair in range(begin, stop):
                    if here > 16:
                        tile_32(x, weight, np.int64(0), y, pair * 32, depth, a.outer)
                    else:
                        tile_16(x, weight, np.int64(0), y, pair * 32, depth, a.outer)
                t += 32
            begin = stop
    tiles.release()


def _product_chunks(per_chunk: int) -> Any:
    return lambda a: Chunks(-(-a["outer"] // per_chunk))


# x [S, inner], weight [held, outer, inner], y float32 [S, outer].
row_experts = Kernel(
    _row_experts, "offsets x weight y inner outer held element_bytes", chunks=_product_chunks(4)
)
# As row_experts, with weights that are packed (tiles.pack) one by one; inner and outer are
# multiples of 32, and x is 0 beyond its own width.
tile_experts = Kernel(
    _tile_experts, "offsets x weight y inner outer held configurations", chunks=_product_chunks(32)
)


@njit(error_model="numpy")
def _add(out, y, weight):
    for i in range(out.shape[0]):
        out[i] += weight * y[i]


def _combine(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, _I64), (1,))[0]
    for t in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        out = carray(pointer(a.out + t * a.width * 4, _F32), (a.width,))
        slots = carray(pointer(a.slots + t * a.chosen * 4, _I32), (a.chosen,))
        weights = carray(pointer(a.weights + t * a.chosen * 4, _F32), (a.chosen,))
        out[:] = 0
        for i in range(a.chosen):
            if slots[i] >= 0:
                place = a.y + np.int64(slots[i]) * a.width * 4
                _add(out, carray(pointer(place, _F32), (a.width,)), weights[i])


# y float32 [S, width], slots and weights [T, chosen], out float32 [T, width].
combine_kernel = Kernel(_combine, "rows y slots weights out width chosen")
