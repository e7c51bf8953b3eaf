"""What a scheduler publishes of its model's experts, as its workers have counted it.

A few numbers only: a table of layers and experts has thousands, of which each would be a series of
its own in every scrape, and statistics travel in small packets (actors/control.py).
"""

from __future__ import annotations

import numpy as np

from ...mq.messages import ExpertLoads


class ExpertTotals:
    """last: what was heard last, None before."""

    def __init__(self) -> None:
        self.last: ExpertLoads | None = None
        self._balancedness: float | None = None

    def take(self, loads: ExpertLoads) -> None:
        self.last = loads
        if loads.balancedness is not None:
            self._balancedness = loads.balancedness

    def statistics(self) -> dict[str, float]:
        """Of a mixture: expert_tokens counts a token once for each expert that it went to, of all
        layers together. expert_skew is how many times the mean the hottest expert of a layer has
        had, averaged over the layers; hottest_layer, hottest_expert and hottest_skew are where it
        is most.
        """
        loads = self.last
        if loads is None:
            return {}
        tokens_LE = np.frombuffer(loads.tokens, np.int64).reshape(len(loads.layers), -1)
        skew_L = tokens_LE.max(1) / np.maximum(tokens_LE.mean(1), 1e-9)
        hottest = int(skew_L.argmax())
        values: dict[str, float] = {
            "expert_tokens": int(tokens_LE.sum()),
            "expert_skew": float(skew_L.mean()),
            "hottest_layer": loads.layers[hottest],
            "hottest_expert": int(tokens_LE[hottest].argmax()),
            "hottest_skew": float(skew_L[hottest]),
            "eplb_rounds": loads.rounds,
            "eplb_moved_experts": loads.moved,
            "eplb_seconds": loads.seconds,
            "eplb_most_seconds": loads.most_seconds,
        }
        if self._balancedness is not None:
            values["expert_balancedness"] = self._balancedness
        return values
