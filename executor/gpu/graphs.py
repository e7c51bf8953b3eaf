"""CUDA graphs of decode steps, one for each padded size and bound of the longest context.

    whole     changes, layout, forward pass, logits, sampling, append: a step is one launch. For
              batches whose sampling is plain (Sampler.is_plain)
    forward   up to the logits; sampling follows outside. For the longest bound alone

Only one rank of several knows whether a batch's sampling is plain; the others replay whole graphs
whatever it does. NCCL wants a launch in a graph on all ranks or on none, and in the one that was
captured together. So where there are such launches no graph is whole, and there is a forward graph
for each bound. (Replicas that share experts agree on the bound: lockstep.py.)

How many sequences a step may have more than are in it is what `batch_sizes` leaves between its
numbers; the rest are inert. The bounds are for attention of one sequence, which cuts its context
into splits: a graph keeps its grid, and one made for the longest context would have too many
programs for short ones. Where they make no difference one graph serves all.

A capture may run no kernel for the first time: compiling and loading don't belong there. So
`capture` has every size and bound run once before, with a layer of each kind. The largest graphs
are captured first, so that the smaller ones find room in their pool.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

LARGEST = 1024  # a larger decode step is long enough to hide its launches
BOUNDS = (1024, 8192)
# From the first number on, sizes are multiples of the second.
_STEPS = ((8, 8), (64, 16), (128, 32), (256, 64), (512, 128))
_SMALLEST = (1, 2, 4, 8)

# (size, bound, whole) -> launches of one decode step
Run = Callable[[int, int, bool], None]
# (size, bound) -> what decode attention's launches take from them
Shape = Callable[[int, int], Hashable]
Progress = Callable[[int, int], None]
Kind = TypeVar("Kind", bound=Hashable)


def batch_sizes(most: int) -> list[int]:
    """What decode steps are padded to, up to the first that holds `most` sequences."""
    sizes = [size for size in _SMALLEST if size < 2 * most]
    while sizes[-1] < most:
        multiple = [step for first, step in _STEPS if sizes[-1] >= first][-1]
        sizes.append(sizes[-1] + multiple)
    return sizes


def context_bounds(max_model_len: int) -> list[int]:
    """The last one holds a token more, as a row of the batch does."""
    return [bound for bound in BOUNDS if bound < max_model_len] + [max_model_len + 1]


def distinct_bounds(size: int, bounds: list[int], shape: Shape) -> dict[int, int]:
    """Each bound, and the longest one whose step is launched alike."""
    longest = {shape(size, bound): bound for bound in bounds}
    return {bound: longest[shape(size, bound)] for bound in bounds}


def at_least(numbers: list[int], number: int) -> int:
    """The first of the rising `numbers` that is `number` or more."""
    return numbers[bisect_left(numbers, number)]


def capture_graph(
    launch: Callable[[], None], stream: torch.cuda.Stream, pool: tuple[int, int]
) -> torch.cuda.CUDAGraph:
    """Of what `launch` launches on the stream. Raises what that raises."""
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph: it collects garbage and empties the allocator's cache each time.
    stream.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            launch()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # which says no more than that it is broken
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Nothing may be freed on the device in the middle of a capture."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def capture_graphs(
    kinds: Sequence[Kind],
    run: Callable[[Kind], None],
    stream: torch.cuda.Stream,
    progress: Progress,
) -> dict[Kind, torch.cuda.CUDAGraph]:
    """One of each kind, on the stream on which everything runs. `run` launches a step of a kind;
    its kernels have run before.
    """
    pool, made = torch.cuda.graph_pool_handle(), {}
    with _nothing_collected():
        for done, kind in enumerate(kinds):
            progress(done, len(kinds))
            made[kind] = capture_graph(partial(run, kind), stream, pool)
    progress(len(kinds), len(kinds))
    return made


def measure_graphs(
    like: list[tuple[Callable[[], None], int]],
    stream: torch.cuda.Stream,
    used: Callable[[], int],
) -> int:
    """Bytes that graphs will take. like: what one is captured from, and how many are like it; the
    first of all costs more than each of the others. used: bytes that are in use.
    """
    pool, made, before, total, first = torch.cuda.graph_pool_handle(), [], used(), 0, 0
    with _nothing_collected():
        for launch, count in like:
            made.append(capture_graph(launch, stream, pool))
            now = used()
            each, before = max(now - before, first // 8), now
            first = first or each
            total += each * count
    return total


class DecodeGraphs:
    """shape: two bounds are one to a size for which it says the same of both. fuses: whether there
    are whole ones.
    """

    def __init__(
        self, sizes: list[int], bounds: list[int], shape: Shape, fuses: bool = True
    ) -> None:
        self._fuses = fuses
        self._sizes = [size for size in sizes if size <= LARGEST]
        self._longest = bounds[-1]
        self._bounds = {size: distinct_bounds(size, bounds, shape) for size in self._sizes}
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def kinds(self) -> Iterator[tuple[int, int, bool]]:
        """(size, bound, whole) of every graph, the largest first."""
        for size in reversed(self._sizes):
            for bound in sorted(set(self._bounds[size].values()), reverse=True):
                yield size, bound, self._fuses
            if self._fuses:
                yield size, self._longest, False

    def capture(self, run: Run, stream: torch.cuda.Stream, progress: Progress) -> None:
        """All of them, as capture_graphs."""
        kinds = list(self.kinds())
        self._graphs = capture_graphs(kinds, lambda kind: run(*kind), stream, progress)

    def find(self, size: int, bound: int, whole: bool) -> torch.cuda.CUDAGraph | None:
        """The graph for a padded decode step, or None where there is none: it has too many
        sequences.
        """
        if size not in self._bounds:
            return None
        if self._fuses and not whole:
            return self._graphs[size, self._longest, False]
        assert self._fuses or not whole
        return self._graphs[size, self._bounds[size][bound], whole]
