"""Attention backends over the paged KV cache, found through the registry here."""

from __future__ import annotations

import importlib

from .backend import AttentionBackend, Geometry

# In order of preference; the first that can serve a geometry is taken.
BACKENDS = {
    "tiles": "ringcast.executor.attention.tiles:TileAttention",
    "vectors": "ringcast.executor.attention.vectors:VectorAttention",
    "portable": "ringcast.executor.attention.portable:PortableAttention",
}


def choose_backend(geometry: Geometry) -> type[AttentionBackend]:
    for target in BACKENDS.values():
        module, _, name = target.partition(":")
        backend: type[AttentionBackend] = getattr(importlib.import_module(module), name)
        if backend.serves(geometry):
            return backend
    raise AssertionError(f"no attention backend for {geometry}")


__all__ = ["BACKENDS", "AttentionBackend", "Geometry", "choose_backend"]
