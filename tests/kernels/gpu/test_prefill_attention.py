"""Prefill attention against its reference, and the plan of its tiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES
from kernels.gpu.paged_cache import TOLERANCES, PagedCache, poisoned, randn, random_cache

from ringcast.kernels.gpu.prefill_attention import (
    SPARE_TILES,
    PrefillConfig,
    can_describe,
    choose_prefill_config,
    plan_tiles,
    prefill_attention,
    prefill_attention_reference,
    tile_tokens,
)


def check(
    cache: PagedCache, lengths: list[int], heads: int, dtype: torch.dtype, padding: int = 2, **how
) -> None:
    """`padding` tokens after the last sequence's stay as they were, with room for as many tiles."""
    _, kv_heads, _, head_size = cache.k.shape
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tiles = plan_tiles(np.array(lengths), heads // kv_heads, cache.context_S.cpu().numpy())
    tiles = np.pad(tiles, ((0, 0), (0, padding)), constant_values=-1)
    q = randn(int(starts[-1]) + padding, heads * head_size, dtype=dtype)
    how = {"scale": head_size**-0.5, "kv_heads": kv_heads, **how}
    out, expected = (poisoned(*q.shape, dtype=dtype) for _ in range(2))
    arguments = (*cache[:4], torch.from_numpy(starts).to(DEVICE), cache.context_S)
    prefill_attention(q, *arguments, torch.from_numpy(tiles).to(DEVICE), out, **how)
    prefill_attention_reference(q, *arguments, None, expected, **how)
    torch.testing.assert_close(out, expected, equal_nan=True, **TOLERANCES[dtype])
    assert not expected[: starts[-1]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference(dtype):
    torch.manual_seed(0)
    cache = random_cache([1, 130], 1, 64, 64, dtype)
    check(cache, [1, 90], 2, dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"),
    [(3, 1, 64, 16), (4, 1, 256, 64), (2, 2, 96, 32), (130, 1, 16, 128)],
)
def test_any_heads_and_blocks(heads, kv_heads, head_size, block_size):
    torch.manual_seed(0)
    cache = random_cache([1, 150], kv_heads, head_size, block_size, torch.float16)
    lengths = [1, 3] if heads > 64 else [1, 90]
    check(cache, lengths, heads, torch.float16)


def test_a_chunk_sees_the_prefix_before_it_and_decode_rows_their_context():
    torch.manual_seed(1)
    cache = random_cache([200, 130, 64, 129], 1, 32, 32, torch.float32)
    check(cache, [1, 40, 64, 1], 4, torch.float32)


@pytest.mark.parametrize("window", [1, 7, 64, 100, 1000])
def test_a_window_bounds_what_is_seen(window):
    torch.manual_seed(2)
    cache = random_cache([70, 250], 1, 32, 32, torch.float32)
    config = PrefillConfig(32, 4, 2)
    check(cache, [70, 60], 4, torch.float32, window=window, config=config)


@pytest.mark.parametrize(
    ("head_size", "group", "how"),
    [(64, 3, {}), (32, 2, {"window": 90}), (16, 1, {"soft_cap": 2.0})],
)
def test_whole_tiles_by_descriptors(head_size, group, how):
    """Chunks that begin in the middle of a block, and rows that see no whole tile."""
    torch.manual_seed(9)
    cache = random_cache([230, 64, 50], 2, head_size, 64, torch.float16)
    assert can_describe(cache.k, torch.float16, group)
    assert choose_prefill_config(head_size, 2, "window" in how, True, None).descriptors
    check(cache, [60, 1, 50], 2 * group, torch.float16, **how)


def test_what_no_descriptor_can_describe():
    cache = random_cache([1], 1, 64, 64, torch.float16).k
    assert can_describe(cache, torch.float16, 2)
    assert not can_describe(cache, torch.float16, 128)  # heads of a group
    assert not can_describe(cache[..., :48], torch.float16, 2)
    assert not can_describe(cache[:, :, :32], torch.float16, 2)  # a tile would span blocks
    assert not can_describe(cache, torch.bfloat16, 2)  # to be converted, as 8 bits are
    shifted = torch.zeros(4097, dtype=torch.float16, device=DEVICE)[1:]
    assert not can_describe(shifted.view(1, 1, 64, 64), torch.float16, 2)


@pytest.mark.parametrize("heads", [3, 40])
def test_programs_share_a_tile(heads):
    torch.manual_seed(8)
    cache = random_cache([40, 2], 1, 32, 32, torch.float32)
    check(cache, [20, 2], heads, torch.float32, config=PrefillConfig(32, 4, 2, programs=4))


def test_scores_are_capped():
    torch.manual_seed(3)
    cache = random_cache([90], 1, 32, 32, torch.float32)
    check(cache, [70], 2, torch.float32, scale=4.0, soft_cap=3.0)


def test_padding_sequences_are_skipped():
    torch.manual_seed(4)
    cache = random_cache([20, 0, 33, 0], 1, 32, 16, torch.float32)
    check(cache, [20, 0, 5, 0], 3, torch.float32)


def test_a_tile_past_the_end_of_its_sequence_is_skipped():
    torch.manual_seed(5)
    cache = random_cache([20], 1, 32, 16, torch.float32)
    q = randn(20, 64, dtype=torch.float32)
    out = poisoned(20, 64, dtype=torch.float32)
    starts = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)
    tiles = torch.tensor([[1, 0], [0, 64]], dtype=torch.int32, device=DEVICE)
    prefill_attention(q, *cache[:4], starts, cache.context_S, tiles, out, scale=1.0, kv_heads=1)
    assert out.isnan().all()


def test_a_step_without_tokens_writes_nothing():
    cache = random_cache([0], 1, 32, 16, torch.float32)
    check(cache, [0], 2, torch.float32, padding=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_programs_take_several_tiles_of_many_short_sequences(dtype):
    """In both orders: without descriptors and with them."""
    torch.manual_seed(10)
    lengths = [1, 2, 0, 3] * (SPARE_TILES // 2)
    contexts = [n and n + 5 * i for i, n in enumerate(lengths)]
    cache = random_cache(contexts, 2, 16, 64, dtype)
    assert np.count_nonzero(lengths) > SPARE_TILES + sum(lengths) // tile_tokens(2)
    check(cache, lengths, 4, dtype)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 128, 200])
def test_tiles_cover_each_token_once_and_most_keys_come_first(group):
    lengths, context = np.array([1, 0, 300, 128, 77]), np.array([900, 0, 300, 500, 77])
    (count, *sequence), (_, *first) = plan_tiles(lengths, group, context)
    assert count == len(sequence)
    tokens = tile_tokens(group)
    covered = [
        (s, t)
        for s, f in zip(sequence, first, strict=True)
        for t in range(f, min(f + tokens, lengths[s]))
    ]
    assert sorted(covered) == [(s, t) for s, length in enumerate(lengths) for t in range(length)]
    seen = (context - lengths)[sequence] + np.minimum(np.add(first, tokens), lengths[sequence])
    assert (np.diff(seen) <= 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs more memory than a test may take here")
def test_blocks_beyond_int32_offsets():
    torch.manual_seed(6)
    small = random_cache([100, 65], 2, 64, 64, torch.float16)
    far = (1 << 31) // (2 * 64 * 64) + 1
    shape = (far + len(small.k), *small.k.shape[1:])
    k, v = (torch.empty(shape, dtype=torch.float16, device=DEVICE) for _ in range(2))
    k[far:], v[far:] = small.k, small.v
    tables = torch.where(small.tables_RB < 0, small.tables_RB, small.tables_RB + far)
    check(small._replace(k=k, v=v, tables_RB=tables), [60, 65], 4, torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="minutes under the interpreter")
@pytest.mark.parametrize("window", [0, 512])
def test_long_chunks(window):
    torch.manual_seed(7)
    cache = random_cache([2300, 1, 1025, 777], 2, 128, 64, torch.bfloat16)
    check(cache, [1500, 1, 1025, 33], 8, torch.bfloat16, window=window)


@pytest.mark.slow
def test_kernels_compile_for_hopper_and_fit():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("ahead_of_time.py"))]
    output = subprocess.check_output(command, env=environment, text=True)
    launches = [json.loads(line) for line in output.splitlines()]
    assert len(launches) == 2 * 3 * 4 + 4 * 8 + 4 + 5 * 6 + 4 + 4
    for launch in launches:
        assert launch["shared"] <= 227 * 1024, launch
        assert launch["stack"] <= (64 if launch["name"] == "_prefill_kernel" else 0), launch
