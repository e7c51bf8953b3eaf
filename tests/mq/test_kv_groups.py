"""How layers are dealt into groups, and the arithmetic of what sequences need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.mq.config import EngineConfig
from ringcast.mq.kv_groups import (
    blocks_for,
    deal,
    longest_chunk,
    longest_sequence,
    most_blocks,
    spec_of,
    window_of,
)
from ringcast.mq.messages import FullAttentionSpec, SlidingWindowSpec


def test_layers_of_one_kind_are_one_group():
    assert deal([0, 0, 0]) == [(FullAttentionSpec(), [0, 1, 2])]
    assert deal([7, 7]) == [(SlidingWindowSpec(7), [0, 1])]


def test_gemma_s_layers():
    windows = [512 if (i + 1) % 6 else 0 for i in range(18)]
    groups = deal(windows)
    assert [window_of(group.spec) for group in groups] == [0] + [512] * 5
    assert [len(group.layers) for group in groups] == [3] * 6
    assert groups[0].layers == [5, 11, 17]


@given(st.lists(st.sampled_from([0, 4, 9]), min_size=1, max_size=30))
def test_every_layer_is_in_one_group_of_its_kind(windows):
    groups = deal(windows)
    assert sorted(layer for group in groups for layer in group.layers) == [*range(len(windows))]
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {window_of(group.spec)}
    size = max(len(group.layers) for group in groups)
    assert size == min(windows.count(window) for window in {*windows})


@pytest.mark.parametrize(
    ("options", "longest"), [({}, 2048), ({"long_prefill_token_threshold": 9}, 9)]
)
def test_the_longest_chunk(options, longest):
    assert longest_chunk(EngineConfig(max_num_batched_tokens=2048, **options)) == longest


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 9), st.integers(0, 200))
def test_a_window_and_a_chunk_lie_in_so_many_blocks(window, chunk, block_size, start):
    first, last = max(0, start - window + 1), start + chunk - 1
    touched = last // block_size - first // block_size + 1
    assert touched <= most_blocks(spec_of(window), chunk, block_size)


@given(
    st.lists(st.sampled_from([0, 3, 30]), min_size=1, max_size=4),
    st.integers(0, 300),
    st.integers(1, 20),
    st.integers(1, 9),
)
def test_the_longest_sequence_is_the_longest(windows, blocks, chunk, block_size):
    specs = [spec_of(window) for window in windows]
    longest = longest_sequence(specs, blocks, chunk, block_size)
    assert blocks_for(specs, longest, chunk, block_size) <= blocks
    if longest < 1 << 30:
        assert blocks_for(specs, longest + 1, chunk, block_size) > blocks
    if windows == [0]:
        assert longest == blocks * block_size
