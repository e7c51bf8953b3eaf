"""The backend that serves everything."""

from __future__ import annotations

from ...kernels.cpu.attention import paged_attention_kernel
from .backend import AttentionBackend, Geometry


class PortableAttention(AttentionBackend):
    name = "portable"
    kernel = paged_attention_kernel

    @staticmethod
    def serves(geometry: Geometry) -> bool:
        return True
