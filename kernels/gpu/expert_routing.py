"""A mixture of experts on the device: which experts a token has, and the order in which their
products take the tokens.

A *pair* is a token and one of its experts; pair t x C + c is of token t. A rank holds experts in
*places*, and what pairs have is a place, or NOWHERE: the token is padding, or another rank has its
expert. Pairs of one place lie in *blocks* of so many slots, the last of which may be padded, so
that each program of a product (experts.py) has one weight. What depends on the tokens stays on the
device: grids are for as many blocks as there can be, and programs past those in use end at once.

An expert may have several replicas, on as many ranks (Routes). A token goes to one of them by its
row and the step's turn: so those of a step are spread over all, and single tokens from step to
step. All ranks see all tokens and have the same turn, so each knows its own.

A few tokens (DIRECT_TOKENS) are not sorted: each of their pairs is a block of its own, which the
router's kernel writes itself. Two tokens with one expert then read its weight twice, from the
cache, which costs less than sorting them.

Legend: T tokens, E experts, C chosen of each token, P = T x C pairs, B blocks, S slots, H places
that are held, R replicas at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

DIRECT_TOKENS = 4
TURNS = 1 << 30  # of steps, then they begin again: with a token's number added they fit an int32
NOWHERE = -1
# Pairs that a program looks at together: of few tokens, and where blocks are large since there are
# many.
CHUNK, LARGE_CHUNK = 1024, 4096
LARGE_BLOCK = 64


class Blocks(NamedTuple):
    """pairs: int32, of each slot, -1 where it is padding. places: int32, of each block; NOWHERE:
    the block has nothing to do. used: int32 [1], how many blocks there are. counts: int32 [H], the
    pairs of each place.
    """

    pairs_S: torch.Tensor
    places_B: torch.Tensor
    used_1: torch.Tensor
    counts_H: torch.Tensor


class Routes(NamedTuple):
    """Of one layer. table: int32 [E, 1 + R], of each expert how many replicas it has, and the place
    of each of them on this rank, NOWHERE for those of others. turn: int32 [1], of the step, below
    TURNS. Kernels read both when they run, so a graph follows what they are changed to.
    """

    table_EC: torch.Tensor
    turn_1: torch.Tensor


def is_direct(tokens: int) -> bool:
    return tokens <= DIRECT_TOKENS


def most_blocks(pairs: int, held: int, rows: int) -> int:
    """Of `rows` slots, however the pairs are spread over `held` experts."""
    return min(pairs, (pairs + held * (rows - 1)) // rows)


def make_blocks(blocks: int, slots: int, held: int, device: torch.device | str) -> Blocks:
    def ints(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return Blocks(ints(slots), ints(blocks), ints(1), ints(held))


def route_reference(
    logits_TE: torch.Tensor,
    places_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    *,
    renormalize: bool,
    num_tokens_N: torch.Tensor | None = None,
    routes: Routes | None = None,
    loads_E: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    order_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True).indices
    experts_TC = order_TE[:, : places_TC.shape[1]]
    shares_TC = logits_TE.float().softmax(-1).gather(1, experts_TC)
    if renormalize:
        shares_TC = shares_TC / shares_TC.sum(-1, keepdim=True)
    weights_TC.copy_(shares_TC)
    token_T = torch.arange(len(experts_TC), device=experts_TC.device)
    num_tokens_N = token_T[-1:] + 1 if num_tokens_N is None else num_tokens_N
    each = len(token_T) // len(num_tokens_N)
    is_token_T1 = (token_T % each < num_tokens_N[token_T // each])[:, None]
    places = experts_TC
    if routes is not None:
        turn_T1 = (token_T % each + token_T // each + routes.turn_1)[:, None]
        replicas = turn_T1 % routes.table_EC[experts_TC, 0]
        places = routes.table_EC[experts_TC, 1 + replicas]
    places_TC.copy_(torch.where(is_token_T1, places, NOWHERE))
    if loads_E is not None:
        chosen = experts_TC[is_token_T1.expand_as(experts_TC)]
        loads_E += torch.bincount(chosen, minlength=len(loads_E))


def route(
    logits_TE: torch.Tensor,
    places_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    *,
    renormalize: bool,
    num_tokens_N: torch.Tensor | None = None,
    routes: Routes | None = None,
    loads_E: torch.Tensor | None = None,
    blocks: Blocks | None = None,
    rows: int = 0,
    pdl: bool = False,
) -> None:
    """places int32, weights float32: of a token's most likely experts, of two alike the first;
    weights are their shares; renormalize: these add up to one.

    num_tokens: int32, on the device. The tokens are as many of each of N replicas, one behind the
    other, of which the first num_tokens[n] are real; the rest go NOWHERE.
    routes: None where expert e is in place e. loads: int64, to which the number of each expert's
    tokens is added, wherever they go; padding doesn't count.
    blocks: the tokens are few (is_direct), and their pairs are laid out too, as by `dispatch`; a
    pair that goes nowhere has a block that does nothing.
    """
    tokens, num = logits_TE.shape
    chosen = places_TC.shape[1]
    if places_TC.shape != (tokens, chosen) or weights_TC.shape != (tokens, chosen):
        raise ValueError(
            f"places is {tuple(places_TC.shape)}, weights {tuple(weights_TC.shape)}; both must "
            f"be ({tokens}, {chosen})"
        )
    if not 1 <= chosen <= num:
        raise ValueError(f"{chosen} chosen of {num} experts")
    if logits_TE.stride(1) != 1 or not (places_TC.is_contiguous() and weights_TC.is_contiguous()):
        raise ValueError("logits must have rows in one piece, places and weights be contiguous")
    if blocks is not None and not is_direct(tokens):
        raise ValueError(f"{tokens} tokens; dispatch lays out more than {DIRECT_TOKENS}")
    if num_tokens_N is not None and tokens % len(num_tokens_N):
        raise ValueError(f"{tokens} tokens; {len(num_tokens_N)} replicas have as many each")
    if loads_E is not None and (loads_E.shape != (num,) or loads_E.dtype != torch.int64):
        raise ValueError(f"loads is {loads_E.dtype} {tuple(loads_E.shape)}; it must be int64 {num}")
    table_EC = None if routes is None else routes.table_EC
    if table_EC is not None and (len(table_EC) != num or not table_EC.is_contiguous()):
        raise ValueError(f"a table of {len(table_EC)} experts, and there are {num}")
    _route_kernel[(tokens,)](
        logits_TE,
        places_TC,
        weights_TC,
        num_tokens_N,
        table_EC,
        None if routes is None else routes.turn_1,
        loads_E,
        None if blocks is None else blocks.pairs_S,
        None if blocks is None else blocks.places_B,
        None if blocks is None else blocks.used_1,
        logits_TE.stride(0),
        tokens,
        tokens if num_tokens_N is None else tokens // len(num_tokens_N),
        num,
        CHOSEN=chosen,
        EXPERTS=triton.next_power_of_2(num),
        COLUMNS=0 if table_EC is None else table_EC.shape[1],
        ROWS=0 if blocks is None else rows,
        SLOTS=0 if blocks is None else triton.next_power_of_2(chosen * rows),
        RENORMALIZE=renormalize,
        PDL=pdl,
        num_warps=1 if num <= 256 else 4,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["tokens", "each"])
def _route_kernel(
    logits,
    places,
    weights,
    num_tokens,
    table,
    turn,
    loads,
    pairs,
    block_places,
    used,
    stride,
    tokens,
    each,
    num,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    real = e < num
    given = tl.load(logits + token * stride + e, mask=real, other=float("-inf")).to(tl.float32)
    # What is no number must not choose an expert that isn't there; weights are none then, either.
    values = tl.where(given == given, given, float("-inf"))
    most = tl.max(values)
    shares = tl.exp(given - tl.where(most == float("-inf"), 0.0, most))
    shares /= tl.sum(shares)
    left = tl.where(real, 1, 0)
    rank = tl.full([EXPERTS], -1, tl.int32)  # of an expert among the token's
    for c in tl.static_range(CHOSEN):
        best = tl.max(tl.where(left == 1, values, float("-inf")))
        # The first of those alike.
        expert = tl.min(tl.where((left == 1) & (values == best), e, EXPERTS))
        rank = tl.where(e == expert, c, rank)
        left = tl.where(e == expert, 0, left)
    chosen = rank >= 0
    if RENORMALIZE:
        shares /= tl.sum(tl.where(chosen, shares, 0.0))
    is_token = token >= 0
    if num_tokens is not None:
        is_token = token % each < tl.load(num_tokens + token // each)
    place = e
    if table is not None:
        row = table + e * COLUMNS
        count = tl.load(row, mask=chosen, other=1)
        number = (token % each + token // each).to(tl.int32) + tl.load(turn)
        place = tl.load(row + 1 + number % count, mask=chosen, other=-1)
    place = tl.where(is_token, place, -1)
    if loads is not None:
        one = tl.full([EXPERTS], 1, tl.int64)
        tl.atomic_add(loads + e, one, mask=chosen & is_token, sem="relaxed")
    pair = token * CHOSEN + rank
    tl.store(places + pair, place, mask=chosen)
    tl.store(weights + pair, shares, mask=chosen)
    if pairs is not None:
        tl.store(block_places + pair, place, mask=chosen)
        i = tl.arange(0, SLOTS)
        first = (token * CHOSEN + i // ROWS).to(tl.int32)
        value = tl.where(i % ROWS == 0, first, -1)
        tl.store(pairs + token * (CHOSEN * ROWS) + i, value, mask=i < CHOSEN * ROWS)
        tl.store(used, tokens * CHOSEN)


def dispatch_reference(
    places_TC: torch.Tensor,
    blocks: Blocks,
    *,
    rows: int,
    held: int,
    pdl: bool = False,
) -> None:
    place_P = places_TC.flatten()
    block = 0
    for place in range(held):
        pairs = (place_P == place).nonzero().flatten()
        blocks.counts_H[place] = len(pairs)
        for start in range(0, len(pairs), rows):
            part = pairs[start : start + rows]
            slots = blocks.pairs_S[block * rows : (block + 1) * rows]
            slots.fill_(-1)[: len(part)] = part.int()
            blocks.places_B[block] = place
            block += 1
    blocks.used_1.fill_(block)


def dispatch(
    places_TC: torch.Tensor,
    blocks: Blocks,
    *,
    rows: int,
    held: int,
    pdl: bool = False,
) -> None:
    """The pairs of the places that are `held`, in blocks of `rows` slots, in the order of the
    places and then of the tokens. What lies behind those in use is left as it is.
    """
    pairs = places_TC.numel()
    needed = most_blocks(pairs, held, rows)
    if not places_TC.is_contiguous():
        raise ValueError("places must be contiguous")
    if len(blocks.places_B) < needed or len(blocks.pairs_S) < needed * rows:
        raise ValueError(
            f"{pairs} pairs need {needed} blocks and {needed * rows} slots; there are "
            f"{len(blocks.places_B)} and {len(blocks.pairs_S)}"
        )
    is_large = rows >= LARGE_BLOCK
    common = {
        "CHUNK": LARGE_CHUNK if is_large else CHUNK,
        "PDL": pdl,
        "num_warps": 8 if is_large else 4,
        "launch_pdl": pdl,
    }
    _count_kernel[(held,)](places_TC, blocks.counts_H, pairs, **common)
    _place_kernel[(held,)](
        places_TC,
        *blocks,
        pairs,
        held,
        HELD=triton.next_power_of_2(held),
        ROWS=rows,
        **common,
    )


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(places, counts, pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mine = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        of_pair = tl.load(places + start + i, mask=start + i < pairs, other=-1)
        found += (of_pair == mine).to(tl.int32)
    tl.store(counts + mine, tl.sum(found))


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    places,
    pair_of_slot,
    block_places,
    used,
    counts,
    pairs,
    held,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    me = tl.program_id(0)
    h = tl.arange(0, HELD)
    counts_H = tl.load(counts + h, mask=h < held, other=0)
    blocks_H = (counts_H + (ROWS - 1)) // ROWS
    block = tl.sum(tl.where(h < me, blocks_H, 0))
    count = tl.sum(tl.where(h == me, counts_H, 0))
    blocks = (count + (ROWS - 1)) // ROWS
    if me == held - 1:
        tl.store(used, block + blocks)
    i = tl.arange(0, CHUNK)
    for start in range(0, blocks, CHUNK):
        there = start + i < blocks
        tl.store(block_places + block + start + i, tl.zeros([CHUNK], tl.int32) + me, mask=there)
    slots = pair_of_slot + block.to(tl.int64) * ROWS
    seen = block * 0
    for start in range(0, pairs, CHUNK):
        of_pair = tl.load(places + start + i, mask=start + i < pairs, other=-1)
        here = (of_pair == me).to(tl.int32)
        tl.store(slots + seen + tl.cumsum(here, 0) - 1, start + i, mask=here == 1)
        seen += tl.sum(here)
    padding = (blocks - 1) * ROWS + tl.arange(0, ROWS)
    tl.store(slots + padding, tl.full([ROWS], -1, tl.int32), mask=padding >= tl.maximum(count, 0))
