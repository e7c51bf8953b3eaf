"""The load balancer of experts that are dealt to ranks (EPLB): now and then it places them anew by
what they have had to do (expert_placement.py), and moves their weights while the engine serves.

All ranks count the same steps, those in which any of them has tokens, so all do the same between
the same two steps:

1. Every step_interval steps the loads of the last window_size steps are noted, and a round begins:
   one layer after the other. A round that is due while one runs is left out.
2. For a layer rank 0 says where everything is to be, and the others hear it: they can't disagree.
3. Each expert that a rank is to have and hasn't goes there from the first rank that has it. It is
   kept beside the layer's weights, which the steps meanwhile still use. When a step has moved
   BYTES_PER_STEP, the rest goes in the next ones.
4. When all of a layer's are there, they are copied into their slots, and from this step on tokens
   go by the new placement: on all ranks, since all have moved equally much.

A weight that has moved has the bits that it had: nothing is read from files, or packed again. What
it costs is memory for one layer's experts of a rank, and a pause of some milliseconds in each step
of a round.

How ranks say and move it is DealtExperts', which differ by device (host_experts.py,
gpu/device_experts.py). What takes time there goes on for some steps, as many on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ..mq.eplb_config import EplbConfig
from .expert_placement import place
from .expert_routes import Routes
from .load_window import LoadWindow

BYTES_PER_STEP = 32 << 20

T = TypeVar("T")
# Yields where a step is to run before it can go on.
Steps = Generator[None, None, T]


class Transfer(NamedTuple):
    """Of one expert, from a slot of rank `root` to one of each of some others, by their rank."""

    root: int
    slot: int
    takers: dict[int, int]


class DealtExperts(Protocol):
    """Those of one rank among all that experts are dealt to. All ranks make the same calls, between
    the same steps. routes: of each layer. expert_bytes: of an expert's weights.
    """

    rank: int
    routes: list[Routes]
    expert_bytes: int

    def note_loads(self) -> Any:
        """How many tokens each expert has had so far, as `loads_between` takes it."""

    def loads_between(self, begin: Any, end: Any) -> Steps[np.ndarray]:
        """Tokens of each expert of each layer, int64 [L, E]. begin: None for the first step."""

    def share(self, values: np.ndarray) -> Steps[None]:
        """Values, int32 [N], become those of rank 0."""

    def send(self, layer: int, transfers: list[Transfer]) -> None:
        """Into what is kept beside the layer's weights."""

    def take(self, layer: int, slots: list[int], placement_RS: np.ndarray) -> None:
        """What was sent for these slots into them, and from now on tokens go by this placement."""

    def waited(self) -> float:
        """Seconds that the device's steps have waited for all of this, as far as it is known and
        has not been told. What the caller has waited itself doesn't count.
        """


class ExpertBalancer:
    """rounds: that are done. moved: experts that came to a rank, in all. seconds: that steps have
    waited for it here, the most in one step among them as most_seconds.
    """

    def __init__(self, config: EplbConfig, experts: DealtExperts) -> None:
        self.rounds = self.moved = 0
        self.seconds = self.most_seconds = 0.0
        self._experts = experts
        self._window = LoadWindow(config.window_size, config.step_interval)
        self._round: Steps[None] | None = None

    def before_step(self) -> int:
        """To be called by all ranks before each step in which any of them has tokens. Returns the
        number of the step, from 1 on, by which replicas of an expert take turns.

        Raises what its experts raise where another rank doesn't come.
        """
        start = time.perf_counter()
        noted = self._window.step(self._experts.note_loads)
        if noted is not None and self._round is None:
            self._round = self._rounds(*noted)
        waited = self._experts.waited()
        if self._round is not None:
            try:
                next(self._round)
            except StopIteration:
                self._round = None
                self.rounds += 1
            waited += time.perf_counter() - start
        self.seconds += waited
        self.most_seconds = max(self.most_seconds, waited)
        return self._window.steps

    def _rounds(self, begin: Any, end: Any) -> Steps[None]:
        experts = self._experts
        loads_LE = yield from experts.loads_between(begin, end)
        for layer, routes in enumerate(experts.routes):
            if layer:
                yield
            placed_RS = routes.placement_RS.copy()
            if not experts.rank:
                placed_RS[:] = place(loads_LE[layer], placed_RS)
            yield from experts.share(placed_RS.reshape(-1))
            yield from self._move(layer, placed_RS)

    def _move(self, layer: int, placed_RS: np.ndarray) -> Steps[None]:
        experts, current_RS = self._experts, self._experts.routes[layer].placement_RS
        transfers = list(_transfers(current_RS, placed_RS))
        most = max(1, BYTES_PER_STEP // experts.expert_bytes)
        for first in range(0, len(transfers), most):
            if first:
                yield
            experts.send(layer, transfers[first : first + most])
        self.moved += sum(len(each.takers) for each in transfers)
        rank = experts.rank
        arrived = np.flatnonzero(~np.isin(placed_RS[rank], current_RS[rank]))
        experts.take(layer, arrived.tolist(), placed_RS)


def _transfers(current_RS: np.ndarray, placed_RS: np.ndarray) -> Iterator[Transfer]:
    """What ranks are to have and haven't. What stays on a rank stays in its slot."""
    for e in np.unique(placed_RS).tolist():
        comes_R = (placed_RS == e).any(1) & ~(current_RS == e).any(1)
        if comes_R.any():
            root, slot = np.argwhere(current_RS == e)[0].tolist()
            takers = np.argwhere((placed_RS == e) & comes_R[:, None])
            yield Transfer(root, slot, dict(takers.tolist()))
