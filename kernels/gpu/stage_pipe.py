"""What a stage of a pipeline hands to the next one: the residual stream of a step, from the memory
of one device into that of another, as kernels in the streams of both. A graph can hold them.

The receiver's device has a ring of slots, which the sender has mapped, and writes into. Both launch
a fixed number of programs for each item, and program p of a launch has the rows p, p + PROGRAMS,
...: so how many rows the two pad a step to may differ. Program p sends to program p, and needs no
other:

    sent [p]     in the receiver's memory: items that program p has sent. Raised by the sender after
                 its last write (release), read by the receiver before it reads a row (acquire)
    taken [p]    in the sender's memory: items that program p has taken. Raised by the receiver
                 after its last read (release), read by the sender before it writes (acquire)
    the slots    in the receiver's memory: item i is in slot i modulo SLOTS

    1. A launch is item i; each side counts its own launches, on the device, so that a replayed
       graph counts on.
    2. The sender waits until taken[p] > i - SLOTS, writes its rows, and says sent[p] = i + 1.
    3. The receiver waits until sent[p] > i, reads its rows, and says taken[p] = i + 1.

Nothing is overwritten unread: the rows of item i go where those of item i - SLOTS were, which
program p alone wrote, program p alone reads, and by rule 2 has read. Nothing is read unwritten:
rule 3. Counts differ by SLOTS at most, so they are compared modulo 2^32, and they wrap where slots
do.

Nothing can deadlock. Item i is received once it is sent, and sent once item i - SLOTS is received
and its own stage has come so far; a stage's stream does one item after the other. So of all items
that are under way anywhere the lowest one, at the last stage that has it, waits for nothing that is
not over, as long as each stage launches every step: and a launch waits for no later one. Programs
don't wait for each other, so it doesn't matter how many of them are on a device at once. Only a
stage that has died is waited for in vain: that ends with the process, which the supervisor kills.

A pipe that isn't open does nothing at all: so a stage can launch everything once, by itself.

A stage on another host has no memory that can be mapped. `add_update` makes what is sent there, and
puts what has come from there where it is to be.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .norm import MAX_HIDDEN, warps_of

PROGRAMS = 128  # about as many as a device has processors
FLAGS_BYTES = 2 * 4 * PROGRAMS  # sent, taken; the ring follows


class Pipe(NamedTuple):
    """One end. inbox, outbox: int64 [1], the address of the receiver's and of the sender's memory
    (`memory_bytes`) as this process has it. launches: int32 [PROGRAMS], this end's own. Flags and
    launches are zeros at first. slots: a power of two. rows: most of an item.
    """

    inbox: torch.Tensor
    outbox: torch.Tensor
    launches: torch.Tensor
    slots: int
    rows: int


class Item(NamedTuple):
    """What a stage hands on, as `send` takes it: the residual stream, and the last update where
    that is still to be added, as add_rms_norm (norm.py) would do it.
    """

    residual_TH: torch.Tensor
    update_TH: torch.Tensor | None = None
    update_weight_H: torch.Tensor | None = None
    eps: float = 0.0


def memory_bytes(slots: int, rows: int, row_bytes: int) -> int:
    """Of each end: its flags, and the ring that the stage before writes into."""
    return FLAGS_BYTES + slots * rows * row_bytes


def add_update_reference(
    residual_TH: torch.Tensor,
    out_TH: torch.Tensor,
    update_TH: torch.Tensor | None = None,
    update_weight_H: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    pdl: bool = False,
) -> None:
    if update_TH is None:
        out_TH.copy_(residual_TH)
        return
    update = update_TH.float()
    if update_weight_H is not None:
        update = update * torch.rsqrt(update.square().mean(-1, keepdim=True) + eps)
        update = update * update_weight_H
    out_TH.copy_(residual_TH.float() + update)


def send(
    pipe: Pipe,
    residual_TH: torch.Tensor,
    update_TH: torch.Tensor | None = None,
    update_weight_H: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    is_open: bool = True,
    pdl: bool = False,
) -> None:
    """The next item, with its update added."""
    size = _check(pipe, "residual", residual_TH)
    if update_TH is not None:
        _check(pipe, "update", update_TH)
        if update_TH.shape != residual_TH.shape:
            raise ValueError(
                f"update is {tuple(update_TH.shape)}; it must be {tuple(residual_TH.shape)}"
            )
    _send_kernel[(PROGRAMS,)](
        pipe.inbox,
        pipe.outbox,
        pipe.launches,
        residual_TH,
        update_TH,
        update_weight_H,
        int(is_open),
        residual_TH.shape[0],
        pipe.rows * size,
        residual_TH.stride(0),
        0 if update_TH is None else update_TH.stride(0),
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        SLOTS=pipe.slots,
        FLAGS=FLAGS_BYTES,
        PDL=pdl,
        num_warps=warps_of(size),
        launch_pdl=pdl,
    )


def add_update(
    residual_TH: torch.Tensor,
    out_TH: torch.Tensor,
    update_TH: torch.Tensor | None = None,
    update_weight_H: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    pdl: bool = False,
) -> None:
    """out = the residual stream with the last update added, which is what `send` sends."""
    tokens, size = residual_TH.shape
    for name, tensor in (("residual", residual_TH), ("update", update_TH), ("out", out_TH)):
        if tensor is None:
            continue
        if tensor.shape != residual_TH.shape or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} of strides {tensor.stride()}; it must be "
                f"{(tokens, size)}, with rows in one piece"
            )
    if size > MAX_HIDDEN:
        raise ValueError(f"rows of {size}; at most {MAX_HIDDEN}")
    _add_update_kernel[(tokens,)](
        residual_TH,
        update_TH,
        update_weight_H,
        out_TH,
        residual_TH.stride(0),
        0 if update_TH is None else update_TH.stride(0),
        out_TH.stride(0),
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PDL=pdl,
        num_warps=warps_of(size),
        launch_pdl=pdl,
    )


def receive(pipe: Pipe, out_TH: torch.Tensor, *, is_open: bool = True, pdl: bool = False) -> None:
    """The next item. Rows that were not sent with it have what an older one had there, or zeros."""
    size = _check(pipe, "out", out_TH)
    _receive_kernel[(PROGRAMS,)](
        pipe.inbox,
        pipe.outbox,
        pipe.launches,
        out_TH,
        int(is_open),
        out_TH.shape[0],
        pipe.rows * size,
        out_TH.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        SLOTS=pipe.slots,
        FLAGS=FLAGS_BYTES,
        PDL=pdl,
        num_warps=warps_of(size),
        launch_pdl=pdl,
    )


def _check(pipe: Pipe, name: str, x_TH: torch.Tensor) -> int:
    tokens, size = x_TH.shape
    if tokens > pipe.rows or size > MAX_HIDDEN:
        raise ValueError(f"{name} has {tokens} rows of {size}; at most {pipe.rows} of {MAX_HIDDEN}")
    if x_TH.stride(1) != 1:
        raise ValueError("rows must be in one piece")
    if pipe.slots & (pipe.slots - 1):
        raise ValueError(f"{pipe.slots} slots; it must be a power of two")
    return size


@triton.jit
def _flag(memory, place, program):
    return tl.load(memory).to(tl.pointer_type(tl.int32)) + place + program


@triton.jit
def _await(flag, least):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - least < 0:
        pass


@triton.jit
def _raise(flag, count):
    tl.debug_barrier()  # what any thread has done so far comes before the flag
    tl.atomic_xchg(flag, count, sem="release", scope="sys")


@triton.jit
def _slot(inbox, item, slot_size, FLAGS: tl.constexpr, SLOTS: tl.constexpr, TYPE: tl.constexpr):
    ring = (tl.load(inbox) + FLAGS).to(tl.pointer_type(TYPE))
    return tl.multiple_of(ring, 16) + (item & (SLOTS - 1)).to(tl.int64) * slot_size


@triton.jit
def _added(residual, update, update_place, update_weight, eps, h, inside, SIZE: tl.constexpr):
    """A row of what is sent."""
    values = tl.load(residual + h, mask=inside, other=0.0)
    if update is not None:
        added = tl.load(update + update_place + h, mask=inside, other=0.0).to(tl.float32)
        if update_weight is not None:
            scales = tl.load(update_weight + h, mask=inside, other=0.0)
            added *= tl.rsqrt(tl.sum(added * added) / SIZE + eps) * scales
        values = (values.to(tl.float32) + added).to(residual.dtype.element_ty)
    return values


@triton.jit
def _add_update_kernel(
    residual,
    update,
    update_weight,
    out,
    residual_stride,
    update_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < SIZE
    values = _added(
        residual + row * residual_stride, update, row * update_stride, update_weight, eps,
        h, inside, SIZE,
    )  # fmt: skip
    tl.store(out + row * out_stride + h, values, mask=inside)


@triton.jit(do_not_specialize=["is_open", "rows"])
def _send_kernel(
    inbox,
    outbox,
    launches,
    residual,
    update,
    update_weight,
    is_open,
    rows,
    slot_size,
    residual_stride,
    update_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAGS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    h = tl.arange(0, BLOCK)
    inside = h < SIZE
    if is_open != 0:
        item = tl.atomic_add(launches + program, 1, sem="relaxed", scope="gpu")
        _await(_flag(outbox, programs, program), item + 1 - SLOTS)  # raised in _receive_kernel
        slot = _slot(inbox, item, slot_size, FLAGS, SLOTS, residual.dtype.element_ty)
        row = program.to(tl.int64)
        while row < rows:
            values = _added(
                residual + row * residual_stride, update, row * update_stride, update_weight, eps,
                h, inside, SIZE,
            )  # fmt: skip
            tl.store(slot + row * SIZE + h, values, mask=inside)
            row += programs
        _raise(_flag(inbox, 0, program), item + 1)  # read in _receive_kernel


@triton.jit(do_not_specialize=["is_open", "rows"])
def _receive_kernel(
    inbox,
    outbox,
    launches,
    out,
    is_open,
    rows,
    slot_size,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAGS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    h = tl.arange(0, BLOCK)
    inside = h < SIZE
    if is_open != 0:
        item = tl.atomic_add(launches + program, 1, sem="relaxed", scope="gpu")
        _await(_flag(inbox, 0, program), item + 1)  # raised in _send_kernel
        slot = _slot(inbox, item, slot_size, FLAGS, SLOTS, out.dtype.element_ty)
        row = program.to(tl.int64)
        while row < rows:
            # Past the nearest cache, which may have what was there before.
            values = tl.load(slot + row * SIZE + h, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out + row * out_stride + h, values, mask=inside)
            row += programs
        _raise(_flag(outbox, programs, program), item + 1)  # read in _send_kernel
