"""Which experts tokens have, and in which order products take them, against references: experts
without tokens, all tokens to one, one token, NaN-filled outputs."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES
from kernels.gpu.expert_inputs import (
    empty_blocks,
    ints,
    nans,
    random,
    random_experts,
    random_places,
    routes_of,
)

from ringcast.kernels.gpu.expert_routing import (
    DIRECT_TOKENS,
    TURNS,
    dispatch,
    dispatch_reference,
    make_blocks,
    most_blocks,
    route,
    route_reference,
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("tokens", "num", "chosen"), [(1, 1, 1), (5, 7, 3), (9, 128, 8), (2, 4, 4)]
)
def test_route(tokens, num, chosen, renormalize, dtype):
    logits = random(tokens, num + 8, dtype=dtype)[:, :num]
    got, want = ((ints(tokens + 1, chosen), nans(tokens + 1, chosen)) for _ in range(2))
    for function, (experts, weights) in ((route, got), (route_reference, want)):
        function(logits, experts[:tokens], weights[:tokens], renormalize=renormalize)
        assert (experts[tokens] == -7).all()
        assert weights[tokens].isnan().all()
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1][:tokens], want[1][:tokens], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("counts", [[0, 3, 5], [5, 0, 0]])
def test_padding_of_replicas_has_no_experts(counts, renormalize):
    logits, real = random(15, 6), torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    got, want, all_real = (ints(15, 2) for _ in range(3))
    more = {"renormalize": renormalize, "num_tokens_N": real}
    route(logits, got, weights := nans(15, 2), **more)
    route_reference(logits, want, theirs := nans(15, 2), **more)
    route(logits, all_real, nans(15, 2), renormalize=renormalize)
    assert torch.equal(got, want)
    is_real = torch.arange(5, device=DEVICE) < real[:, None]
    assert torch.equal((got >= 0).all(1), is_real.flatten())
    assert torch.equal(got[is_real.flatten()], all_real[is_real.flatten()])
    torch.testing.assert_close(weights[is_real.flatten()], theirs[is_real.flatten()])
    assert weights.isfinite().all()
    with pytest.raises(ValueError, match="14 tokens; 3 replicas"):
        route(logits[:14], got[:14], weights[:14], **more)


def test_a_few_padded_tokens_have_blocks_with_nothing_to_do():
    counts = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    blocks, experts = empty_blocks(4, 2, 3, 16), ints(4, 2)
    route(
        random(4, 3), experts, nans(4, 2), renormalize=True, num_tokens_N=counts, blocks=blocks,
        rows=16,
    )  # fmt: skip
    there = blocks.places_B[:8].view(4, 2)
    assert torch.equal((there >= 0).all(1).cpu(), torch.tensor([True, False, True, True]))
    assert (there[1] == -1).all()


@pytest.mark.parametrize("turn", [0, 5, TURNS - 1])
@pytest.mark.parametrize(
    ("counts", "placement"),
    [
        ([6], [[0, 1, 2, 3], [4, 5, 0, 1]]),
        ([3, 0, 2], [[0, 1, 2], [3, 4, 0], [5, 0, 1]]),
    ],
)
def test_every_token_goes_to_one_replica_of_each_of_its_experts(counts, placement, turn):
    tokens, num, chosen = 6, 6, 3
    logits = random(tokens, num)
    real = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    each = tokens // len(counts)
    is_real = (torch.arange(each, device=DEVICE) < real[:, None]).flatten()
    route_reference(logits, experts := ints(tokens, chosen), nans(tokens, chosen), renormalize=True)
    met = torch.zeros(tokens, chosen, dtype=torch.int64, device=DEVICE)
    for rank, held in enumerate(placement):
        routes = routes_of(placement, num, rank, turn)
        loads = [torch.full((num,), 9, dtype=torch.int64, device=DEVICE) for _ in range(2)]
        got, want = ints(tokens, chosen), ints(tokens, chosen)
        how = {"renormalize": True, "num_tokens_N": real, "routes": routes}
        route(logits, got, nans(tokens, chosen), loads_E=loads[0], **how)
        route_reference(logits, want, nans(tokens, chosen), loads_E=loads[1], **how)
        assert torch.equal(got, want)
        there = got >= 0
        assert torch.equal(torch.tensor(held, device=DEVICE)[got[there].long()], experts[there])
        met += there
        counted = torch.bincount(experts[is_real].flatten(), minlength=num)
        assert torch.equal(loads[0], counted + 9)
        assert torch.equal(loads[1], counted + 9)
    assert torch.equal(met, is_real[:, None].expand_as(met).long())


def test_replicas_are_used_evenly():
    """Those of a step by each of its tokens, whichever replica of the engine they are of; single
    ones from step to step.
    """
    placement = [[0, 1], [0, 2], [0, 3]]
    logits = random(12, 4)
    logits[:, 0] = 9.0

    def to_first(tokens, counts, turn):
        real = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
        shares = []
        for rank in range(3):
            places = ints(tokens, 1)
            routes = routes_of(placement, 4, rank, turn)
            how = {"renormalize": True, "num_tokens_N": real, "routes": routes}
            route(logits[:tokens], places, nans(tokens, 1), **how)
            shares.append(int((places == 0).sum()))
        return shares

    assert to_first(12, [12], 7) == [4, 4, 4]
    assert to_first(12, [6, 6], 7) == [4, 4, 4]
    assert to_first(9, [1, 1, 1], 7) == [1, 1, 1]
    assert [to_first(4, [1], turn).index(1) for turn in range(2, 5)] == [2, 0, 1]


def test_of_equal_experts_the_first_are_chosen():
    logits = torch.tensor([[0.0, 2.0, 2.0, 0.0, 2.0]], device=DEVICE)
    for function in (route, route_reference):
        function(logits, experts := ints(1, 4), weights := nans(1, 4), renormalize=True)
        assert experts.tolist() == [[1, 2, 4, 0]]
        assert weights.sum().item() == pytest.approx(1.0)


def test_logits_that_are_no_numbers_choose_experts_that_exist():
    logits = nans(2, 5)
    logits[1, 3] = 1.0
    route(logits, experts := ints(2, 3), weights := ints(2, 3).float(), renormalize=True)
    assert experts.tolist() == [[0, 1, 2], [3, 0, 1]]
    assert weights.isnan().all()


@pytest.mark.parametrize("tokens", [1, DIRECT_TOKENS])
def test_a_few_tokens_are_laid_out_as_they_are_routed(tokens):
    """A block for each pair; pairs of experts that aren't held have blocks with nothing to do."""
    chosen, rows, held = 3, 16, 4
    logits = random(tokens, 8)
    blocks = empty_blocks(tokens, chosen, held, rows)
    places, pairs = ints(tokens, chosen), tokens * chosen
    how = {"renormalize": True, "routes": routes_of([list(range(2, 6)), [0, 1, 6, 7]], 8, 0)}
    route(logits, places, nans(tokens, chosen), blocks=blocks, rows=rows, **how)
    route_reference(logits, want := ints(tokens, chosen), nans(tokens, chosen), **how)
    assert torch.equal(places, want)
    assert (places == -1).any()
    assert blocks.used_1.item() == pairs
    slots = blocks.pairs_S[: pairs * rows].view(pairs, rows)
    assert (slots[:, 1:] == -1).all()
    assert slots[:, 0].tolist() == list(range(pairs))
    assert torch.equal(blocks.places_B[:pairs], places.flatten())
    assert (blocks.pairs_S[pairs * rows :] == -7).all()
    assert blocks.places_B[pairs].item() == -7


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "num", "chosen", "held"),
    [(5, 4, 1, 4), (33, 7, 2, 7), (33, 7, 2, 3), (700, 3, 2, 3), (6, 20, 8, 20)],
)
def test_dispatch(tokens, num, chosen, held, rows):
    places = random_places(tokens, num, chosen, held)
    got, want = (empty_blocks(tokens, chosen, held, rows) for _ in range(2))
    dispatch(places, got, rows=rows, held=held)
    dispatch_reference(places, want, rows=rows, held=held)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("which", [0, 3, 4])
def test_all_tokens_to_one_expert(which):
    tokens, held, rows = 40, 5, 16
    experts = torch.full((tokens, 1), which, dtype=torch.int32, device=DEVICE)
    got, want = (empty_blocks(tokens, 1, held, rows) for _ in range(2))
    dispatch(experts, got, rows=rows, held=held)
    dispatch_reference(experts, want, rows=rows, held=held)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    assert got.used_1.item() == 3


def test_no_token_has_an_expert_that_is_held():
    blocks = empty_blocks(6, 2, 3, 16)
    dispatch(ints(6, 2, value=-1), blocks, rows=16, held=3)
    assert blocks.used_1.item() == 0
    assert (blocks.pairs_S == -7).all()


def test_no_spread_of_pairs_needs_more_blocks():
    for pairs, held, rows in [(1, 5, 16), (40, 5, 16), (100, 3, 16), (64, 64, 16)]:
        worst = 0
        for alone in range(min(held, pairs + 1)):  # experts with one pair, and one with the rest
            rest = pairs - alone
            worst = max(worst, alone + -(-rest // rows))
        assert worst <= most_blocks(pairs, held, rows) <= pairs


def test_what_cant_be_laid_out_is_refused():
    blocks = make_blocks(2, 32, 3, DEVICE)
    with pytest.raises(ValueError, match="4 chosen of 3 experts"):
        route(random(5, 3), ints(5, 4), nans(5, 4), renormalize=True)
    with pytest.raises(ValueError, match=r"both must be \(5, 2\)"):
        route(random(5, 3), ints(5, 2), nans(4, 2), renormalize=True)
    with pytest.raises(ValueError, match="5 tokens; dispatch lays out more than 4"):
        route(random(5, 3), ints(5, 2), nans(5, 2), renormalize=True, blocks=blocks)
    with pytest.raises(ValueError, match=r"loads is torch.int32 \(3,\); it must be int64 3"):
        route(random(5, 3), ints(5, 2), nans(5, 2), renormalize=True, loads_E=ints(3))
    table = routes_of([[0, 1], [2, 3]], 4, 0)
    with pytest.raises(ValueError, match="a table of 4 experts, and there are 3"):
        route(random(5, 3), ints(5, 2), nans(5, 2), renormalize=True, routes=table)
    with pytest.raises(ValueError, match="10 pairs need 3 blocks and 48 slots; there are 2 and 32"):
        dispatch(random_places(5, 3, 2, 3), blocks, rows=16, held=3)


@pytest.mark.gpu
def test_many_pairs_are_laid_out():
    for tokens, num, chosen in [(8192, 128, 8), (5000, 8, 2)]:
        experts = random_experts(tokens, num, chosen)
        for rows in (16, 128):
            got, want = (empty_blocks(tokens, chosen, num, rows) for _ in range(2))
            dispatch(experts, got, rows=rows, held=num)
            dispatch_reference(experts, want, rows=rows, held=num)
            for mine, theirs in zip(got, want, strict=True):
                assert torch.equal(mine, theirs)
