"""The kernels of a mixture of experts against their references: experts without tokens, tokens
without experts, all tokens to one, NaN-filled outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringcast.kernels.cpu import experts, linear, tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_tiles = pytest.mark.skipif(not tiles.available(), reason="this processor has no matrix tiles")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def count(n: int) -> np.ndarray:
    return np.array([n], np.int64)


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def offsets_of(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def run_route(logits, num, chosen, renormalize):
    rows = len(logits)
    got = torch.full((rows + 1, chosen), -7, dtype=torch.int32), nans(rows + 1, chosen)
    experts.route_kernel.bind(
        torch.float32,
        rows=count(rows),
        logits=logits,
        experts=got[0],
        weights=got[1],
        num=num,
        stride=logits.shape[1],
        chosen=chosen,
        renormalize=renormalize,
    )()
    assert (got[0][rows] == -7).all()
    assert got[1][rows].isnan().all()
    return got[0][:rows], got[1][:rows]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("rows", "num", "chosen"), [(1, 1, 1), (3, 5, 2), (70, 128, 8), (4, 3, 3)])
def test_route(rows, num, chosen, renormalize):
    logits = torch.cat([torch.randn(rows, num) * 3, nans(rows, 2)], 1).contiguous()
    got, want = (
        run_route(logits, num, chosen, renormalize),
        experts.route(logits[:, :num], chosen, renormalize),
    )
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_are_chosen():
    logits = torch.tensor([[0.0, 2.0, 2.0, 0.0, 2.0]])
    assert run_route(logits, 5, 4, True)[0].tolist() == [[1, 2, 4, 0]]
    assert experts.route(logits, 4, True)[0].tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize("logits", [[float("nan")] * 4, [1.0, float("nan"), 2.0, float("nan")]])
def test_logits_that_are_no_numbers_choose_experts_that_exist(logits):
    chosen, weights = run_route(torch.tensor([logits]), 4, 3, True)
    assert ((chosen >= 0) & (chosen < 4)).all()
    assert weights.isnan().all()


def run_dispatch(chosen, counts, places, held, turn, load):
    """On one rank: what it makes."""
    rows, width = chosen.shape
    made = {
        "slots": torch.full((rows, width), -7, dtype=torch.int32),
        "tokens": torch.full((rows * width,), -7, dtype=torch.int32),
        "offsets": np.full(held + 1, -7),
        "used": count(-7),
    }
    num, most = places.shape
    tables = {"counts": counts, "places": places, "seen": np.full(num, -7), "load": load}
    sizes = {"chosen": width, "num": num, "most": most, "held": held}
    arguments = {"rows": count(rows), "experts": chosen, "turn": count(turn)}
    experts.dispatch_kernel.bind(torch.float32, **arguments, **made, **tables, **sizes)()
    return made


def places_of(num, first, held):
    """Of a rank that has some experts once."""
    places = torch.full((num, 1), -1, dtype=torch.int32)
    places[first : first + held, 0] = torch.arange(held)
    return torch.ones(num, dtype=torch.int32), places


@pytest.mark.parametrize("turn", [0, 5])
def test_replicas_share_evenly(turn):
    """Expert 1 is on ranks 0, 1 and 2, expert 2 on 0 and 2. Each pair goes to one of them."""
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(50)]).int()
    chosen[7] = -1  # a token that isn't there
    counts = torch.tensor([1, 3, 2, 1], dtype=torch.int32)
    placement = [[1, 2], [0, 1], [1, 2], [3]]
    load, slots, used = np.array([100, 0, 0, 0]), [], []
    for rank, held in enumerate(placement):
        places = torch.full((4, 4), -1, dtype=torch.int32)
        for place, e in enumerate(held):
            places[e, sum(e in before for before in placement[:rank])] = place
        own = load.copy()
        made = run_dispatch(chosen, counts, places, len(held), turn, own)
        offsets, tokens, want = experts.dispatch(chosen, counts, places, len(held), turn)
        assert made["offsets"].tolist() == offsets.tolist()
        assert torch.equal(made["tokens"][: len(tokens)], tokens)
        assert torch.equal(made["slots"], want)
        slots.append(want)
        used.append(np.diff(offsets.numpy()).tolist())
        seen = torch.bincount(chosen[chosen >= 0], minlength=4).numpy()
        assert (own - load).tolist() == seen.tolist()
    times = sum((each >= 0).int() for each in slots)
    assert torch.equal(times, (chosen >= 0).int())
    parts = [used[0][0], used[1][1], used[2][0]]  # of expert 1
    assert max(parts) - min(parts) <= 1
    assert abs(used[0][1] - used[2][1]) <= 1
    first = next(rank for rank in range(3) if slots[rank][chosen == 1][0] >= 0)
    assert first == turn % 3


@pytest.mark.parametrize(
    ("rows", "num", "first", "held"), [(1, 4, 0, 4), (33, 7, 0, 7), (33, 7, 2, 3), (5, 40, 38, 2)]
)
def test_dispatch(rows, num, first, held):
    chosen = torch.stack([torch.randperm(num)[:3] for _ in range(rows)]).int()
    counts, places = places_of(num, first, held)
    made = run_dispatch(chosen, counts, places, held, 3, np.zeros(num, np.int64))
    offsets, tokens, slots = experts.dispatch(chosen, counts, places, held, 3)
    assert made["offsets"].tolist() == offsets.tolist()
    assert made["used"][0] == len(tokens)
    assert torch.equal(made["tokens"][: len(tokens)], tokens)
    assert torch.equal(made["slots"], slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather(dtype):
    x, tokens = torch.randn(5, 9).to(dtype), torch.tensor([4, 0, 0, 3], dtype=torch.int32)
    out = nans(5, 9, dtype=dtype)
    arguments = {"tokens": tokens, "x": x, "out": out, "width": 9, "element_bytes": x.itemsize}
    experts.gather_kernel.bind(dtype, rows=count(4), **arguments)()
    assert torch.equal(out[:4], x[tokens.long()])
    assert out[4:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [[0, 3, 0, 1], [9, 0], [1], [0, 0]])
def test_row_experts(dtype, counts):
    inner, outer, rows = 37, 10, sum(counts)
    x = torch.randn(rows, inner).to(dtype)
    weight = torch.randn(len(counts), outer, inner).to(dtype)
    y, offsets = nans(rows + 1, outer), offsets_of(counts)
    arguments = {"offsets": offsets, "x": x, "weight": weight, "y": y, "held": len(counts)}
    sizes = {"inner": inner, "outer": outer, "element_bytes": x.itemsize}
    experts.row_experts.bind(dtype, **arguments, **sizes)()
    want = experts.expert_linear(x, weight, torch.from_numpy(offsets))
    torch.testing.assert_close(y[:rows], want, rtol=2e-5, atol=2e-5)
    assert y[rows:].isnan().all()


@needs_tiles
@pytest.mark.parametrize("counts", [[0, 3, 0, 1], [70, 0, 17], [1], [0, 32]])
@pytest.mark.parametrize(("inner", "outer"), [(32, 32), (50, 33), (2500, 500)])
def test_tile_experts(counts, inner, outer):
    rows, wide, deep = sum(counts), tiles.padded(outer), tiles.padded(inner)
    x = torch.zeros(rows, deep, dtype=torch.bfloat16)
    x[:, :inner] = torch.randn(rows, inner)
    weight = torch.randn(len(counts), outer, inner).bfloat16()
    packed = torch.stack([tiles.pack(each) for each in weight])
    y, offsets = nans(rows + 1, wide), offsets_of(counts)
    arguments = {"offsets": offsets, "x": x, "weight": packed, "y": y, "held": len(counts)}
    sizes = {"inner": deep, "outer": wide, "configurations": linear.CONFIGURATIONS}
    experts.tile_experts.bind(torch.bfloat16, **arguments, **sizes)()
    want = experts.expert_linear(x[:, :inner], weight, torch.from_numpy(offsets))
    torch.testing.assert_close(y[:rows, :outer], want, rtol=1e-3, atol=1e-3)
    assert y[rows:].isnan().all()


def test_combine():
    """A slot that isn't there adds nothing, whatever is in the buffer."""
    y, weights = torch.randn(6, 11), torch.rand(4, 3)
    slots = torch.tensor([[0, 3, 5], [2, -1, 1], [-1, -1, -1], [4, -1, -1]], dtype=torch.int32)
    out = nans(5, 11)
    arguments = {"y": y, "slots": slots, "weights": weights, "out": out, "width": 11, "chosen": 3}
    experts.combine_kernel.bind(torch.float32, rows=count(4), **arguments)()
    torch.testing.assert_close(out[:4], experts.combine(y, weights, slots), rtol=1e-6, atol=1e-6)
    assert not out[2].any()
    assert out[4:].isnan().all()
