"""Plans of a mixture's products that `scripts/tune experts` has found, by architecture.

Where there is none, `choose_plan` has a rule.
"""

from __future__ import annotations

from .architecture import Architecture

Fields = tuple[int, int, int, int]

# How many tokens an expert has on average, at most (the last one: or more) -> ExpertPlan's fields:
# rows, and of gate_up and down outputs, block, warps, stages.
TUNED: dict[Architecture, dict[float, tuple[int, Fields, Fields]]] = {
    (9, 0): {
        0.5: (16, (64, 128, 4, 5), (64, 256, 4, 4)),
        12: (16, (64, 128, 4, 5), (128, 128, 4, 4)),
        32: (32, (64, 128, 4, 5), (128, 128, 4, 3)),
        96: (64, (128, 64, 4, 5), (128, 64, 4, 4)),
        512: (128, (128, 64, 8, 4), (256, 64, 8, 4)),
    },
}
