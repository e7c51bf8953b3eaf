"""Plans of decode attention: every tile of every sequence has one worker, and all have as much."""

from __future__ import annotations

import numpy as np
import pytest

from ringcast.kernels.gpu.decode_plan import (
    MOST_PARTS,
    SHORTEST_TOKENS,
    DecodeConfig,
    choose_decode_config,
    plan_decode,
)


def tiles_of(context: int, window: int, tile: int) -> int:
    first = max(context - window, 0) // tile if window else 0
    return max(-(-context // tile) - first, 1)


def work_of(plan: np.ndarray, contexts: list[int], window: int, config: DecodeConfig):
    """(sequence, first tile, tiles) of each worker, as the kernel reads a plan."""
    workers, length = config.workers, int(plan[0])
    first, last = plan[1 : 1 + workers], plan[1 + workers : 1 + 2 * workers]
    starts = plan[1 + 2 * workers :]
    work = []
    for worker in range(workers):
        own = []
        for s in range(first[worker], last[worker]):
            begin = max(worker * length - starts[s], 0)
            tiles = tiles_of(contexts[s], window, config.tile)
            end = min((worker + 1) * length - starts[s], tiles)
            own.append((s, begin, end - begin))
        work.append(own)
    return length, work


@pytest.mark.parametrize("window", [0, 1, 100])
@pytest.mark.parametrize("workers", [1, 2, 7, 66])
def test_each_tile_is_read_once(workers, window):
    config = DecodeConfig(workers, 32, 2, 2)
    rng = np.random.default_rng(workers + window)
    for _ in range(50):
        most = int(rng.choice([70, 500, 5000]))
        contexts = rng.integers(0, most, rng.integers(1, 80)).astype(np.int32)
        plan = plan_decode(contexts, window, config)
        length, work = work_of(plan, contexts.tolist(), window, config)
        seen = sorted(
            (s, begin + tile) for own in work for s, begin, count in own for tile in range(count)
        )
        assert seen == [
            (s, tile)
            for s, context in enumerate(contexts.tolist())
            for tile in range(tiles_of(context, window, 32))
        ]
        assert all(count > 0 for own in work for _, _, count in own)
        assert all(sum(count for _, _, count in own) <= length for own in work)
        # Of one sequence each worker has a piece in one run, and the first of them opens it.
        for s, start in enumerate(plan[1 + 2 * workers :].tolist()):
            numbers = [w for w, own in enumerate(work) if s in [t for t, *_ in own]]
            assert numbers == list(range(start // length, numbers[-1] + 1))
            assert len(numbers) <= MOST_PARTS + 1


def test_workers_have_as_much_as_each_other():
    config = DecodeConfig(66, 32, 2, 2)
    contexts = np.random.default_rng(0).integers(100, 2048, 256).astype(np.int32)
    plan = plan_decode(contexts, 0, config)
    total = sum(tiles_of(context, 0, 32) for context in contexts.tolist())
    assert plan[0] == -(-total // 66)


def test_few_sequences_begin_with_a_worker_each():
    config = DecodeConfig(66, 32, 2, 2)
    plan = plan_decode(np.array([130, 130, 0, 128], np.int32), 0, config)
    assert plan[0] == SHORTEST_TOKENS // 32
    assert plan[1 + 2 * 66 :].tolist() == [0, 8, 16, 20]


def test_one_long_sequence_is_cut_into_no_more_than_can_be_merged():
    config = DecodeConfig(528, 32, 2, 2)
    contexts = [100_000]
    plan = plan_decode(np.array(contexts, np.int32), 0, config)
    _, work = work_of(plan, contexts, 0, config)
    assert sum(len(own) for own in work) <= MOST_PARTS


@pytest.mark.parametrize("head_size", [16, 80, 256, 512])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_a_tile_is_a_power_of_two(head_size, itemsize):
    tile = choose_decode_config(8, head_size, itemsize, None).tile
    assert tile >= 16
    assert tile & (tile - 1) == 0
    assert tile == 16 or tile * head_size * itemsize <= 16384
