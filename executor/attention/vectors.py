"""The backend in vectors."""

from __future__ import annotations

from ...kernels.cpu.vector_attention import vector_attention
from .backend import AttentionBackend, Geometry


class VectorAttention(AttentionBackend):
    name = "vectors"
    kernel = vector_attention

    @staticmethod
    def serves(geometry: Geometry) -> bool:
        return geometry.head_size % 32 == 0 and geometry.block_size % 16 == 0
