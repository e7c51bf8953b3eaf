"""Copies of blocks within the cache, against their reference."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.blocks import CHUNK, copy_blocks, copy_blocks_reference


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pairs(*numbers: tuple[int, int]) -> list[torch.Tensor]:
    return list(torch.tensor(numbers, dtype=torch.int32, device=DEVICE).unbind(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2, 6, 2, 16, 24), (1, 2, 5, 3, 16, CHUNK // 32)])
def test_copies_touch_nothing_else(shape, dtype):
    cache = torch.randn(shape, device=DEVICE).to(dtype)
    want = cache.clone()
    numbers = pairs((1, 4), (1, 2), (-1, 3), (3, -1))
    copy_blocks(cache, *numbers)
    copy_blocks_reference(want, *numbers)
    assert torch.equal(cache, want)
    assert torch.equal(cache[:, :, 4], cache[:, :, 1])


def test_layers_may_be_some_of_a_larger_tensor():
    everything = torch.randn(4, 2, 8, 1, 16, 32, device=DEVICE)
    want = everything.clone()
    copy_blocks(everything[1:3, :, 2:], *pairs((0, 5)))
    copy_blocks_reference(want[1:3, :, 2:], *pairs((0, 5)))
    assert torch.equal(everything, want)


def test_no_copies():
    cache = torch.randn(1, 2, 2, 1, 16, 16, device=DEVICE)
    want = cache.clone()
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    copy_blocks(cache, none, none)
    assert torch.equal(cache, want)


def test_what_isnt_a_cache_is_refused():
    cache = torch.zeros(1, 2, 3, 2, 16, 8, device=DEVICE)
    with pytest.raises(ValueError, match="blocks in one piece"):
        copy_blocks(cache.transpose(3, 4), *pairs((1, 2)))
    with pytest.raises(ValueError, match="blocks in one piece"):
        copy_blocks(cache[0], *pairs((1, 2)))
    with pytest.raises(ValueError, match="1 sources, 2 targets"):
        copy_blocks(cache, pairs((1, 2))[0], pairs((1, 2), (1, 0))[1])


@pytest.mark.gpu
def test_blocks_beyond_two_billion_elements():
    block = 8 * 64 * 128
    cache = torch.empty(1, 2, 2**31 // block + 2, 8, 64, 128, dtype=torch.float16, device=DEVICE)
    last = cache.shape[2] - 1
    cache[:, :, 1].normal_()
    cache[:, :, last - 1 :] = 0
    copy_blocks(cache, *pairs((1, last)))
    assert torch.equal(cache[:, :, last], cache[:, :, 1])
    assert not cache[:, :, last - 1].any()
