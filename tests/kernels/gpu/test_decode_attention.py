"""Decode attention against its reference: shapes, windows, soft caps, splits and their merge."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES
from kernels.gpu.paged_cache import TOLERANCES, PagedCache, poisoned, randn, random_cache

from ringcast.kernels.gpu.decode_attention import (
    decode_attention,
    decode_attention_reference,
    decode_scratch,
)
from ringcast.kernels.gpu.decode_plan import DecodeConfig, plan_decode

THREE_WORKERS = DecodeConfig(3, 16, 4, 2)


def plan_of(cache: PagedCache, window: int, config: DecodeConfig) -> torch.Tensor:
    contexts = cache.context_S.cpu().numpy()
    return torch.from_numpy(plan_decode(contexts, window, config)).to(DEVICE)


def check(
    cache: PagedCache,
    heads: int,
    dtype: torch.dtype,
    *,
    config: DecodeConfig = THREE_WORKERS,
    **how,
) -> None:
    """Runs kernel and reference; the counters must be back at zero, for the next launch."""
    _, kv_heads, _, head_size = cache.k.shape
    sequences = len(cache.context_S)
    q = randn(sequences, heads * head_size, dtype=dtype)
    scratch = decode_scratch(sequences, heads, head_size, config.workers, DEVICE)
    scratch.parts_PQ.fill_(float("nan"))
    scratch.lse_PH.fill_(float("nan"))
    how = {"scale": head_size**-0.5, "kv_heads": kv_heads, **how}
    plan = plan_of(cache, how.get("window", 0), config)
    out, expected = (poisoned(*q.shape, dtype=dtype) for _ in range(2))
    decode_attention(q, *cache, plan, out, scratch, config=config, **how)
    decode_attention_reference(q, *cache, None, expected, None, **how)
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


@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
def test_a_window_bounds_what_is_seen(window):
    torch.manual_seed(1)
    cache = random_cache([1, 65, 200], 1, 32, 16, torch.float32)
    check(cache, 3, torch.float32, window=window, config=DecodeConfig(3, 32, 4, 2))


def test_scores_are_capped():
    torch.manual_seed(2)
    cache = random_cache([1, 70], 1, 32, 16, torch.float32)
    check(cache, 2, torch.float32, scale=4.0, soft_cap=3.0)


@pytest.mark.parametrize(("workers", "tile"), [(1, 16), (2, 64), (5, 16), (20, 16)])
def test_parts_are_merged(workers, tile):
    torch.manual_seed(3)
    cache = random_cache([0, 16, 100, 90], 1, 32, 32, torch.float32)
    check(cache, 3, torch.float32, config=DecodeConfig(workers, tile, 4, 2))


def test_a_merge_reads_more_parts_than_it_takes_at_once():
    torch.manual_seed(4)
    cache = random_cache([800], 1, 256, 16, torch.float32)
    check(cache, 16, torch.float32, config=DecodeConfig(13, 16, 4, 2))


def test_many_sequences_and_few_workers():
    torch.manual_seed(7)
    cache = random_cache([1, 40, 0, 17, 200, 3, 0, 0, 64, 90], 2, 16, 16, torch.float32)
    check(cache, 4, torch.float32, config=DecodeConfig(4, 16, 4, 2))


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
        check(cache, 8, torch.float16, config=DecodeConfig(132, 64, 4, 3))
