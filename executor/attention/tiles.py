"""The backend on matrix tiles."""

from __future__ import annotations

import torch

from ...kernels.cpu import tiles
from ...kernels.cpu.tile_attention import CONFIGURATIONS, tile_attention
from .backend import AttentionBackend, Geometry


class TileAttention(AttentionBackend):
    name = "tiles"
    kernel = tile_attention
    pair = 2
    constants = {"configurations": CONFIGURATIONS}  # noqa: RUF012 - declared ClassVar in the base class

    @staticmethod
    def serves(geometry: Geometry) -> bool:
        fits = geometry.head_size % 32 == 0 and geometry.block_size % 16 == 0
        types = {geometry.dtype, geometry.cache_dtype}
        return fits and types == {torch.bfloat16} and tiles.available()
