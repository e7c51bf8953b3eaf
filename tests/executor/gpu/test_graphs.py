"""Which graphs there are, without capturing any."""

from __future__ import annotations

import pytest

from ringcast.executor.gpu.graphs import (
    LARGEST,
    DecodeGraphs,
    batch_sizes,
    context_bounds,
    distinct_bounds,
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
def graphs(monkeypatch) -> DecodeGraphs:
    made = DecodeGraphs(batch_sizes(2000), context_bounds(40960), attention)
    monkeypatch.setattr(made, "capture_one", lambda run, kind, stream: Graph(kind))
    made.capture(lambda *kind: None, None, lambda *step: None)
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
