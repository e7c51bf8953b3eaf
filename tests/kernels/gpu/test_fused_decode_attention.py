"""The fused decode kernel against the references of the two it stands for: output and cache."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES
from kernels.gpu.paged_cache import TOLERANCES, PagedCache, poisoned, randn, random_cache

from ringcast.kernels.gpu.decode_attention import decode_scratch
from ringcast.kernels.gpu.fused_decode_attention import (
    MAX_SPLITS,
    SplitConfig,
    choose_split_config,
    fused_decode_attention,
    fused_decode_attention_reference,
)

TWO_SPLITS = SplitConfig(2, 64, 64, 4, 2)


def last_slots(cache: PagedCache) -> torch.Tensor:
    """Where each sequence's last token goes, -1 for padding; the slot is made NaN, as unwritten."""
    block_size, slots = cache.k.shape[2], []
    for row, context in zip(cache.rows_S.tolist(), cache.context_S.tolist(), strict=True):
        if not context:
            slots.append(-1)
            continue
        block = int(cache.tables_RB[row, (context - 1) // block_size])
        cache.k[block, :, (context - 1) % block_size] = float("nan")
        cache.v[block, :, (context - 1) % block_size] = float("nan")
        slots.append(block * block_size + (context - 1) % block_size)
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def check(
    cache: PagedCache,
    heads: int,
    dtype: torch.dtype,
    *,
    norm: bool = False,
    config=TWO_SPLITS,
    **how,
) -> None:
    _, kv_heads, _, size = cache.k.shape
    sequences = len(cache.context_S)
    slots = last_slots(cache)
    qkv = randn(sequences, (heads + 2 * kv_heads) * size, dtype=dtype)
    cos, sin = (randn(300, size // 2, dtype=torch.float32) for _ in range(2))
    if norm:
        how["q_weight_D"], how["k_weight_D"] = (randn(size, dtype=torch.float32) for _ in range(2))
    how |= {"heads": heads, "kv_heads": kv_heads, "eps": 1e-5, "scale": size**-0.5}
    splits = sequences * (MAX_SPLITS if config is None else config.splits)
    scratch = decode_scratch(sequences, heads, size, splits, DEVICE)
    positions = cache.context_S - 1
    results = []
    for function in (fused_decode_attention, fused_decode_attention_reference):
        k, v = cache.k.clone(), cache.v.clone()
        out = poisoned(sequences, heads * size, dtype=dtype)
        rest = (k, v, *cache[2:], out, scratch)
        function(qkv, positions, slots, cos, sin, *rest, config=config, **how)
        results.append((out, k, v))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, **TOLERANCES[dtype])
    assert not scratch.counters_N.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_agrees_with_the_reference(dtype, norm):
    torch.manual_seed(0)
    check(random_cache([1, 0, 130], 2, 64, 64, dtype), 4, dtype, norm=norm)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"), [(4, 1, 256, 64), (3, 1, 80, 16)]
)
def test_other_heads(heads, kv_heads, head_size, block_size):
    torch.manual_seed(1)
    cache = random_cache([65, 16], kv_heads, head_size, block_size, torch.float32)
    check(cache, heads, torch.float32, norm=True)


@pytest.mark.parametrize("window", [1, 16, 17, 40])
def test_a_window_bounds_what_is_seen(window):
    torch.manual_seed(2)
    cache = random_cache([1, 17, 100], 1, 32, 16, torch.float32)
    check(cache, 2, torch.float32, window=window, config=SplitConfig(3, 16, 16, 4, 2))


@pytest.mark.parametrize("context", [64, 65, 66, 128])
def test_the_last_token_may_be_alone_in_its_split(context):
    torch.manual_seed(3)
    cache = random_cache([context], 1, 32, 32, torch.float32)
    check(cache, 2, torch.float32, config=SplitConfig(8, 16, 32, 4, 2))


def test_configuration_and_splits_are_chosen_by_itself():
    torch.manual_seed(4)
    check(random_cache([170], 1, 64, 64, torch.float32), 2, torch.float32, config=None, longest=170)


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_a_long_sequence_is_split_into_no_more_than_there_are_tokens_for(kv_heads):
    splits = [
        choose_split_config(1, kv_heads, longest, 0, 256).splits for longest in (1, 64, 100, 131072)
    ]
    assert splits[:3] == [1, 1, 2]
    assert 16 <= splits[3] <= MAX_SPLITS
    assert choose_split_config(1, kv_heads, 8192, 128, 256).splits == 2


@pytest.mark.parametrize("row_bytes", [32, 160, 512, 1024, 4096])
def test_a_tile_is_a_power_of_two(row_bytes):
    tile = choose_split_config(1, 8, 1024, 0, row_bytes).tile
    assert tile >= 16
    assert tile & (tile - 1) == 0
    assert tile == 16 or tile * row_bytes <= 16384
