"""Configurations of prefill attention that `scripts/tune attention` has found, by architecture.

What isn't here, `choose_prefill_config` has a rule for.
"""

from __future__ import annotations

from .architecture import Architecture

# (head size, bytes of an element of the queries, whether there is a window) -> PrefillConfig's
# fields: tile, warps, stages, rows, programs.
TUNED: dict[Architecture, dict[tuple[int, int, bool], tuple[int, ...]]] = {
    (9, 0): {
        (64, 2, False): (64, 16, 3, 256, 1),
        (128, 2, False): (64, 16, 3, 256, 1),
        (128, 2, True): (64, 16, 3, 256, 1),
        (256, 2, False): (64, 8, 2, 256, 2),
        (256, 2, True): (64, 8, 2, 256, 2),
    },
}
