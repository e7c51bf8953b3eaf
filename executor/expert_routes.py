"""Where a rank sends the tokens of one layer's experts: the tables that kernels read
(dispatch_kernel of kernels/cpu/experts.py, route of kernels/gpu/expert_routing.py).
"""

from __future__ import annotations

import numpy as np


class Routes:
    """placement: the expert of each slot of each rank (expert_placement.py). counts: replicas of
    each expert. places: the slot of each replica on this rank, in the order of ranks; -1 for those
    of others.

    The tables stay where they are: operations are bound to them.
    """

    def __init__(self, num_experts: int, placement_RS: np.ndarray, rank: int) -> None:
        self._rank = rank
        self.counts_E = np.zeros(num_experts, np.int32)
        self.places_ER = np.zeros((num_experts, len(placement_RS)), np.int32)
        self.take(placement_RS)

    def take(self, placement_RS: np.ndarray) -> None:
        """Between two steps."""
        self.placement_RS = placement_RS
        self.counts_E[:] = np.bincount(placement_RS.ravel(), minlength=len(self.counts_E))
        self.places_ER[:] = -1
        for slot, e in enumerate(placement_RS[self._rank]):
            replica = (placement_RS[: self._rank] == e).sum()
            self.places_ER[e, replica] = slot
