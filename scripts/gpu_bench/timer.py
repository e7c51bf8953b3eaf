"""Microseconds of a launch, of a CUDA graph that holds many."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcast.executor.gpu.graphs import capture_graph

REPLAYED_MICROSECONDS = 250  # of a graph, at least
SAMPLES, REPLAYS = 5, 2
HOPELESS = 1.5  # so many times the best: one sample is enough


class Timer:
    """Of launch(each) for `turns`, one behind the other: a graph has all of them, as often as there
    is need. expected: about so many microseconds. The current stream isn't the default one.
    """

    def __init__(
        self, turns: Sequence[Any], launch: Callable[[Any], object], expected: float
    ) -> None:
        rounds = max(1, round(REPLAYED_MICROSECONDS / (expected * len(turns))))
        self._launches = rounds * len(turns)
        self._launch = launch  # the graph reads what it holds
        launch(turns[0])

        def chain() -> None:
            for each in [*turns] * rounds:
                launch(each)

        # A pool of its own: one whose graphs are all gone can't be captured into again.
        pool = torch.cuda.graph_pool_handle()
        self._graph = capture_graph(chain, torch.cuda.current_stream(), pool)
        self._graph.replay()

    def sample(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            self._graph.replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end) / (REPLAYS * self._launches)


class MeanTimer:
    """The geometric mean of several, so that each counts by what is gained of it."""

    def __init__(self, timers: Sequence[Timer]) -> None:
        self._timers = timers

    def sample(self) -> float:
        return statistics.geometric_mean(timer.sample() for timer in self._timers)


def median(timer: Timer | MeanTimer, best: float = float("inf")) -> float:
    """Of some samples, or what one says if that is hopeless beside the best."""
    taken = [timer.sample()]
    while taken[0] <= HOPELESS * best and len(taken) < SAMPLES:
        taken.append(timer.sample())
    return statistics.median(taken)
