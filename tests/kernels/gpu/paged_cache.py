"""A paged cache with random contents for tests, and what every attention kernel must survive in it:
NaN in each slot that no sequence uses, blocks in random order, tables wider than needed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from kernels.gpu.devices import DEVICE


class PagedCache(NamedTuple):
    """Sequences of the given contexts. rows_S are batch rows in another order; -1 for padding."""

    k: torch.Tensor
    v: torch.Tensor
    tables_RB: torch.Tensor
    rows_S: torch.Tensor
    context_S: torch.Tensor


def random_cache(
    contexts: list[int], kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> PagedCache:
    """Draws from torch's global generator. The null block and unused slots are NaN."""
    needed = [-(-context // block_size) for context in contexts]
    num_blocks = 1 + sum(needed) + 2
    shape = (2, num_blocks, kv_heads, block_size, head_size)
    kv = torch.full(shape, float("nan"), dtype=dtype)
    order = (torch.randperm(num_blocks - 1) + 1).int()
    rows = torch.randperm(len(contexts) + 1)[: len(contexts)].int()
    tables = torch.full((len(contexts) + 1, max(needed) + 3), -1, dtype=torch.int32)
    taken = 0
    for s, context in enumerate(contexts):
        blocks = order[taken : taken + needed[s]]
        taken += needed[s]
        tables[rows[s], : needed[s]] = blocks
        for token in range(context):
            block = blocks[token // block_size]
            kv[:, block, :, token % block_size] = torch.randn(2, kv_heads, head_size).to(dtype)
        if not context:
            rows[s] = -1
    k, v = kv.to(DEVICE)
    context_S = torch.tensor(contexts, dtype=torch.int32)
    return PagedCache(k, v, tables.to(DEVICE), rows.to(DEVICE), context_S.to(DEVICE))


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """What an output buffer holds before the kernel: NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers, drawn on the host so that they are the same on any device."""
    return torch.randn(*shape).to(DEVICE, dtype)


TOLERANCES = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
