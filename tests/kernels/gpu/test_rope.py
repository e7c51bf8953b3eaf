"""Norms of heads, rotation and the write into the cache, against their reference."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.rope import DECODE_TOKENS, rope_and_cache, rope_and_cache_reference

TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
POSITIONS = 300
BLOCKS = 8


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tables(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=DEVICE) / size)
    angles = torch.arange(POSITIONS, device=DEVICE)[:, None] * frequencies
    return angles.cos(), angles.sin()


class Case:
    """Inputs, and outputs full of NaN. Tokens 1, 4, 7 .. are padding; the others have slots."""

    def __init__(self, tokens, heads, kv_heads, size, dtype, *, block_size=16, qk_norm=False):
        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=DEVICE).to(dtype)
        self.positions = torch.randint(POSITIONS, (tokens,), dtype=torch.int32, device=DEVICE)
        self.slots = torch.randperm(BLOCKS * block_size, device=DEVICE)[:tokens].int()
        self.slots[1::3] = -1
        self.cos, self.sin = tables(size)
        shape = (BLOCKS, kv_heads, block_size, size)
        self.k_cache, self.v_cache = torch.full(
            (2, *shape), float("nan"), dtype=dtype, device=DEVICE
        )
        self.q = torch.full((tokens, heads * size), float("nan"), dtype=dtype, device=DEVICE)
        self.norms = {}
        if qk_norm:
            self.norms = {
                name: torch.rand(size, device=DEVICE) + 0.5 for name in ("q_weight_D", "k_weight_D")
            }

    def run(self, function, **options) -> list[torch.Tensor]:
        out = [self.k_cache.clone(), self.v_cache.clone(), self.q.clone()]
        function(
            *(self.qkv, self.positions, self.slots, self.cos, self.sin, *out),
            self.heads,
            self.kv_heads,
            **self.norms,
            **options,
        )
        return out

    def compare(self, **options) -> list[torch.Tensor]:
        got, want = self.run(rope_and_cache, **options), self.run(rope_and_cache_reference)
        tolerance = TOLERANCE[self.qkv.dtype]
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert not got[2].isnan().any()
        return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 64), (4, 1, 256), (3, 3, 80), (5, 1, 16)]
)
def test_decode_and_prefill(heads, kv_heads, size, qk_norm, dtype):
    Case(4, heads, kv_heads, size, dtype, qk_norm=qk_norm).compare()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_more_tokens_take_larger_programs(qk_norm):
    Case(DECODE_TOKENS + 1, 3, 1, 16, torch.float32, qk_norm=qk_norm).compare()


def test_padding_leaves_the_cache_alone():
    case = Case(3, 2, 1, 32, torch.float32)
    case.slots[:] = -1
    k_cache, v_cache, _ = case.compare()
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


# Values take no part in the rotation, though the interpreter's numpy sees inf * 0.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_values_are_copied_exactly():
    case = Case(1, 2, 1, 32, torch.float32, qk_norm=True)
    case.qkv[0, 3 * 32] = float("inf")
    slot = int(case.slots[0])
    _, v_cache, _ = case.run(rope_and_cache)
    assert torch.equal(v_cache[slot // 16, 0, slot % 16], case.qkv[0, 3 * 32 :])


def test_caches_are_parts_of_a_group():
    case = Case(2, 2, 2, 32, torch.float32)
    group = torch.full((3, 2, BLOCKS, 2, 16, 32), float("nan"), device=DEVICE)
    case.k_cache, case.v_cache = group[1, 0], group[1, 1]
    q = case.q.clone()
    rope_and_cache(*(case.qkv, case.positions, case.slots, case.cos, case.sin, *group[1], q, 2, 2))
    want = case.run(rope_and_cache_reference)
    torch.testing.assert_close(group[1, 0], want[0], equal_nan=True)
    torch.testing.assert_close(group[1, 1], want[1], equal_nan=True)
    assert group[[0, 2]].isnan().all()


def test_wrong_shapes_are_refused():
    case = Case(2, 2, 1, 32, torch.float32)
    case.norms = {"q_weight_D": torch.ones(32, device=DEVICE)}
    with pytest.raises(ValueError, match="together"):
        case.run(rope_and_cache)
    case.norms, case.heads = {}, 3
    with pytest.raises(ValueError, match="3 query heads"):
        case.run(rope_and_cache)
    case.heads, case.cos = 2, case.cos[:, :8]
    with pytest.raises(ValueError, match="cos is"):
        case.run(rope_and_cache)


@pytest.mark.gpu
def test_slots_beyond_two_billion_elements():
    case = Case(2, 2, 1, 128, torch.float16, block_size=64)
    blocks = 2**31 // (64 * 128) + 2
    caches = torch.zeros(2, blocks, 1, 64, 128, dtype=torch.float16, device=DEVICE)
    case.slots = torch.tensor([blocks * 64 - 1, 5], dtype=torch.int32, device=DEVICE)
    args = (case.qkv, case.positions, case.slots, case.cos, case.sin)
    rope_and_cache(*args, *caches, case.q, 2, 1)
    written = caches[1, -1, 0, -1].clone()
    assert torch.equal(written, case.qkv[0, 3 * 128 :])
    assert caches[0, -1, 0, -1].any()
    assert not caches[:, blocks // 2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 100])
def test_dependent_launch(tokens, dtype):
    Case(tokens, 16, 8, 128, dtype, qk_norm=True).compare(pdl=True)
