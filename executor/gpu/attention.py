"""A layer's attention on a CUDA device, from its queries, keys and values to what the output
product takes: QK-norm, rotation, the write into the KV cache, and attention itself
(kernels/gpu/).

Legend: T tokens, Q = query heads x head size, N = outputs of the product before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...kernels.gpu.architecture import architecture_of
from ...kernels.gpu.decode_attention import decode_attention, decode_scratch
from ...kernels.gpu.decode_plan import DecodeConfig, choose_decode_config
from ...kernels.gpu.fused_decode_attention import (
    SplitConfig,
    choose_split_config,
    fused_decode_attention,
)
from ...kernels.gpu.prefill_attention import prefill_attention
from ...kernels.gpu.rope import rope_and_cache
from ..models.llama import LlamaConfig
from .batch import GpuBatch
from .rope_tables import RopeTable, make_rope_table
from .weight_reader import Layer

if TYPE_CHECKING:
    from .work import Work


def decode_config(c: LlamaConfig, cache_dtype: torch.dtype, device: torch.device) -> DecodeConfig:
    """How decode attention is launched."""
    itemsize = cache_dtype.itemsize
    return choose_decode_config(c.kv_heads, c.head_size, itemsize, architecture_of(device))


def launches_of(
    size: int, bound: int, config: LlamaConfig, cache_dtype: torch.dtype
) -> tuple[SplitConfig, ...]:
    """What attention's launches of a decode step take from its size and the bound of its contexts:
    of one sequence, how it is split for each window. That of more is launched alike for any.
    """
    row_bytes = config.head_size * cache_dtype.itemsize
    windows = sorted(set(config.windows)) if size == 1 else []
    return tuple(
        choose_split_config(1, config.kv_heads, bound, window, row_bytes) for window in windows
    )


class Attention:
    """Of all layers. cache: as GpuDecoder.set_cache makes it; it comes before the first run."""

    def __init__(
        self,
        config: LlamaConfig,
        batch: GpuBatch,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        c = self._config = config
        self._batch = batch
        self.cache: torch.Tensor
        self._q_TQ = torch.zeros(
            batch.max_tokens, c.heads * c.head_size, dtype=dtype, device=device
        )
        workers = batch.decode.workers
        self._scratch = decode_scratch(batch.capacity, c.heads, c.head_size, workers, device)
        self._ropes: list[RopeTable] = [
            make_rope_table(each, c.head_size, max_model_len, device) for each in c.ropes
        ]

    def run(
        self, layer: Layer, work: Work, qkv_TN: torch.Tensor, out_TQ: torch.Tensor, pdl: bool
    ) -> None:
        """Of a step of any number of tokens."""
        c, batch, tokens, decodes = self._config, self._batch, work.tokens, work.decodes
        q_TQ = self._q_TQ[:tokens]
        k_cache, v_cache = self.cache[layer.place]
        table = batch.tables_GRB[layer.group]
        rope_and_cache(
            qkv_TN,
            batch.positions_T[:tokens],
            batch.slots_GT[layer.group, :tokens],
            *self._ropes[layer.rope],
            k_cache,
            v_cache,
            q_TQ,
            c.heads,
            c.kv_heads,
            q_weight_D=layer.q_norm,
            k_weight_D=layer.k_norm,
            eps=c.eps,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            pdl=pdl,
        )
        if decodes:
            decode_attention(
                q_TQ[:decodes],
                k_cache,
                v_cache,
                table,
                batch.rows_S[:decodes],
                batch.decode_context_S[:decodes],
                batch.decode_plans[layer.window],
                out_TQ[:decodes],
                self._scratch,
                scale=c.attention_scale,
                kv_heads=c.kv_heads,
                config=batch.decode,
                window=layer.window,
                k_scale=layer.k_scale,
                v_scale=layer.v_scale,
                pdl=pdl,
            )
        if work.tiles is not None:  # after decode attention, which zeroes its padding
            prefill_attention(
                q_TQ,
                k_cache,
                v_cache,
                table,
                batch.rows_S,
                batch.starts_S1,
                batch.context_S,
                work.tiles,
                out_TQ,
                scale=c.attention_scale,
                kv_heads=c.kv_heads,
                window=layer.window,
                k_scale=layer.k_scale,
                v_scale=layer.v_scale,
                pdl=pdl,
            )

    def run_single(
        self, layer: Layer, work: Work, qkv_1N: torch.Tensor, out_1Q: torch.Tensor, pdl: bool
    ) -> None:
        """Of a step of one token, in one launch."""
        c, batch = self._config, self._batch
        fused_decode_attention(
            qkv_1N,
            batch.positions_T[:1],
            batch.slots_GT[layer.group, :1],
            *self._ropes[layer.rope],
            *self.cache[layer.place],
            batch.tables_GRB[layer.group],
            batch.rows_S[:1],
            batch.decode_context_S[:1],
            out_1Q,
            self._scratch,
            heads=c.heads,
            kv_heads=c.kv_heads,
            q_weight_D=layer.q_norm,
            k_weight_D=layer.k_norm,
            eps=c.eps,
            scale=c.attention_scale,
            window=layer.window,
            longest=work.longest,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            pdl=pdl,
        )
