"""The products of a mixture of experts against their references: experts without tokens, all tokens
to one, one token, odd sizes, NaN-filled outputs, places beyond 32 bits."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES
from kernels.gpu.expert_inputs import ints, nans, random, random_places, routes_of

from ringcast.kernels.gpu.expert_routing import (
    DIRECT_TOKENS,
    dispatch,
    dispatch_reference,
    is_direct,
    make_blocks,
    most_blocks,
    route,
    route_reference,
)
from ringcast.kernels.gpu.experts import (
    LARGEST_PLAN,
    PLANS,
    ExpertConfig,
    ExpertPlan,
    choose_plan,
    combine,
    combine_reference,
    expert_down,
    expert_down_reference,
    expert_gate_up,
    expert_gate_up_reference,
    num_blocks,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = ExpertConfig(outputs=16, block=32, warps=4, stages=2)
ALL = [plan for _, plan in PLANS] + [LARGEST_PLAN]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def mixture(tokens, num, chosen, hidden, inner, dtype, *, places=None, held=None):
    """Inputs of the products: what the router would have made of them, laid out."""
    held = num if held is None else held
    if places is None:
        places = random_places(tokens, num, chosen, held)
    weights = torch.rand(tokens, chosen, device=DEVICE)
    x = random(tokens, hidden + 16, dtype=dtype)[:, :hidden]
    gate_up = (random(held, 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (random(held, hidden, inner) / inner**0.5).to(dtype)
    return places, weights, x, gate_up, down, held


def run(parts, plan, activation, reference, pdl=False):
    """The three of them: inner rows, rows of pairs, and rows of tokens."""
    places, weights, x, gate_up, down, held = parts
    (tokens, chosen), dtype = places.shape, x.dtype
    hidden, inner = down.shape[1:]
    # As sorted ones, even where there are few.
    count = most_blocks(tokens * chosen, held, plan.rows)
    blocks = make_blocks(count, count * plan.rows, held, DEVICE)
    for tensor in blocks:
        tensor.fill_(-1)
    dispatch_reference(places, blocks, rows=plan.rows, held=held)
    inner_SI = nans(count * plan.rows, inner + 8, dtype=dtype)[:, :inner]
    y_PH = nans(tokens * chosen, hidden + 8, dtype=dtype)[:, :hidden]
    out_TH = nans(tokens + 1, hidden, dtype=dtype)
    names = (
        (expert_gate_up_reference, expert_down_reference, combine_reference)
        if reference
        else (expert_gate_up, expert_down, combine)
    )
    shape = {"rows": plan.rows, "count": count, "pdl": pdl}
    names[0](x, gate_up, blocks, inner_SI, activation, chosen=chosen, config=plan.gate_up, **shape)
    names[1](inner_SI, down, blocks, weights, y_PH, config=plan.down, **shape)
    names[2](y_PH, places, out_TH[:tokens], pdl=pdl)
    assert out_TH[tokens].isnan().all()
    return inner_SI, y_PH, out_TH[:tokens]


def compare(parts, plan, activation="silu", pdl=False):
    tolerance = TOLERANCE[parts[2].dtype]
    got, want = run(parts, plan, activation, False, pdl), run(parts, plan, activation, True)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "num", "chosen", "hidden", "inner", "activation"),
    [(1, 4, 2, 64, 32, "silu"), (7, 3, 1, 17, 5, "gelu_tanh"), (21, 4, 2, 96, 50, "silu")],
)
def test_products(tokens, num, chosen, hidden, inner, activation, dtype):
    plan = ExpertPlan(16, SMALL, SMALL)
    parts = mixture(tokens, num, chosen, hidden, inner, dtype)
    _, y_PH, out_TH = compare(parts, plan, activation)
    assert not y_PH.isnan().any()
    assert not out_TH.isnan().any()


def test_one_expert_has_all_tokens_and_the_others_none():
    experts = torch.full((37, 1), 2, dtype=torch.int32, device=DEVICE)
    plan = ExpertPlan(16, SMALL, SMALL._replace(outputs=32))
    compare(mixture(37, 4, 1, 40, 24, torch.float32, places=experts), plan)


def test_experts_that_are_not_held_add_nothing():
    plan = ExpertPlan(16, SMALL, SMALL)
    parts = mixture(9, 6, 2, 40, 24, torch.float32, held=3)
    _, y_PH, out_TH = compare(parts, plan)
    held_P = (parts[0] >= 0).flatten()
    assert torch.equal(~held_P, y_PH.isnan().all(1))
    assert not out_TH.isnan().any()


def test_blocks_with_nothing_to_do_write_nothing():
    """Though they are among those in use."""
    blocks = make_blocks(3, 48, 3, DEVICE)
    blocks.places_B.fill_(-1)
    blocks.pairs_S.fill_(0)
    blocks.used_1.fill_(2)
    gate_up, out = nans(3, 8, 16), ints(48, 4).float()
    shape = {"chosen": 2, "rows": 16, "count": 2, "config": SMALL}
    expert_gate_up(random(4, 16), gate_up, blocks, out, "silu", **shape)
    assert (out == -7).all()


@pytest.mark.parametrize("plan", ALL, ids=lambda plan: f"{plan.rows} rows")
def test_the_plans(plan):
    compare(mixture(11, 3, 2, 72, 40, torch.float16), plan)


def test_a_tokens_result_is_the_same_bits_in_any_batch():
    plan = ExpertPlan(16, SMALL, SMALL)
    experts, weights, x, *rest = mixture(24, 3, 2, 64, 16, torch.float16)
    whole = run((experts, weights, x, *rest), plan, "silu", False)[2]
    for some in (slice(3, 4), slice(10, 19)):
        part = (experts[some].contiguous(), weights[some].contiguous(), x[some], *rest)
        assert torch.equal(run(part, plan, "silu", False)[2], whole[some])


def test_combining_in_place():
    y, places, stream = random(15, 33), random_places(5, 6, 3, 4), random(5, 33)
    want = torch.full_like(stream, float("nan"))
    combine_reference(y, places, want, add_to_TH=stream)
    combine(y, places, stream, add_to_TH=stream)
    torch.testing.assert_close(stream, want, rtol=1e-6, atol=1e-6)


def test_plans_grow_with_the_tokens_of_an_expert():
    rows = [choose_plan(tokens * 8, 128, 2, None).rows for tokens in (1, 64, 256, 1024, 8192)]
    assert rows == [16, 16, 32, 64, 128]
    for itemsize in (2, 4):
        for tokens in (1, 200, 600, 1600, 8192):
            plan = choose_plan(tokens * 8, 128, itemsize, None)
            for config, tiles in ((plan.gate_up, 2), (plan.down, 1)):
                shared = (plan.rows + tiles * config.outputs) * config.block * itemsize
                assert shared * config.stages <= 227 * 1024


def test_grids_for_few_tokens_have_a_block_for_each_pair():
    assert is_direct(DIRECT_TOKENS)
    assert not is_direct(DIRECT_TOKENS + 1)
    assert num_blocks(DIRECT_TOKENS, 8, 4, 16) == 32
    assert num_blocks(64, 8, 128, 16) == 128 + 24


def test_what_cant_be_computed_is_refused():
    places, weights, x, gate_up, down, _ = mixture(5, 3, 2, 32, 16, torch.float32)
    blocks = make_blocks(2, 32, 3, DEVICE)
    shape = {"rows": 16, "config": SMALL}
    with pytest.raises(ValueError, match="'relu'; accepted"):
        expert_gate_up(x, gate_up, blocks, x, "relu", chosen=2, count=2, **shape)
    with pytest.raises(ValueError, match="3 blocks of 16 slots; there is room for 2"):
        expert_gate_up(x, gate_up, blocks, nans(48, 16), "silu", chosen=2, count=3, **shape)
    with pytest.raises(ValueError, match="they must be alike"):
        expert_gate_up(x.half(), gate_up, blocks, nans(32, 16), "silu", chosen=2, count=2, **shape)
    with pytest.raises(ValueError, match=r"out is \(5, 16\)|out \(5, 16\)"):
        expert_down(nans(32, 16), down, blocks, weights, nans(5, 16), count=2, **shape)
    with pytest.raises(ValueError, match="have a row for each"):
        expert_down(nans(32, 16), down, blocks, weights, nans(9, 32), count=2, **shape)
    with pytest.raises(ValueError, match=r"y is \(9, 32\)"):
        combine(nans(9, 32), places, nans(5, 32))
    other = nans(4, 32)
    with pytest.raises(ValueError, match=r"add_to is \(4, 32\)"):
        combine(nans(10, 32), places, nans(5, 32), add_to_TH=other)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("plan", ALL, ids=lambda plan: f"{plan.rows} rows")
def test_large_shapes(plan, dtype, pdl):
    for tokens, num, chosen, hidden, inner in [
        (1, 128, 8, 2048, 768),
        (129, 16, 4, 1000, 520),
        (700, 8, 2, 1024, 1536),
    ]:
        compare(mixture(tokens, num, chosen, hidden, inner, dtype), plan, pdl=pdl)


@pytest.mark.gpu
def test_weights_and_rows_beyond_two_billion_elements():
    num, hidden, inner, tokens = 18, 8192, 8192, 40
    plan = PLANS[0][1]
    experts = torch.full((tokens, 1), num - 1, dtype=torch.int32, device=DEVICE)
    gate_up = torch.zeros(num, 2 * inner, hidden, dtype=torch.bfloat16, device=DEVICE)
    gate_up[-1] = random(2 * inner, hidden, dtype=torch.bfloat16) / hidden**0.5
    down = torch.zeros(2 * num, hidden, inner, dtype=torch.bfloat16, device=DEVICE)[num:]
    down[-1] = random(hidden, inner, dtype=torch.bfloat16) / inner**0.5
    x, weights = random(tokens, hidden, dtype=torch.bfloat16), torch.rand(tokens, 1, device=DEVICE)
    wide = nans(2, 2**30 + 64, dtype=torch.bfloat16)  # rows of pairs far apart
    parts = experts, weights, x, gate_up, down, num
    compare(parts, plan)
    one = parts[0][:2], parts[1][:2], parts[2][:2], *parts[3:]
    want = run(one, plan, "silu", True)
    blocks = make_blocks(2, 32, num, DEVICE)
    dispatch_reference(one[0], blocks, rows=16, held=num)
    y = wide[:, 2**30 - hidden : 2**30]
    shape = {"rows": 16, "count": 1, "config": plan.down}
    expert_down(want[0], down, blocks, one[1], y, **shape)
    torch.testing.assert_close(y, want[1], rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 5, 64])
def test_a_layer_in_a_graph(tokens):
    """Each replay takes other tokens to other experts, without the host."""
    num, chosen, hidden, inner, dtype = 32, 4, 512, 256, torch.bfloat16
    _, _, _, gate_up, down, *_ = mixture(1, num, chosen, hidden, inner, dtype)
    router, x = random(num, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype)
    plan = choose_plan(tokens * chosen, num, 2, None)
    count = num_blocks(tokens, chosen, num, plan.rows)
    blocks = make_blocks(count, count * plan.rows, num, DEVICE)
    experts, weights = ints(tokens, chosen), nans(tokens, chosen)
    logits = nans(tokens, num, dtype=dtype)
    inner_SI, y_PH = nans(count * plan.rows, inner, dtype=dtype), nans(tokens * chosen, hidden)
    y_PH, out = y_PH.to(dtype), nans(tokens, hidden, dtype=dtype)
    loads, counts = torch.zeros(num, dtype=torch.int64, device=DEVICE), ints(1, value=tokens)
    # Of two ranks that each have all of them: every token has its experts on one or the other.
    routes = routes_of([list(range(num))] * 2, num, 0)

    def step():
        torch.mm(x, router.T, out=logits)
        how = {"loads_E": loads, "num_tokens_N": counts, "routes": routes}
        few = {"blocks": blocks, "rows": plan.rows} if is_direct(tokens) else {}
        route(logits, experts, weights, renormalize=True, pdl=True, **how, **few)
        if not few:
            dispatch(experts, blocks, pdl=True, rows=plan.rows, held=num)
        shape = {"rows": plan.rows, "count": count, "pdl": True}
        expert_gate_up(
            x, gate_up, blocks, inner_SI, "silu", chosen=chosen, config=plan.gate_up, **shape
        )
        expert_down(inner_SI, down, blocks, weights, y_PH, config=plan.down, **shape)
        combine(y_PH, experts, out, pdl=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    loads.zero_()
    want_loads = loads.clone()
    for turn in range(20):
        x.copy_(random(tokens, hidden, dtype=dtype))
        out.fill_(float("nan"))
        routes.turn_1.fill_(turn)
        counts.fill_(tokens - turn % 2)
        graph.replay()
        want_experts, want_weights = ints(tokens, chosen), nans(tokens, chosen)
        how = {"loads_E": want_loads, "num_tokens_N": counts, "routes": routes}
        route_reference(logits, want_experts, want_weights, renormalize=True, **how)
        assert torch.equal(experts, want_experts)
        assert torch.equal(loads, want_loads)
        parts = want_experts, want_weights, x, gate_up, down, num
        want = run(parts, plan, "silu", True)[2]
        torch.testing.assert_close(out, want, rtol=3e-2, atol=3e-2)
