"""Embedding rows, against their reference."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.embedding import embed, embed_reference


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def compare(ids: list[int], table: torch.Tensor, **options: float) -> torch.Tensor:
    token_ids = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    got, want = (
        torch.full((len(ids), table.shape[1]), float("nan"), dtype=table.dtype, device=DEVICE)
        for _ in range(2)
    )
    embed(token_ids, table, got, **options)
    options.pop("pdl", None)
    embed_reference(token_ids, table, want, **options)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 576, 1500])
def test_embed(size, dtype):
    compare([0, 10, 3, 3], torch.randn(11, size, device=DEVICE).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(dtype):
    table = torch.randn(5, 640, device=DEVICE).to(dtype)
    assert compare([4, 0], table, scale=25.25).abs().max() > 25


def test_ids_outside_of_the_table_give_zeros():
    got = compare([-1, 2, 5, 2**30], torch.randn(5, 48, device=DEVICE))
    assert got.any(1).tolist() == [False, True, False, False]


def test_a_table_may_be_a_part_of_the_vocabulary():
    table = torch.randn(5, 48, device=DEVICE)
    got = compare([-1, 2, 100, 104, 105], table, first=100)
    assert got.any(1).tolist() == [False, False, True, True, False]
    assert torch.equal(got[3], table[4])


def test_wrong_sizes_are_refused():
    ids = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(5, 48, device=DEVICE)
    with pytest.raises(ValueError, match="token_ids"):
        embed(ids, table, torch.zeros(2, 48, device=DEVICE))
    with pytest.raises(ValueError, match="table"):
        embed(ids, table, torch.zeros(3, 47, device=DEVICE))


@pytest.mark.gpu
def test_rows_beyond_two_billion_elements():
    table = torch.zeros(2**20 + 1, 2048, dtype=torch.float16, device=DEVICE)
    table[-1] = torch.randn(2048)
    assert compare([2**20, 0], table)[0].any()


@pytest.mark.gpu
def test_dependent_launch():
    compare([1, 2, 4], torch.randn(5, 1024, device=DEVICE).bfloat16(), pdl=True)
