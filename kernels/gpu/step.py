"""A step around its forward pass: what changes in the batch before it, where its tokens are, and
the tokens sampled after it.

Legend: R rows of the batch, L tokens of a row, G groups of layers, B blocks of a row, S sequences
of the step, T its tokens, N sampled sequences.

Changes come as runs in one int32 array that the host sends: changes[0] runs, from changes[1] on,
each of RUN_FIELDS numbers: table, row, column, source, length. A run copies changes[source :
source + length] to a row from a column on: of the tokens (table 0), or of group g's block table
(table 1 + g). No two runs of an array write the same place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

RUN_FIELDS = 5
RUN_PROGRAMS = 64
CHUNK = 1024  # numbers of a run, or tokens of a sequence, that one program has at a time
MAX_CHUNKS = 16
NULL_SLOT = -1


def apply_changes_reference(
    changes: torch.Tensor,
    tokens_RL: torch.Tensor,
    tables_GRB: torch.Tensor,
    *,
    num_runs: int = RUN_PROGRAMS,
    longest: int = 1,
    pdl: bool = False,
) -> None:
    count, first = changes[:2].tolist()
    for run in range(count):
        at = first + run * RUN_FIELDS
        table, row, column, source, length = changes[at : at + RUN_FIELDS].tolist()
        target = tables_GRB[table - 1] if table else tokens_RL
        target[row, column : column + length] = changes[source : source + length]


def apply_changes(
    changes: torch.Tensor,
    tokens_RL: torch.Tensor,
    tables_GRB: torch.Tensor,
    *,
    num_runs: int = RUN_PROGRAMS,
    longest: int = 1,
    pdl: bool = False,
) -> None:
    """Apply the runs that `changes` holds when the kernel runs.

    num_runs, longest: about how many there are and how long, for the size of the grid; any number
    of any length is applied.
    """
    chunks = min(triton.cdiv(longest, CHUNK), MAX_CHUNKS)
    _apply_changes_kernel[(min(num_runs, RUN_PROGRAMS), chunks)](
        changes,
        tokens_RL,
        tables_GRB,
        tokens_RL.stride(0),
        tables_GRB.stride(0),
        tables_GRB.stride(1),
        FIELDS=RUN_FIELDS,
        CHUNK=CHUNK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["row_tokens", "group_blocks", "row_blocks"])
def _apply_changes_kernel(
    changes,
    tokens,
    tables,
    row_tokens,
    group_blocks,
    row_blocks,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(changes)
    runs = changes + tl.load(changes + 1)
    run = tl.program_id(0)
    while run < count:
        table = tl.load(runs + run * FIELDS)
        row = tl.load(runs + run * FIELDS + 1).to(tl.int64)
        column = tl.load(runs + run * FIELDS + 2)
        source = tl.load(runs + run * FIELDS + 3)
        length = tl.load(runs + run * FIELDS + 4)
        in_tables = (table - 1).to(tl.int64) * group_blocks + row * row_blocks
        first = tl.program_id(1) * CHUNK
        while first < length:
            i = first + tl.arange(0, CHUNK)
            inside = i < length
            values = tl.load(changes + source + i, mask=inside)
            tl.store(tokens + row * row_tokens + column + i, values, mask=inside & (table == 0))
            tl.store(tables + in_tables + column + i, values, mask=inside & (table > 0))
            first += tl.num_programs(1) * CHUNK
        run += tl.num_programs(0)


def lay_out_tokens_reference(
    tokens_RL: torch.Tensor,
    tables_GRB: torch.Tensor,
    rows_S: torch.Tensor,
    starts_S1: torch.Tensor,
    context_S: torch.Tensor,
    token_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    slots_GT: torch.Tensor,
    block_size: int,
    *,
    longest: int = 1,
    pdl: bool = False,
) -> None:
    token_ids_T.zero_()
    positions_T.zero_()
    slots_GT.fill_(NULL_SLOT)
    for s, (row, context) in enumerate(zip(rows_S.tolist(), context_S.tolist(), strict=True)):
        start, end = starts_S1[s : s + 2].tolist()
        if row >= 0:
            places = torch.arange(context - (end - start), context, device=rows_S.device)
            token_ids_T[start:end] = tokens_RL[row, places]
            positions_T[start:end] = places.int()
            blocks = tables_GRB[:, row, places // block_size]
            slots_GT[:, start:end] = blocks * block_size + (places % block_size).int()


def lay_out_tokens(
    tokens_RL: torch.Tensor,
    tables_GRB: torch.Tensor,
    rows_S: torch.Tensor,
    starts_S1: torch.Tensor,
    context_S: torch.Tensor,
    token_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    slots_GT: torch.Tensor,
    block_size: int,
    *,
    longest: int = 1,
    pdl: bool = False,
) -> None:
    """Where the step's tokens are: ids, positions and, for each group, slots (block * block_size +
    offset).

    Sequence s computes the last starts[s + 1] - starts[s] of its first context[s] tokens. Tokens of
    a sequence with row -1, and those from starts[S] on, fewer than CHUNK, are padding: id 0,
    position 0, slot -1. longest: tokens of one sequence at most.
    """
    sequences, groups = rows_S.shape[0], tables_GRB.shape[0]
    _lay_out_tokens_kernel[(sequences + 1, triton.cdiv(longest, CHUNK))](
        tokens_RL,
        tables_GRB,
        rows_S,
        starts_S1,
        context_S,
        token_ids_T,
        positions_T,
        slots_GT,
        sequences,
        token_ids_T.shape[0],
        tokens_RL.stride(0),
        tables_GRB.stride(0),
        tables_GRB.stride(1),
        slots_GT.stride(0),
        GROUPS=groups,
        BLOCK_SIZE=block_size,
        CHUNK=CHUNK if longest > 1 else 64,
        PDL=pdl,
        num_warps=4 if longest > 1 else 1,
        launch_pdl=pdl,
    )


@triton.jit(
    do_not_specialize=[
        "sequences",
        "num_tokens",
        "row_tokens",
        "group_blocks",
        "row_blocks",
        "group_slots",
    ]
)
def _lay_out_tokens_kernel(
    tokens,
    tables,
    rows,
    starts,
    context,
    token_ids,
    positions,
    slots,
    sequences,
    num_tokens,
    row_tokens,
    group_blocks,
    row_blocks,
    group_slots,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0)
    real = sequence < sequences
    start = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1, mask=real, other=num_tokens)
    row = tl.load(rows + sequence, mask=real, other=-1).to(tl.int64)
    after = tl.load(context + sequence, mask=real, other=0)
    t = start + tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = t < end
    known = inside & (row >= 0)
    position = tl.where(known, after - end + t, 0)
    ids = tl.load(tokens + row * row_tokens + position, mask=known, other=0)
    tl.store(token_ids + t, ids, mask=inside)
    tl.store(positions + t, position, mask=inside)
    for group in tl.static_range(GROUPS):
        table = tables + group * group_blocks.to(tl.int64) + row * row_blocks
        block = tl.load(table + position // BLOCK_SIZE, mask=known, other=0)
        slot = tl.where(known, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slots + group * group_slots + t, slot, mask=inside)


def append_tokens_reference(
    tokens_RL: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
    sampled_N: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    real = rows_N >= 0
    tokens_RL[rows_N[real].long(), positions_N[real].long()] = sampled_N[real]


def append_tokens(
    tokens_RL: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
    sampled_N: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """tokens[rows[n], positions[n]] = sampled[n], where rows[n] isn't -1."""
    count = rows_N.shape[0]
    _append_tokens_kernel[(triton.cdiv(count, 128),)](
        tokens_RL,
        rows_N,
        positions_N,
        sampled_N,
        count,
        tokens_RL.stride(0),
        BLOCK=128,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["count", "row_tokens"])
def _append_tokens_kernel(
    tokens,
    rows,
    positions,
    sampled,
    count,
    row_tokens,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + n, mask=n < count, other=-1).to(tl.int64)
    position = tl.load(positions + n, mask=row >= 0, other=0)
    token = tl.load(sampled + n, mask=row >= 0, other=0)
    tl.store(tokens + row * row_tokens + position, token, mask=row >= 0)
