"""Which graphs there are of steps with prompts, and what they are captured from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from executor.gpu.conftest import MODELS, TwoRunners, random_tokens

from ringcast.executor.gpu.batch import Step
from ringcast.executor.gpu.mixed_graphs import Mixed, MixedGraphs, lay_out_tiles, token_counts
from ringcast.kernels.gpu.prefill_attention import tile_tokens
from ringcast.mq.sampling_params import SamplingParams


def step(singles: int, *chunks: int) -> Step:
    lengths = np.array([1] * singles + list(chunks), np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    nothing = np.empty(0, np.int32)
    return Step(
        nothing,
        lengths,
        lengths,
        ends,
        nothing,
        nothing,
        nothing,
        not chunks,
        int(ends[-1]),
        singles,
        1,
        1,
    )


def test_only_steps_that_are_short_on_the_device_have_graphs():
    small, large = 1_200_000_000, 16_000_000_000
    assert token_counts(8192, small)[-1] == 8192
    assert token_counts(5000, small)[-2:] == [4096, 5000]
    assert token_counts(8192, large)[-1] == 512
    assert token_counts(8192, 10**15) == []
    assert token_counts(48, small) == [48]


def test_every_step_finds_the_smallest_graph_that_holds_it():
    graphs = MixedGraphs([64, 96, 128], capacity=256, group=2)
    assert graphs.kind_of(step(0, 64)) == Mixed(64, 0, 2 + 64)
    assert graphs.kind_of(step(1, 64)) == Mixed(96, 96, 2 + 96)
    assert graphs.kind_of(step(2, 100, 26)) == Mixed(128, 128, 2 + 128)
    assert graphs.kind_of(step(2, 100, 27)) is None
    assert MixedGraphs([], 256, 2).kind_of(step(0, 5)) is None
    alike = MixedGraphs([64, 96, 128], capacity=256, group=2, alike=True)
    assert alike.kinds() == [kind for kind in graphs.kinds() if kind.decodes]
    assert alike.kind_of(step(0, 5)) == graphs.kind_of(step(2, 5))
    few = MixedGraphs([1024], capacity=8, group=2)
    assert few.kind_of(step(3, 900)) == Mixed(1024, 8, 9 + 8)
    assert len(set(graphs.kinds())) == 6
    assert graphs.kinds()[0] == Mixed(128, 128, 130)


@pytest.mark.parametrize("group", [1, 2, 7])
def test_there_is_room_for_all_tiles_of_a_step(group):
    rng, capacity = np.random.default_rng(group), 16
    graphs = MixedGraphs([64, 512, 4096], capacity, group)
    for _ in range(200):
        cuts = np.sort(rng.integers(1, 4096, rng.integers(0, capacity)))
        lengths = np.diff(
            np.unique([0, *cuts, rng.integers(cuts[-1] + 1 if len(cuts) else 1, 4097)])
        )
        made = step(0, *lengths.tolist())
        kind, tiles = graphs.kind_of(made), lay_out_tiles(made, group, None)
        assert tiles[0, 0] == tiles.shape[1] - 1 >= -(-lengths.sum() // tile_tokens(group))
        padded = lay_out_tiles(made, group, kind)
        assert padded.shape == (2, kind.tiles)
        assert (padded[:, : tiles.shape[1]] == tiles).all()


class Replayed(MixedGraphs):
    """Runs what a graph is captured from when it is replayed."""

    def __init__(self, runner, *sizes: int) -> None:
        super().__init__(list(sizes), runner._batch.capacity, runner._decoder.head_group)
        self._runner, self.replays = runner, []

    def replay(self, kind: Mixed) -> None:
        decoder = self._runner._decoder
        self.replays.append(kind)
        self._runner._launcher.run_mixed(kind)
        left = self._of(decoder)
        decoder.resume(kind.tokens)
        assert self._of(decoder) == left

    def _of(self, decoder) -> list:
        """What the last layer has left, by its places."""
        return [(each.data_ptr(), each.shape) for each in decoder._left[:2]] + [*decoder._left[2:]]


@pytest.mark.interpreted  # a device has real graphs
@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "llama")],
)
def test_what_graphs_are_captured_from(name: str, pair: Callable[..., TwoRunners]) -> None:
    s = pair(name)
    graphs = s.mine._launcher.mixed_graphs = Replayed(s.mine, 16, 32, 64)
    s.enter(3, random_tokens(3, 15))
    s.run({3: 15})
    s.enter(0, random_tokens(4, 40))
    s.enter(1, random_tokens(5, 2))
    s.launch({0: 20, 1: 2, 3: 1})
    s.launch({0: 20, 1: 1, 3: 1})
    s.read()
    s.read()
    s.run({0: 1, 1: 1, 3: 1})  # a decode step
    assert [(kind.tokens, kind.decodes > 0) for kind in graphs.replays] == [
        (16, False),
        (32, True),
        (32, True),
    ]
    groups = len(s.mine._decoder.groups)
    copied = [s.copy(block) for block in s.blocks[3][:groups]]
    s.enter(2, s.known[3], 16, copied, params=SamplingParams(temperature=0.0, logprobs=2))
    s.enter(4, random_tokens(6, 60), params=SamplingParams(temperature=0.0, prompt_logprobs=1))
    s.run({2: len(s.known[2]) - 16, 4: 30, 3: 1})
    s.run({4: 30, 1: 1})
    assert len(graphs.replays) == 5
    assert len(s.known[4]) == 61
