"""Configurations of decode attention that `scripts/tune attention` has found, by architecture.

What isn't here, `choose_decode_config` has a rule for.
"""

from __future__ import annotations

from .architecture import Architecture

# (key heads, head size, bytes of an element of the cache) -> DecodeConfig's fields:
# workers, tile, warps, stages.
TUNED: dict[Architecture, dict[tuple[int, int, int], tuple[int, int, int, int]]] = {
    (9, 0): {
        (1, 256, 1): (528, 32, 4, 3),
        (1, 256, 2): (528, 32, 4, 3),
        (3, 64, 1): (176, 32, 2, 3),
        (3, 64, 2): (176, 32, 2, 3),
        (8, 128, 1): (66, 32, 2, 3),
        (8, 128, 2): (66, 32, 2, 3),
    },
}
