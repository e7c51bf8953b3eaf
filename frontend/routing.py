"""Which replica a request goes to: the one that has least to do, as far as its client knows.

A replica's score is `4 x waiting + running`, in choices (a request with n = 2 counts twice), the
smallest wins, and of equals the next one in turn, from where the client's number puts it. What is
known comes from two sides:

    published   by the replicas, through the coordinator: what waits and runs there, of all clients,
                and how much of that is ours. It is late by some steps and by the coordinator's
                interval.
    own         what we have sent there and has not ended. It is always true.

The difference between our own and what was published of ours is corrected: choices that the replica
did not know yet count as waiting, so a burst spreads although nobody publishes meanwhile, and they
count as often as there are clients: all see the same, and the others are likely to do the same with
it. Those that have ended since are taken off what runs. Without anything published our own are all
that counts, each as waiting.

By prefix, a replica that has had blocks of the prompt's beginning (prefix_memory.py) has a better
score: BLOCKS_PER_POINT of them are worth a running choice, so all that is looked at is worth
several waiting requests, and no more. A replica that has a popular beginning and too much to do is
passed over, and then another one has it, too.

A replica that is leaving gets nothing new, and is live until it is lost. One that was removed keeps
its place, as one that is down.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..mq import codec
from ..mq.messages import Generate, Loads
from .prefix_memory import PrefixMemory, block_names

WAITING_WEIGHT = 4
BLOCKS_PER_POINT = 2
_BEYOND = np.iinfo(np.int64).max


class Tracked(Protocol):
    """What the router needs of a request (handle.py). counted: (replica, choices) that it was
    counted as when it was last tracked."""

    counted: tuple[int, int]

    @property
    def engine(self) -> int: ...

    @property
    def num_out(self) -> int: ...


class Router:
    """One client's view of the replicas 0 to num_engines - 1, all of which are up at first. More
    may come (`regain`).

    index: the client's number. policy: "score" or "prefix".
    """

    def __init__(self, num_engines: int, index: int = 0, policy: str = "score") -> None:
        self.num_engines = num_engines
        self._live = np.ones(num_engines, dtype=bool)
        self._leaving = np.zeros(num_engines, dtype=bool)
        self._own = np.zeros(num_engines, dtype=np.int64)
        self._waiting = np.zeros(num_engines, dtype=np.int64)  # as published, likewise the others
        self._running = np.zeros(num_engines, dtype=np.int64)
        self._ours = np.zeros(num_engines, dtype=np.int64)
        self._num_clients = 1
        self._next = index % num_engines
        self._memory = PrefixMemory(num_engines) if policy == "prefix" else None

    @property
    def live(self) -> list[int]:
        return np.flatnonzero(self._live).tolist()

    @property
    def any_open(self) -> bool:
        """Whether there is a replica to `choose`."""
        return bool(self._open.any())

    def is_live(self, engine: int) -> bool:
        return bool(self._live[engine])

    def is_open(self, engine: int) -> bool:
        """Whether it is live, and not leaving."""
        return bool(self._open[engine])

    def num_own(self, engine: int) -> int:
        """Our own choices there."""
        return int(self._own[engine])

    def leave(self, engine: int) -> None:
        self._leaving[engine] = True

    def lose(self, engine: int) -> None:
        """It has died, and what ran there with it."""
        self._grow(engine + 1)
        self._live[engine] = False
        self._waiting[engine] = self._running[engine] = self._ours[engine] = 0
        if self._memory is not None:
            self._memory.forget(engine)

    def forget_prefixes(self) -> None:
        """The replicas forget theirs."""
        if self._memory is not None:
            self._memory.clear()

    def regain(self, engine: int) -> None:
        """It is back, or it is new."""
        self._grow(engine + 1)
        self._live[engine], self._leaving[engine] = True, False

    def publish(self, loads: Loads) -> None:
        """Take what the replicas have said, of those that are live."""
        waiting = codec.ints(loads.waiting)[: self.num_engines]  # there may be one we don't know
        known = np.flatnonzero(self._live[: len(waiting)] & (waiting >= 0))
        self._waiting[known] = waiting[known]
        self._running[known] = codec.ints(loads.running)[known]
        self._num_clients = loads.num_clients
        self._ours[known] = codec.ints(loads.ours)[known]

    def track(self, request: Tracked) -> None:
        """Count a request anew, whatever has happened to it."""
        engine, num = request.counted
        self._own[engine] -= num
        request.counted = request.engine, request.num_out
        self._own[request.engine] += request.num_out

    def choose(self, request: Generate) -> int:
        """The replica for a request that is sent next. One at least must be open."""
        if self.num_engines == 1:
            return 0
        scores = self.scores()
        names: list[bytes] = []
        if self._memory is not None and not request.keep_prompt_tokens:
            names = block_names(request.prompt, request.cache_salt)
            held = self._memory.held(names)
            scores[self._open] -= held[self._open] // BLOCKS_PER_POINT
        engine = self._best(scores)
        if self._memory is not None:
            self._memory.note(names, engine)
        return engine

    def _best(self, scores: NDArray[np.int64]) -> int:
        """Of equals the next in turn."""
        best = np.flatnonzero(scores == scores.min())
        at = int(np.searchsorted(best, self._next))
        engine = int(best[at % len(best)])
        self._next = (engine + 1) % self.num_engines
        return engine

    def scores(self) -> NDArray[np.int64]:
        """Of each replica: the more it has to do, the higher. Those that are down or leave are
        beyond any other."""
        unseen = self._own - self._ours
        waiting = self._waiting + np.maximum(unseen, 0) * self._num_clients
        running = self._running + np.minimum(unseen, 0)
        scores: NDArray[np.int64] = WAITING_WEIGHT * waiting + np.maximum(running, 0)
        scores[~self._open] = _BEYOND
        return scores

    @property
    def _open(self) -> NDArray[np.bool_]:
        return self._live & ~self._leaving

    def _grow(self, num_engines: int) -> None:
        """The new ones are down at first."""
        more = num_engines - self.num_engines
        if more <= 0:
            return
        self.num_engines = num_engines
        self._live, self._leaving = (np.pad(a, (0, more)) for a in (self._live, self._leaving))
        self._own, self._waiting, self._running, self._ours = (
            np.pad(a, (0, more)) for a in (self._own, self._waiting, self._running, self._ours)
        )
        if self._memory is not None:
            self._memory.grow(num_engines)
