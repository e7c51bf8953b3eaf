"""A mixture of experts on the device: which experts a token has, and the order in which their
products take the tokens.

A *pair* is a token and one of its experts; pair t x C + c is of token t. Pairs of one expert lie
in *blocks* of so many slots, the last of which may be padded, so that each program of a product
(experts.py) has one expert. What depends on the tokens stays on the device: grids are for as many
blocks as there can be, and programs past those in use end at once.

A few tokens (DIRECT_TOKENS) are not sorted: each of their pairs is a block of its own, which the
router's kernel writes itself. Two tokens with one expert then read its weight twice, from the
cache, which costs less than sorting them.

Legend: T tokens, E experts, C chosen of each token, P = T x C pairs, B blocks, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

DIRECT_TOKENS = 4
NO_EXPERT = -1
# Pairs that a program looks at together: of few tokens, and where blocks are large since there are
# many.
CHUNK, LARGE_CHUNK = 1024, 4096
LARGE_BLOCK = 64


class Blocks(NamedTuple):
    """pairs: int32, of each slot, -1 where it is padding. experts: int32, of each block, counted
    from the first one that is held; -1: the block has nothing to do. used: int32 [1], how many
    blocks there are. counts: int32 [E].
    """

    pairs_S: torch.Tensor
    experts_B: torch.Tensor
    used_1: torch.Tensor
    counts_E: torch.Tensor


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
    experts_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    *,
    renormalize: bool,
    num_tokens_N: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    order_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True).indices
    chosen_TC = order_TE[:, : experts_TC.shape[1]]
    shares_TC = logits_TE.float().softmax(-1).gather(1, chosen_TC)
    if renormalize:
        shares_TC = shares_TC / shares_TC.sum(-1, keepdim=True)
    experts_TC.copy_(chosen_TC)
    weights_TC.copy_(shares_TC)
    if num_tokens_N is not None:
        each = len(experts_TC) // len(num_tokens_N)
        for n, count in enumerate(num_tokens_N.tolist()):
            experts_TC[n * each + count : (n + 1) * each] = NO_EXPERT


def route(
    logits_TE: torch.Tensor,
    experts_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    *,
    renormalize: bool,
    num_tokens_N: torch.Tensor | None = None,
    blocks: Blocks | None = None,
    rows: int = 0,
    first: int = 0,
    held: int = 0,
    pdl: bool = False,
) -> None:
    """experts int32, weights float32: a token's most likely experts, of two alike the first, and
    their shares; renormalize: these add up to one.

    num_tokens: int32, on the device. The tokens are as many of each of N replicas, one behind the
    other, of which the first num_tokens[n] are real; the rest have no experts (NO_EXPERT).
    blocks: the tokens are few (is_direct), and their pairs are laid out too, as by `dispatch`; a
    pair whose expert isn't held has a block that does nothing.
    """
    tokens, num = logits_TE.shape
    chosen = experts_TC.shape[1]
    if experts_TC.shape != (tokens, chosen) or weights_TC.shape != (tokens, chosen):
        raise ValueError(
            f"experts is {tuple(experts_TC.shape)}, weights {tuple(weights_TC.shape)}; both must "
            f"be ({tokens}, {chosen})"
        )
    if not 1 <= chosen <= num:
        raise ValueError(f"{chosen} chosen of {num} experts")
    if logits_TE.stride(1) != 1 or not (experts_TC.is_contiguous() and weights_TC.is_contiguous()):
        raise ValueError("logits must have rows in one piece, experts and weights be contiguous")
    if blocks is not None and not is_direct(tokens):
        raise ValueError(f"{tokens} tokens; dispatch lays out more than {DIRECT_TOKENS}")
    if num_tokens_N is not None and tokens % len(num_tokens_N):
        raise ValueError(f"{tokens} tokens; {len(num_tokens_N)} replicas have as many each")
    _route_kernel[(tokens,)](
        logits_TE,
        experts_TC,
        weights_TC,
        num_tokens_N,
        None if blocks is None else blocks.pairs_S,
        None if blocks is None else blocks.experts_B,
        None if blocks is None else blocks.used_1,
        logits_TE.stride(0),
        tokens,
        tokens if num_tokens_N is None else tokens // len(num_tokens_N),
        num,
        first,
        held,
        CHOSEN=chosen,
        EXPERTS=triton.next_power_of_2(num),
        ROWS=rows,
        RENORMALIZE=renormalize,
        PDL=pdl,
        num_warps=1 if num <= 256 else 4,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["tokens", "each", "first"])
def _route_kernel(
    logits,
    experts,
    weights,
    num_tokens,
    pairs,
    block_experts,
    used,
    stride,
    tokens,
    each,
    num,
    first,
    held,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
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
    total = tl.sum(shares)
    left = tl.where(real, 1, 0)
    chosen_total = 0.0
    is_token = token >= 0
    if num_tokens is not None:
        is_token = token % each < tl.load(num_tokens + token // each)
    for c in tl.static_range(CHOSEN):
        best = tl.max(tl.where(left == 1, values, float("-inf")))
        # The first of those alike.
        expert = tl.min(tl.where((left == 1) & (values == best), e, EXPERTS))
        share = tl.sum(tl.where(e == expert, shares, 0.0)) / total
        chosen_total += share
        left = tl.where(e == expert, 0, left)
        pair = token * CHOSEN + c
        tl.store(experts + pair, tl.where(is_token, expert, -1))
        if not RENORMALIZE:
            tl.store(weights + pair, share)
        if pairs is not None:
            here = (expert >= first) & (expert < first + held) & is_token
            i = tl.arange(0, ROWS)
            tl.store(pairs + pair * ROWS + i, tl.where((i == 0) & here, pair, -1).to(tl.int32))
            tl.store(block_experts + pair, tl.where(here, expert - first, -1))
    if pairs is not None:
        tl.store(used, tokens * CHOSEN)
    if RENORMALIZE:
        for c in tl.static_range(CHOSEN):
            expert = tl.load(experts + token * CHOSEN + c)  # of padding none, whose share is 0
            share = tl.sum(tl.where(e == expert, shares, 0.0)) / total
            tl.store(weights + token * CHOSEN + c, share / chosen_total)


def dispatch_reference(
    experts_TC: torch.Tensor,
    blocks: Blocks,
    *,
    rows: int,
    first: int,
    held: int,
    pdl: bool = False,
) -> None:
    number_P = experts_TC.flatten() - first
    block = 0
    for e in range(held):
        pairs = (number_P == e).nonzero().flatten()
        blocks.counts_E[e] = len(pairs)
        for start in range(0, len(pairs), rows):
            part = pairs[start : start + rows]
            slots = blocks.pairs_S[block * rows : (block + 1) * rows]
            slots.fill_(-1)[: len(part)] = part.int()
            blocks.experts_B[block] = e
            block += 1
    blocks.used_1.fill_(block)


def dispatch(
    experts_TC: torch.Tensor,
    blocks: Blocks,
    *,
    rows: int,
    first: int,
    held: int,
    pdl: bool = False,
) -> None:
    """The pairs of the experts from `first` on, as many as are `held`, in blocks of `rows` slots,
    in the order of the experts and then of the tokens. What lies behind those in use is left as
    it is.
    """
    pairs = experts_TC.numel()
    needed = most_blocks(pairs, held, rows)
    if not experts_TC.is_contiguous():
        raise ValueError("experts must be contiguous")
    if len(blocks.experts_B) < needed or len(blocks.pairs_S) < needed * rows:
        raise ValueError(
            f"{pairs} pairs need {needed} blocks and {needed * rows} slots; there are "
            f"{len(blocks.experts_B)} and {len(blocks.pairs_S)}"
        )
    is_large = rows >= LARGE_BLOCK
    common = {
        "CHUNK": LARGE_CHUNK if is_large else CHUNK,
        "PDL": pdl,
        "num_warps": 8 if is_large else 4,
        "launch_pdl": pdl,
    }
    _count_kernel[(held,)](experts_TC, blocks.counts_E, pairs, first, **common)
    _place_kernel[(held,)](
        experts_TC,
        *blocks,
        pairs,
        first,
        held,
        EXPERTS=triton.next_power_of_2(held),
        ROWS=rows,
        **common,
    )


@triton.jit(do_not_specialize=["pairs", "first"])
def _count_kernel(experts, counts, pairs, first, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mine = tl.program_id(0) + first
    i = tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        of_pair = tl.load(experts + start + i, mask=start + i < pairs, other=-1)
        found += (of_pair == mine).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found))


@triton.jit(do_not_specialize=["pairs", "first"])
def _place_kernel(
    experts,
    pair_of_slot,
    block_experts,
    used,
    counts,
    pairs,
    first,
    held,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    me = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    counts_E = tl.load(counts + e, mask=e < held, other=0)
    blocks_E = (counts_E + (ROWS - 1)) // ROWS
    block = tl.sum(tl.where(e < me, blocks_E, 0))
    count = tl.sum(tl.where(e == me, counts_E, 0))
    blocks = (count + (ROWS - 1)) // ROWS
    if me == held - 1:
        tl.store(used, block + blocks)
    i = tl.arange(0, CHUNK)
    for start in range(0, blocks, CHUNK):
        there = start + i < blocks
        tl.store(block_experts + block + start + i, tl.zeros([CHUNK], tl.int32) + me, mask=there)
    slots = pair_of_slot + block.to(tl.int64) * ROWS
    seen = block * 0
    for start in range(0, pairs, CHUNK):
        of_pair = tl.load(experts + start + i, mask=start + i < pairs, other=-1)
        here = (of_pair == me + first).to(tl.int32)
        tl.store(slots + seen + tl.cumsum(here, 0) - 1, start + i, mask=here == 1)
        seen += tl.sum(here)
    padding = (blocks - 1) * ROWS + tl.arange(0, ROWS)
    tl.store(slots + padding, tl.full([ROWS], -1, tl.int32), mask=padding >= tl.maximum(count, 0))
