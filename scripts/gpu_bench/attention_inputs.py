"""Paged caches and launches of attention, as benchmarks and `scripts/tune attention` have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from attention_space import Model

from ringcast.kernels.gpu.decode_attention import decode_attention, decode_scratch
from ringcast.kernels.gpu.decode_plan import DecodeConfig, plan_decode
from ringcast.kernels.gpu.prefill_attention import PrefillConfig, plan_tiles, prefill_attention

# Bytes of K and V that the launches of a graph go over, several times the L2.
ROTATED = 1 << 29
LAUNCHES = 48
TABLE_PADDED_TO = 16  # as the engine does, so that tables of any width are launched alike


class Caches(NamedTuple):
    """K and V of several layers, `[layers, 2, blocks, kv_heads, block_size, D]`, and whose."""

    layers: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    context: torch.Tensor

    @property
    def contexts(self) -> np.ndarray:
        return self.context.cpu().numpy()


def make_caches(
    contexts: np.ndarray,
    kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cuda",
    layers: int = 0,
) -> Caches:
    """layers: 0 for as many as go over ROTATED bytes, 3 at least. What no sequence uses is NaN."""
    blocks = -(-contexts // block_size)
    token_bytes = 2 * kv_heads * head_size * dtype.itemsize
    layers = layers or int(np.clip(ROTATED // (contexts.sum() * token_bytes), 3, LAUNCHES))
    order = torch.randperm(int(blocks.sum()), dtype=torch.int32) + 1
    width = -(-int(blocks.max()) // TABLE_PADDED_TO) * TABLE_PADDED_TO
    tables = torch.zeros(len(contexts), width, dtype=torch.int32)
    wide = dtype if dtype.itemsize > 1 else torch.float16
    shape = (layers, 2, len(order) + 1, kv_heads, block_size, head_size)
    kv = torch.randn(shape, device=device, dtype=wide)
    kv[:, :, 0] = float("nan")
    for row, (number, end) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
        tables[row, :number] = order[end - number : end]
        if number and contexts[row] % block_size:
            kv[:, :, order[end - 1], :, contexts[row] % block_size :] = float("nan")
    return Caches(
        kv.to(dtype),
        tables.to(device),
        torch.arange(len(contexts), dtype=torch.int32, device=device),
        torch.from_numpy(contexts.astype(np.int32)).to(device),
    )


def contexts_of(shape: str) -> tuple[np.ndarray, np.ndarray]:
    """Contexts and query tokens of SEQUENCESxTOKENS[+CACHED]; `xmixed`: contexts from 100 to 2048,
    of one query token each."""
    sequences, _, tokens = shape.partition("x")
    if tokens == "mixed":
        contexts = np.random.default_rng(0).integers(100, 2049, int(sequences))
        return contexts, np.ones_like(contexts)
    length, _, prefix = tokens.partition("+")
    lengths = np.full(int(sequences), int(length))
    return lengths + int(prefix or 0), lengths


class Decode(NamedTuple):
    """Inputs of decode attention; the model's window is that of all layers."""

    model: Model
    caches: Caches
    q: torch.Tensor
    out: torch.Tensor

    def launcher(self, config: DecodeConfig, pdl: bool) -> Callable[[int], object]:
        """Makes the launch of a layer."""
        m, device, context = self.model, self.q.device, self.caches.contexts
        scratch = decode_scratch(len(self.q), m.heads, m.head_size, config.workers, device)
        plan = torch.from_numpy(plan_decode(context, m.window, config)).to(device)
        rest = (*self.caches[1:], plan, self.out, scratch)
        how: dict[str, Any] = {**scaled(m), "config": config, "pdl": pdl}
        return lambda layer: decode_attention(self.q, *self.caches.layers[layer], *rest, **how)


class Prefill(NamedTuple):
    """Inputs of prefill attention. lengths: query tokens of each sequence."""

    model: Model
    caches: Caches
    lengths: np.ndarray
    starts: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor

    def launcher(self, config: PrefillConfig, pdl: bool) -> Callable[[int], object]:
        m, caches = self.model, self.caches
        group = m.heads // m.kv_heads
        tiles = plan_tiles(self.lengths, group, caches.contexts, config.rows)
        on_device = torch.from_numpy(tiles).to(self.q.device)
        rest = (*caches[1:3], self.starts, caches.context, on_device, self.out)
        how: dict[str, Any] = {**scaled(m), "config": config, "pdl": pdl}
        return lambda layer: prefill_attention(self.q, *caches.layers[layer], *rest, **how)


def make_decode(model: Model, caches: Caches, dtype: torch.dtype) -> Decode:
    q = queries(model, len(caches.rows), dtype, caches)
    return Decode(model, caches, q, torch.empty_like(q))


def make_prefill(model: Model, caches: Caches, lengths: np.ndarray, dtype: torch.dtype) -> Prefill:
    q = queries(model, int(lengths.sum()), dtype, caches)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    on_device = torch.from_numpy(starts).to(q.device)
    return Prefill(model, caches, lengths, on_device, q, torch.empty_like(q))


def queries(model: Model, tokens: int, dtype: torch.dtype, caches: Caches) -> torch.Tensor:
    size = model.heads * model.head_size
    return torch.randn(tokens, size, device=caches.layers.device, dtype=dtype)


def scaled(model: Model) -> dict[str, Any]:
    """What both kernels take of a model."""
    window = {"window": model.window, "kv_heads": model.kv_heads}
    return {"scale": model.head_size**-0.5, **window}


def pairs(contexts: np.ndarray, lengths: np.ndarray, window: int) -> int:
    """Queries by the keys they see."""
    total = 0
    for context, length in zip(contexts.tolist(), lengths.tolist(), strict=True):
        seen = np.arange(context - length + 1, context + 1)
        total += int(np.minimum(seen, window).sum() if window else seen.sum())
    return total
