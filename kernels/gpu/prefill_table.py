"""Configurations of prefill attention that `scripts/tune attention` has found, by architecture.

What isn't here, `choose_prefill_config` has a rule for.
"""

from __future__ import annotations

from .architecture import Architecture

# Head size, bytes of an element of the queries, whether there is a window, whether keys can come by
# descriptors.
Key = tuple[int, int, bool, bool]
# PrefillConfig's: tile, warps, stages, rows, programs, descriptors.
Fields = tuple[int, int, int, int, int, bool]
TUNED: dict[Architecture, dict[Key, Fields]] = {
    (9, 0): {
        (64, 2, False, False): (64, 16, 3, 256, 1, False),
        (64, 2, False, True): (64, 4, 3, 256, 4, True),
        (128, 2, False, False): (64, 16, 3, 256, 1, False),
        (128, 2, False, True): (64, 4, 3, 256, 4, True),
        (128, 2, True, False): (64, 16, 3, 256, 1, False),
        (128, 2, True, True): (64, 4, 3, 256, 4, True),
        (256, 2, False, False): (64, 8, 2, 256, 2, False),
        (256, 2, False, True): (64, 8, 2, 256, 2, False),
        (256, 2, True, False): (64, 8, 2, 256, 2, False),
        (256, 2, True, True): (64, 8, 2, 256, 2, False),
    },
}
