"""Which graphs there are, without capturing any; and how they are captured, with a stand-in."""

from __future__ import annotations

import contextlib
import gc
from unittest import mock

import pytest
import torch

from ringcast.executor.gpu.graphs import (
    LARGEST,
    DecodeGraphs,
    batch_sizes,
    capture_graph,
    capture_graphs,
    context_bounds,
    distinct_bounds,
    measure_graphs,
)
from ringcast.kernels.gpu.fused_decode_attention import choose_split_config


def attention(size: int, bound: int):
    """Only one sequence is launched otherwise for other contexts."""
    return choose_split_config(1, 8, bound, 0, 256) if size == 1 else None


def test_bounds_that_are_launched_alike_share_the_longest():
    shape = {1: "few", 2: "few", 3: "many"}
    assert distinct_bounds(1, [1, 2, 3], lambda size, bound: shape[bound]) == {1: 2, 2: 2, 3: 3}


def test_a_model_has_fewer_graphs_than_sizes_times_bounds():
    sizes, bounds = batch_sizes(256), context_bounds(40960)
    kinds = list(DecodeGraphs(sizes, bounds, attention).kinds())
    assert len(kinds) == len(set(kinds)) == 38
    assert len(sizes) * (len(bounds) + 1) == 76
    assert kinds[0] == (256, 40961, True)  # the largest first
    assert kinds[-2:] == [(1, 40961, True), (1, 40961, False)]


def test_without_whole_ones_there_is_one_for_each_bound():
    sizes, bounds = batch_sizes(256), context_bounds(40960)
    whole = [kind[:2] for kind in DecodeGraphs(sizes, bounds, attention).kinds() if kind[2]]
    made = DecodeGraphs(sizes, bounds, attention, fuses=False)
    assert list(made.kinds()) == [(*kind, False) for kind in whole]
    made._graphs = {kind: kind for kind in made.kinds()}
    for size in sizes:
        for bound in bounds:
            found = made.find(size, bound, False)
            assert attention(size, found[1]) == attention(size, bound)


class Graph:
    def __init__(self, kind: tuple[int, int, bool]) -> None:
        self.kind = kind


@pytest.fixture
def graphs() -> DecodeGraphs:
    made = DecodeGraphs(batch_sizes(2000), context_bounds(40960), attention)
    made._graphs = {kind: Graph(kind) for kind in made.kinds()}
    return made


def test_every_step_finds_a_graph_that_is_launched_as_it_would_be(graphs):
    bounds = context_bounds(40960)
    for size in batch_sizes(2000):
        for bound in bounds:
            if size > LARGEST:
                assert graphs.find(size, bound, True) is None
                continue
            found = graphs.find(size, bound, True).kind
            assert (found[0], found[2]) == (size, True)
            assert attention(size, found[1]) == attention(size, bound)
            assert graphs.find(size, bound, False).kind == (size, bounds[-1], False)


@pytest.fixture
def captured(monkeypatch) -> mock.Mock:
    """What stands for the graph that is captured next."""
    graph = mock.Mock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return graph


def test_nothing_is_collected_while_graphs_are_captured(captured):
    seen, told = [], []

    def run(kind):
        seen.append((kind, gc.isenabled()))

    made = capture_graphs([7, 5], run, mock.Mock(), lambda *step: told.append(step))
    assert list(made) == [7, 5]
    measure_graphs([(lambda: run(3), 1)], mock.Mock(), lambda: 0)
    assert seen == [(7, False), (5, False), (3, False)]
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert gc.isenabled()


def test_what_breaks_a_capture_is_told(captured):
    """Not that the capture can't be ended then."""
    captured.capture_end.side_effect = RuntimeError("operation failed due to a previous error")

    def launch():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        capture_graph(launch, mock.Mock(), (0, 1))
    with pytest.raises(RuntimeError, match="a previous error"):
        capture_graph(lambda: None, mock.Mock(), (0, 1))
