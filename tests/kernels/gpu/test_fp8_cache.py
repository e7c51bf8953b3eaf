"""A KV cache of 8 bits: what is written into it and what attention makes of it, against the
references.
"""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES
from kernels.gpu.paged_cache import TOLERANCES, PagedCache, poisoned, randn, random_cache
from kernels.gpu.test_decode_attention import plan_of
from kernels.gpu.test_fused_decode_attention import last_slots

from ringcast.kernels.gpu import blocks
from ringcast.kernels.gpu.decode_attention import (
    decode_attention,
    decode_attention_reference,
    decode_scratch,
)
from ringcast.kernels.gpu.decode_plan import DecodeConfig
from ringcast.kernels.gpu.fused_decode_attention import (
    SplitConfig,
    fused_decode_attention,
    fused_decode_attention_reference,
)
from ringcast.kernels.gpu.prefill_attention import (
    plan_tiles,
    prefill_attention,
    prefill_attention_reference,
)
from ringcast.kernels.gpu.rope import rope_and_cache, rope_and_cache_reference

FP8 = torch.float8_e4m3fn
SCALES = {"k_scale": 0.25, "v_scale": 1.75}
THREE_WORKERS = DecodeConfig(3, 16, 4, 2)
TWO_SPLITS = SplitConfig(2, 64, 64, 4, 2)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def eight_bits(contexts: list[int], kv_heads: int, size: int, block_size: int) -> PagedCache:
    """A random cache, and NaN where no sequence is."""
    cache = random_cache(contexts, kv_heads, size, block_size, torch.float32)
    k, v = ((3 * x).to(FP8) for x in (cache.k, cache.v))
    assert k[0].float().isnan().all()
    return cache._replace(k=k, v=v)


def compare(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCES[dtype])


def same_codes(got: torch.Tensor, want: torch.Tensor, share: float = 0.0) -> None:
    """Equal but for a share that is rounded to the neighbour."""
    got, want = got.float(), want.float()
    assert torch.equal(got.isnan(), want.isnan())
    different = (got != want) & ~got.isnan()
    assert different.sum() <= share * got.numel()
    torch.testing.assert_close(got, want, rtol=0.13, atol=0.002, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_what_is_written(norm, dtype):
    tokens, heads, kv_heads, size = 5, 3, 1, 32
    qkv = randn(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    qkv[0, -size:] *= 1000  # more than 8 bits hold
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, -1, 20, 16, 47], dtype=torch.int32, device=DEVICE)
    cos, sin = (randn(tokens, size // 2, dtype=torch.float32) for _ in range(2))
    norms = {}
    if norm:
        norms = {name: randn(size, dtype=torch.float32) for name in ("q_weight_D", "k_weight_D")}
    results = []
    for function in (rope_and_cache, rope_and_cache_reference):
        k, v = torch.full((2, 3, kv_heads, 16, size), float("nan"), device=DEVICE).to(FP8)
        q = poisoned(tokens, heads * size, dtype=dtype)
        places = (qkv, positions, slots, cos, sin, k, v, q, heads, kv_heads)
        function(*places, **norms, **SCALES)
        results.append((k, v, q))
    (k, v, q), (want_k, want_v, want_q) = results
    compare(q, want_q, dtype)
    same_codes(k, want_k, 0.01)
    same_codes(v, want_v)
    assert v[0, 0, 3].float().abs().max() == 448
    expected = qkv[2, -size:].float() / SCALES["v_scale"]
    torch.testing.assert_close(v[1, 0, 4].float(), expected, rtol=1 / 16, atol=2**-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention(dtype):
    cache = eight_bits([63, 0, 130], 2, 64, 64)
    q = randn(3, 4 * 64, dtype=dtype)
    out, want = (poisoned(*q.shape, dtype=dtype) for _ in range(2))
    scratch = decode_scratch(3, 4, 64, 3, DEVICE)
    how = {"scale": 0.02, "kv_heads": 2, "window": 100, "config": THREE_WORKERS, **SCALES}
    decode_attention(q, *cache, plan_of(cache, 100, THREE_WORKERS), out, scratch, **how)
    decode_attention_reference(q, *cache, None, want, None, **how)
    compare(out, want, dtype)


def test_scores_are_capped_after_their_scale():
    cache = eight_bits([70], 1, 32, 16)
    q = randn(1, 2 * 32, dtype=torch.float32)
    out, want = (poisoned(1, 64, dtype=torch.float32) for _ in range(2))
    how = {"scale": 0.05, "kv_heads": 1, "soft_cap": 3.0, "config": THREE_WORKERS, **SCALES}
    plan, scratch = plan_of(cache, 0, THREE_WORKERS), decode_scratch(1, 2, 32, 3, DEVICE)
    decode_attention(q, *cache, plan, out, scratch, **how)
    decode_attention_reference(q, *cache, None, want, None, **how)
    compare(out, want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [65, 130])
def test_fused_decode_attention(context, dtype):
    cache = eight_bits([context, 0], 1, 64, 64)
    slots = last_slots(cache)
    qkv = randn(2, 4 * 64, dtype=dtype)
    cos, sin = (randn(300, 32, dtype=torch.float32) for _ in range(2))
    scratch = decode_scratch(2, 2, 64, 4, DEVICE)
    how = {"heads": 2, "kv_heads": 1, "eps": 1e-5, "scale": 0.02, **SCALES}
    results = []
    for function in (fused_decode_attention, fused_decode_attention_reference):
        k, v = cache.k.clone(), cache.v.clone()
        out = poisoned(2, 2 * 64, dtype=dtype)
        rest = (k, v, *cache[2:], out, scratch)
        function(qkv, cache.context_S - 1, slots, cos, sin, *rest, config=TWO_SPLITS, **how)
        results.append((out, k, v))
    (out, k, v), (want, want_k, want_v) = results
    same_codes(k, want_k, 0.001)
    same_codes(v, want_v)
    # A key that is rounded to the neighbour moves its score.
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 80, 256])
def test_prefill_attention(size, dtype):
    cache = eight_bits([90, 1], 1, size, 16)
    starts = torch.tensor([0, 70, 71], dtype=torch.int32, device=DEVICE)
    tiles = plan_tiles(torch.tensor([70, 1]).numpy(), 2)
    q = randn(71, 2 * size, dtype=dtype)
    out, want = (poisoned(*q.shape, dtype=dtype) for _ in range(2))
    how = {"scale": 0.02, "kv_heads": 1, **SCALES}
    places = (*cache[:4], starts, cache.context_S)
    prefill_attention(q, *places, torch.from_numpy(tiles).to(DEVICE), out, **how)
    prefill_attention_reference(q, *places, None, want, **how)
    compare(out, want, dtype)


def test_blocks_are_copied():
    cache = torch.randn(1, 2, 4, 1, 16, 32, device=DEVICE).to(FP8)
    want = cache.clone()
    want[:, :, 2] = cache[:, :, 3]
    pairs = torch.tensor([[3, -1], [2, -1]], dtype=torch.int32, device=DEVICE)
    blocks.copy_blocks(cache, *pairs)
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))
