"""What attention backends share: the cache, the pieces of work of a step, and how layers are bound
to both.

A backend is a kernel and the layout of the cache that it reads. It is asked whether it serves a
geometry, then made once for a model, given the cache, and bound to each layer.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ...kernels.cpu.attention import ROWS, scratch_bytes
from ...kernels.cpu.openmp import Kernel, Launch
from ...kernels.cpu.rope import rope_and_cache
from ..input_batch import InputBatch, Step


class Geometry(NamedTuple):
    """What attention of a model looks like. dtype: of queries and results. layers: of one group,
    whose layers share blocks (mq/kv_groups.py). scale: what products of queries and keys are
    multiplied by.
    """

    dtype: torch.dtype
    cache_dtype: torch.dtype
    layers: int
    kv_heads: int
    group: int  # query heads per key head
    head_size: int
    block_size: int
    scale: float

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers of a group, keys and values."""
        numbers = 2 * self.layers * self.kv_heads * self.head_size * self.block_size
        return numbers * self.cache_dtype.itemsize


class AttentionBackend:
    """Subclasses name the kernel and its needs."""

    name: ClassVar[str]
    kernel: ClassVar[Kernel]
    pair: ClassVar[int] = 1  # see kernels/cpu/rope.py
    constants: ClassVar[dict[str, Any]] = {}  # further arguments of the kernel

    @staticmethod
    def serves(geometry: Geometry) -> bool:
        raise NotImplementedError

    def __init__(
        self, geometry: Geometry, batch: InputBatch, max_model_len: int, num_blocks: int
    ) -> None:
        self._geometry = geometry
        self._batch = batch
        capacity, sequences = len(batch.token_ids), len(batch.context)
        self._capacity = capacity
        pieces = capacity * geometry.group // ROWS + sequences
        self._items = np.zeros(1, np.int64)
        self._item_sequence = np.zeros(pieces, np.int32)
        self._item_row = np.zeros(pieces, np.int32)
        rows = capacity * geometry.group
        self._q = torch.empty(geometry.kv_heads, rows, geometry.head_size, dtype=geometry.dtype)
        self._scratch_bytes, self._width = scratch_bytes(max_model_len, geometry.head_size)
        threads = torch.get_num_threads()
        self._scratch = torch.empty(threads * self._scratch_bytes, dtype=torch.uint8)
        self._head_scratch = torch.empty(threads, geometry.head_size)
        numbers = geometry.kv_heads * geometry.head_size * geometry.block_size
        shape = geometry.layers, 2, num_blocks, numbers
        # Memory is only reserved here: pages become real when they are first written.
        self._cache = torch.empty(shape, dtype=geometry.cache_dtype)

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        source, target = (torch.from_numpy(ids.astype(np.int64)) for ids in (sources, targets))
        self._cache[:, :, target] = self._cache[:, :, source]

    def prepare(self, step: Step) -> None:
        """Cut the step into pieces of at most 16 rows (token, head of a group) of one sequence."""
        pieces = -(-step.lengths * self._geometry.group // ROWS)
        total = int(pieces.sum())
        sequence = np.repeat(np.arange(step.num_sequences, dtype=np.int32), pieces)
        nth = (
            np.arange(total, dtype=np.int32)
            - (np.cumsum(pieces, dtype=np.int32) - pieces)[sequence]
        )
        self._items[0] = total
        self._item_sequence[:total] = sequence
        self._item_row[:total] = nth * ROWS

    def bind(
        self,
        group: int,
        layer: int,
        rows: np.ndarray,
        qkv: torch.Tensor,
        stride: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        window: int,
        out: torch.Tensor,
    ) -> list[Launch]:
        """qkv float32 [tokens, stride] -> out [tokens, kv heads x group x head size], and the
        cache of this layer of the given group of layers.
        """
        geometry, batch = self._geometry, self._batch
        keys, values = self._cache[layer]
        shared = {
            "q": self._q,
            "keys": keys,
            "values": values,
            "capacity": self._capacity,
            "blocks": keys.shape[0],
            "block_size": geometry.block_size,
            "kv_heads": geometry.kv_heads,
            "group": geometry.group,
            "head_size": geometry.head_size,
        }
        q_weight, k_weight = norms or (None, None)
        write = rope_and_cache.bind(
            geometry.dtype,
            geometry.cache_dtype,
            **shared,
            rows=rows,
            qkv=qkv,
            stride=stride,
            cos=cos,
            sin=sin,
            slots=batch.slots[group],
            q_weight=q_weight,
            k_weight=k_weight,
            pair=self.pair,
            scratch=self._head_scratch,
            eps=eps,
        )
        attend = self.kernel.bind(
            geometry.dtype,
            geometry.cache_dtype,
            **shared,
            **self.constants,
            items=self._items,
            item_sequence=self._item_sequence,
            item_row=self._item_row,
            starts=batch.starts,
            context=batch.context,
            rows=batch.rows,
            tables=batch.tables[group],
            table_width=batch.tables.shape[2],
            sequences=len(batch.context),
            out=out,
            out_bytes=out.stride(0) * out.itemsize,
            window=window,
            scratch=self._scratch,
            scratch_bytes=self._scratch_bytes,
            width=self._width,
            scale=geometry.scale,
        )
        return [write, attend]
