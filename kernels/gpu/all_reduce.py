"""What ranks on devices of one host add up and tell each other, in one launch each: every rank
reads the memory of all others (one-shot). For messages that are short beside the time of a launch,
which those of a decode step are; longer ones are NCCL's.

Each rank has memory of the same layout that all others have mapped: flags first, then whatever its
kernels write there. Program p of a launch meets program p of the same launch on the other ranks:

    1. It takes the next number of its own counter: the epoch. Counters are on the device, so that a
       replayed graph counts on.
    2. It waits for the kernels before it. So what they wrote is there to be read.
    3. It stores the epoch in its flag of every other rank (release), and waits until its own flags
       have it or more (acquire). Differences are taken modulo 2^32.

After this all ranks have what each had before. All ranks make the same launches in the same order.
A program waits for the one of its own number only, so no more of them need to be on a device at
once than are on the others.

Who writes into its memory again must know that the others have read it: they have, once a later
launch was met. So two sums in a row may not have the same place, and any two others may.

Sums are in float32, of all ranks in their order: the same bits on every rank. Waits end with the
process.

Legend: T tokens, H hidden, N rows, V columns of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .norm import MAX_HIDDEN, add_rms_norm_reference, warps_of

MOST_PROGRAMS = 1024
MOST_RANKS = 8
FLAGS_BYTES = 4 * MOST_PROGRAMS * MOST_RANKS  # int32 [program, rank], at the start of the memory
ALIGNMENT = 256  # bytes: of what else lies there
READ = 16  # bytes that are read at once: a place within may be a multiple of these
_BLOCK = 2048
_MOST_BLOCKS = 128  # programs that share a long message; about as many as a device has processors


class Peers(NamedTuple):
    """rank: this one. addresses: int64 [ranks], of each rank's memory as this process has mapped
    it. counters: int32 [MOST_PROGRAMS], this rank's own, zeros at first; so are the flags.
    """

    rank: int
    addresses: torch.Tensor
    counters: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.addresses)


def make_peers(rank: int, addresses: Sequence[int], device: torch.device) -> Peers:
    return Peers(
        rank,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device),
    )


def all_reduce_reference(
    parts: Sequence[torch.Tensor],
    out_TH: torch.Tensor,
    add_to_TH: torch.Tensor | None = None,
) -> None:
    """parts: of all ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    out_TH.copy_(total if add_to_TH is None else add_to_TH.float() + total)


def all_reduce_add_rms_norm_reference(
    parts: Sequence[torch.Tensor],
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    out_TH: torch.Tensor,
    eps: float,
    update_weight_H: torch.Tensor | None = None,
) -> None:
    """parts: of all ranks."""
    total = torch.empty(parts[0].shape, device=parts[0].device)
    all_reduce_reference(parts, total)
    add_rms_norm_reference(total, residual_TH, weight_H, out_TH, eps, update_weight_H)


def all_reduce(
    peers: Peers,
    place: int,
    out_TH: torch.Tensor,
    add_to_TH: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """out = [add_to +] the sum of what lies at `place` (bytes) of every rank's memory, which has
    out's type and shape. add_to may be out. All are in one piece.
    """
    for name, tensor in (("out", out_TH), ("add_to", add_to_TH)):
        if tensor is not None and (tensor.shape != out_TH.shape or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} of strides {tensor.stride()}; it must be "
                f"{tuple(out_TH.shape)}, contiguous"
            )
    _check_place(place)
    size = out_TH.numel()
    programs = min(triton.cdiv(size, _BLOCK), _MOST_BLOCKS)
    _all_reduce_kernel[(programs,)](
        peers.addresses,
        peers.counters,
        add_to_TH,
        out_TH,
        peers.rank,
        place,
        size,
        RANKS=peers.size,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


def all_reduce_add_rms_norm(
    peers: Peers,
    place: int,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    out_TH: torch.Tensor,
    eps: float,
    update_weight_H: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """add_rms_norm (norm.py) of the sum of what lies at `place` (bytes) of every rank's memory:
    [T, H] of the residual's type, in one piece. T is MOST_PROGRAMS at most.
    """
    tokens, size = residual_TH.shape
    if tokens > MOST_PROGRAMS or size > MAX_HIDDEN:
        raise ValueError(f"{tokens} rows of {size}; at most {MOST_PROGRAMS} of {MAX_HIDDEN}")
    if weight_H.shape != (size,) or out_TH.shape != residual_TH.shape:
        raise ValueError(
            f"residual is {tuple(residual_TH.shape)}, weight {tuple(weight_H.shape)}, "
            f"out {tuple(out_TH.shape)}"
        )
    if residual_TH.stride(1) != 1 or out_TH.stride(1) != 1:
        raise ValueError("rows must be in one piece")
    _check_place(place)
    _all_reduce_add_rms_norm_kernel[(tokens,)](
        peers.addresses,
        peers.counters,
        residual_TH,
        update_weight_H,
        weight_H,
        out_TH,
        peers.rank,
        place,
        residual_TH.stride(0),
        out_TH.stride(0),
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        RANKS=peers.size,
        PDL=pdl,
        num_warps=warps_of(size),
        launch_pdl=pdl,
    )


def gather_rows(peers: Peers, place: int, out_NTH: torch.Tensor, *, pdl: bool = False) -> None:
    """out [ranks, T, H] = what lies at `place` (bytes) of every rank's memory, [T, H] of out's type
    in one piece, one behind the other, on every rank.
    """
    if len(out_NTH) != peers.size or not out_NTH.is_contiguous():
        raise ValueError(
            f"out is {tuple(out_NTH.shape)} of strides {out_NTH.stride()}; it must be contiguous, "
            f"of {peers.size} ranks"
        )
    _check_place(place)
    size = out_NTH[0].numel()
    programs = min(peers.size * triton.cdiv(size, _BLOCK), _MOST_BLOCKS)
    _gather_rows_kernel[(programs,)](
        peers.addresses,
        peers.counters,
        out_NTH,
        peers.rank,
        place,
        size,
        RANKS=peers.size,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


def gather_columns(
    peers: Peers, place: int, part_NV: torch.Tensor, out: torch.Tensor | None, *, pdl: bool = False
) -> None:
    """Rank 0: out [N, ranks x V] = what lies at `place` (bytes) of every rank's memory, [N, V] in
    one piece, side by side. Other ranks have no `out`. When it is over on a rank, its part may be
    written again. part_NV: this rank's.
    """
    rows, columns = part_NV.shape
    if (out is None) != (peers.rank > 0):
        raise ValueError(f"rank {peers.rank} has out = {out}; rank 0 has one, and no other")
    if out is not None and (out.shape != (rows, peers.size * columns) or not out.is_contiguous()):
        raise ValueError(
            f"out is {tuple(out.shape)} of strides {out.stride()}; it must be "
            f"{(rows, peers.size * columns)}, contiguous"
        )
    _check_place(place)
    programs = min(rows * triton.cdiv(columns, _BLOCK), _MOST_BLOCKS)
    _gather_columns_kernel[(programs,)](
        peers.addresses,
        peers.counters,
        part_NV,
        out,
        peers.rank,
        place,
        rows,
        columns,
        RANKS=peers.size,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


def broadcast(
    peers: Peers, place: int, values_N: torch.Tensor, capacity: int, *, pdl: bool = False
) -> None:
    """Values, int32, become those of rank 0, by way of `place` (bytes) of its memory. capacity:
    most values that there ever are; as many fit there.
    """
    if values_N.dtype != torch.int32 or not values_N.is_contiguous() or len(values_N) > capacity:
        raise ValueError(
            f"values are {values_N.dtype} {tuple(values_N.shape)} of strides {values_N.stride()}; "
            f"they must be int32, contiguous, and at most {capacity}"
        )
    _check_place(place)
    _broadcast_kernel[(1,)](
        peers.addresses,
        peers.counters,
        values_N,
        peers.rank,
        place,
        len(values_N),
        RANKS=peers.size,
        BLOCK=triton.next_power_of_2(capacity),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _check_place(place: int) -> None:
    if place < FLAGS_BYTES or place % READ:
        raise ValueError(
            f"place is {place}; it must be a multiple of {READ}, after {FLAGS_BYTES} of flags"
        )


@triton.jit
def _next_epoch(counters):
    """Comes before what depends on this kernel may start: it may have a kernel of these in it."""
    return tl.atomic_add(counters + tl.program_id(0), 1, sem="relaxed", scope="gpu") + 1


@triton.jit
def _announce(addresses, rank, epoch, RANKS: tl.constexpr):
    tl.debug_barrier()  # what any thread has done so far comes before the flags
    for i in tl.static_range(1, RANKS):
        flags = tl.load(addresses + (rank + i) % RANKS).to(tl.pointer_type(tl.int32))
        # Read in _meet of that rank.
        tl.atomic_xchg(flags + tl.program_id(0) * RANKS + rank, epoch, sem="release", scope="sys")


@triton.jit
def _await(addresses, rank, epoch, peer, RANKS: tl.constexpr):
    flags = tl.load(addresses + rank).to(tl.pointer_type(tl.int32))
    # Stored in _announce of that peer.
    flag = flags + tl.program_id(0) * RANKS + peer
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch < 0:
        pass


@triton.jit
def _meet(addresses, rank, epoch, RANKS: tl.constexpr):
    _announce(addresses, rank, epoch, RANKS)
    for i in tl.static_range(1, RANKS):
        _await(addresses, rank, epoch, (rank + i) % RANKS, RANKS)


@triton.jit
def _memory_of(addresses, peer, place, TYPE: tl.constexpr):
    start = (tl.load(addresses + peer) + place).to(tl.pointer_type(TYPE))
    return tl.multiple_of(start, 16)


@triton.jit
def _sum(addresses, place, index, inside, TYPE: tl.constexpr, RANKS: tl.constexpr):
    """Past the nearest cache, which may have what was there before."""
    first = _memory_of(addresses, 0, place, TYPE)
    total = tl.load(first + index, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    for peer in tl.static_range(1, RANKS):
        part = _memory_of(addresses, peer, place, TYPE)
        values = tl.load(part + index, mask=inside, other=0.0, cache_modifier=".cg")
        total += values.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rank"])
def _all_reduce_kernel(
    addresses,
    counters,
    add_to,
    out,
    rank,
    place,
    size,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    epoch = _next_epoch(counters)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _meet(addresses, rank, epoch, RANKS)
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < size
        total = _sum(addresses, place, index, inside, out.dtype.element_ty, RANKS)
        if add_to is not None:
            total = tl.load(add_to + index, mask=inside, other=0.0).to(tl.float32) + total
        tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rank"])
def _all_reduce_add_rms_norm_kernel(
    addresses,
    counters,
    residual,
    update_weight,
    weight,
    out,
    rank,
    place,
    residual_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    epoch = _next_epoch(counters)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < SIZE
    scales = tl.load(weight + h, mask=inside, other=0.0)
    if update_weight is not None:
        update_scales = tl.load(update_weight + h, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    before = tl.load(residual + row * residual_stride + h, mask=inside, other=0.0)
    _meet(addresses, rank, epoch, RANKS)
    update = _sum(addresses, place, row * SIZE + h, inside, residual.dtype.element_ty, RANKS)
    if update_weight is not None:
        update *= tl.rsqrt(tl.sum(update * update) / SIZE + eps) * update_scales
    total = (before.to(tl.float32) + update).to(residual.dtype.element_ty)
    tl.store(residual + row * residual_stride + h, total, mask=inside)
    values = total.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values) / SIZE + eps) * scales
    tl.store(out + row * out_stride + h, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rank"])
def _gather_rows_kernel(
    addresses,
    counters,
    out,
    rank,
    place,
    size,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    epoch = _next_epoch(counters)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _meet(addresses, rank, epoch, RANKS)
    blocks = tl.cdiv(size, BLOCK)
    for item in range(tl.program_id(0), RANKS * blocks, tl.num_programs(0)):
        # Of several ranks at a time, and each begins with its own: no link has all of them.
        peer = (item + rank) % RANKS
        index = (item // RANKS) * BLOCK + tl.arange(0, BLOCK)
        inside = index < size
        part = _memory_of(addresses, peer, place, out.dtype.element_ty)
        values = tl.load(part + index, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(out + peer * size.to(tl.int64) + index, values, mask=inside)


@triton.jit(do_not_specialize=["rank", "rows"])
def _gather_columns_kernel(
    addresses,
    counters,
    own,
    out,
    rank,
    place,
    rows,
    columns,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    here = _next_epoch(counters)
    over = _next_epoch(counters)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _meet(addresses, rank, here, RANKS)
    if out is not None:
        blocks = tl.cdiv(columns, BLOCK)
        for item in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
            row = (item // blocks).to(tl.int64)
            column = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
            inside = column < columns
            for peer in tl.static_range(RANKS):
                part = _memory_of(addresses, peer, place, own.dtype.element_ty)
                values = tl.load(
                    part + row * columns + column, mask=inside, other=0.0, cache_modifier=".cg"
                )
                target = out + row * columns * RANKS + peer * columns
                tl.store(target + column, values, mask=inside)
    _meet(addresses, rank, over, RANKS)


@triton.jit(do_not_specialize=["rank", "count"])
def _broadcast_kernel(
    addresses,
    counters,
    values,
    rank,
    place,
    count,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    epoch = _next_epoch(counters)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.arange(0, BLOCK)
    inside = index < count
    first = _memory_of(addresses, 0, place, tl.int32)
    if rank == 0:
        tl.store(first + index, tl.load(values + index, mask=inside), mask=inside)
        _announce(addresses, rank, epoch, RANKS)
    else:
        _await(addresses, rank, epoch, 0, RANKS)
        said = tl.load(first + index, mask=inside, cache_modifier=".cg")
        tl.store(values + index, said, mask=inside)
