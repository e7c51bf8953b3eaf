"""Decode attention against its reference: shapes, windows, soft caps, splits and their merge."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES
from kernels.gpu.paged_cache import TOLERANCES, PagedCache, poisoned, randn, random_cache

from ringcast.kernels.gpu.decode_attention import (
    MAX_PARTS,
    MAX_SPLITS,
    DecodeConfig,
    choose_decode_config,
    decode_attention,
    decode_attention_reference,
    decode_scratch,
)

TWO_SPLITS = DecodeConfig(2, 64, 64, 4, 2)


def check(
    cache: PagedCache,
    heads: int,
    dtype: torch.dtype,
    *,
    config=TWO_SPLITS,
    **how,
) -> None:
    """Runs kernel and reference; the counters must be back at zero, for the next launch."""
    _, kv_heads, _, head_size = cache.k.shape
    sequences = len(cache.context_S)
    q = randn(sequences, heads * head_size, dtype=dtype)
    scratch = decode_scratch(sequences, heads, head_size, DEVICE)
    scratch.parts_PQ.fill_(float("nan"))
    scratch.lse_PH.fill_(float("nan"))
    how = {"scale": head_size**-0.5, "kv_heads": kv_heads, **how}
    out, expected = (poisoned(*q.shape, dtype=dtype) for _ in range(2))
    decode_attention(q, *cache, out, scratch, config=config, **how)
    decode_attention_reference(q, *cache, expected, None, **how)
    torch.testing.assert_close(out, expected, **TOLERANCES[dtype])
    assert not scratch.counters_N.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference(dtype):
    torch.manual_seed(0)
    cache = random_cache([63, 0, 130], 2, 64, 64, dtype)
    check(cache, 4, dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"),
    [(9, 3, 64, 16), (4, 1, 256, 64), (2, 2, 96, 32), (20, 1, 16, 128)],
)
def test_any_heads_and_blocks(heads, kv_heads, head_size, block_size):
    torch.manual_seed(0)
    cache = random_cache([63, 0, 130], kv_heads, head_size, block_size, torch.float16)
    check(cache, heads, torch.float16)


def test_configuration_and_splits_are_chosen_by_itself():
    torch.manual_seed(0)
    cache = random_cache([1, 170], 1, 64, 64, torch.float32)
    check(cache, 2, torch.float32, config=None, longest=170)


@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
def test_a_window_bounds_what_is_seen(window):
    torch.manual_seed(1)
    cache = random_cache([1, 65, 200], 1, 32, 16, torch.float32)
    check(cache, 3, torch.float32, window=window, config=DecodeConfig(3, 16, 32, 4, 2))


def test_scores_are_capped():
    torch.manual_seed(2)
    cache = random_cache([1, 70], 1, 32, 16, torch.float32)
    check(cache, 2, torch.float32, scale=4.0, soft_cap=3.0)


@pytest.mark.parametrize(("splits", "tile"), [(1, 16), (2, 64), (5, 16), (20, 16)])
def test_splits_are_merged(splits, tile):
    torch.manual_seed(3)
    cache = random_cache([0, 16, 100], 1, 32, 32, torch.float32)
    check(cache, 3, torch.float32, config=DecodeConfig(splits, 16, tile, 4, 2))


def test_a_merge_reads_more_parts_than_it_takes_at_once():
    torch.manual_seed(4)
    cache = random_cache([200], 1, 256, 16, torch.float32)
    check(cache, 16, torch.float32, config=DecodeConfig(13, 16, 16, 4, 2))


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_every_choice_fits_the_scratch(kv_heads):
    for sequences in (1, 2, 7, 64, 333, 1024):
        parts = min(sequences * MAX_SPLITS, MAX_PARTS)
        for longest in (1, 64, 1000, 131072):
            for window in (0, 512):
                config = choose_decode_config(sequences, kv_heads, longest, window, 256)
                assert config.splits >= 1
                assert config.splits == 1 or config.splits * sequences <= parts


def test_one_long_sequence_is_split_and_many_are_not():
    assert choose_decode_config(1, 8, 1024, 0, 256).splits == 16
    assert choose_decode_config(1, 8, 100, 0, 256).splits == 2
    assert choose_decode_config(256, 8, 1024, 0, 256).splits == 1
    assert choose_decode_config(1, 8, 8192, 128, 256).splits == 2


@pytest.mark.parametrize("row_bytes", [32, 160, 512, 1024, 4096])
def test_a_tile_is_a_power_of_two(row_bytes):
    tile = choose_decode_config(256, 8, 1024, 0, row_bytes).tile
    assert tile >= 16
    assert tile & (tile - 1) == 0
    assert tile == 16 or tile * row_bytes <= 16384


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs more memory than a test may take here")
def test_blocks_beyond_int32_offsets():
    torch.manual_seed(5)
    small = random_cache([100, 65], 2, 64, 64, torch.float16)
    far = (1 << 31) // (2 * 64 * 64) + 1
    k, v = (
        torch.empty(far + len(small.k), *small.k.shape[1:], dtype=torch.float16, device=DEVICE)
        for _ in range(2)
    )
    k[far:], v[far:] = small.k, small.v
    tables = torch.where(small.tables_RB < 0, small.tables_RB, small.tables_RB + far)
    check(small._replace(k=k, v=v, tables_RB=tables), 4, torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="programs run one after the other elsewhere")
def test_the_last_to_arrive_merges_whatever_the_order():
    torch.manual_seed(6)
    cache = random_cache([4000] * 4 + [700, 65], 4, 128, 64, torch.float16)
    for _ in range(20):
        check(cache, 8, torch.float16, config=DecodeConfig(32, 64, 64, 4, 3))
