"""The sampler against plain numpy, against transformers' warpers, and against its own promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chi_squared import check_counts
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringcast.executor.sampler import Sampler, truncate
from ringcast.mq import codec
from ringcast.mq.messages import NewSequence, TokenLogprobs
from ringcast.mq.sampling_params import SamplingParams

Floats = NDArray[np.float64]
EOS = 2
PROMPT = 5


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def make(vocab: int, *params: SamplingParams, choices: list[int] | None = None) -> Sampler:
    sampler = Sampler(len(params), vocab, [EOS], np.zeros((len(params), PROMPT), np.int32))
    for row, each in enumerate(params):
        sampler.enter(new_sequence(row, each, choices[row] if choices else 0))
    return sampler


def new_sequence(row: int, params: SamplingParams, choice: int = 0) -> NewSequence:
    return NewSequence(row, "", choice, codec.pack([0] * PROMPT), PROMPT, 0, b"", params)


def sample(
    sampler: Sampler, logits: torch.Tensor, rows: Any = None, positions: Any = None
) -> tuple[list[int], TokenLogprobs | None]:
    """As the worker calls it: index arrays come read-only out of a message; logits are its own."""
    rows = range(len(logits)) if rows is None else rows
    positions = [PROMPT] * len(logits) if positions is None else positions
    tokens, logprobs = sampler.sample(
        logits.clone(), codec.ints(codec.pack(rows)), codec.ints(codec.pack(positions))
    )
    assert tokens.dtype == np.int32
    assert tokens.shape == (len(logits),)
    return tokens.tolist(), logprobs


def survivors(weights: Floats, top_k: int, top_p: float, min_p: float) -> NDArray[np.int64]:
    """The same as `truncate`, by sorting."""
    order = np.argsort(-weights, kind="stable")
    order = order[(weights[order] >= min_p * weights.max()) & (weights[order] > 0)]
    if 0 < top_k < len(order):
        order = order[weights[order] >= weights[order[top_k - 1]]]
    if top_p < 1:
        reached = np.cumsum(weights[order])
        order = order[: 1 + int((reached < top_p * reached[-1]).sum())]
    return np.sort(order)


def truncated(weights: Any, top_k: int, top_p: float, min_p: float) -> list[int]:
    weights = np.asarray(weights, np.float32).copy()
    ids = np.empty(len(weights), np.int32)
    before = weights.copy()
    n = truncate(weights, ids, top_k, top_p, min_p)
    assert (weights[:n] == before[ids[:n]]).all()
    return ids[:n].tolist()


# --- distributions --------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 10, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.03},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.85, "min_p": 0.02},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    vocab, draws = 50, 40_000
    logits = random_logits(1, vocab, scale=1.2)
    params = SamplingParams(seed=11, **options)
    sampler = make(vocab, params)
    tokens, _ = sample(sampler, logits.repeat(draws, 1), [0] * draws, range(PROMPT, PROMPT + draws))
    weights = np.exp(logits[0].double().numpy() / params.temperature)
    kept = survivors(weights, params.top_k, params.top_p, params.min_p)
    expected = np.zeros(vocab)
    expected[kept] = draws * weights[kept] / weights[kept].sum()
    check_counts(np.bincount(tokens, minlength=vocab), expected)


@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 1003])
def test_inverse_cdf_reaches_every_token_of_any_vocabulary(vocab: int) -> None:
    draws = 20 * vocab
    sampler = make(vocab, SamplingParams(seed=3))
    tokens, _ = sample(sampler, torch.zeros(draws, vocab), [0] * draws, range(draws))
    assert set(tokens) == set(range(vocab))


@pytest.mark.parametrize("what", ["choice", "position", "seed"])
def test_choices_positions_and_seeds_draw_independently(what: str) -> None:
    vocab, draws = 8, 20_000
    seeds, choices, shift = [5, 5], [0, 0], 0
    if what == "seed":
        seeds = [5, 6]
    elif what == "choice":
        choices = [0, 1]
    else:
        shift = 1
    sampler = make(vocab, *(SamplingParams(seed=s) for s in seeds), choices=choices)
    logits = torch.zeros(draws, vocab)
    first, _ = sample(sampler, logits, [0] * draws, range(draws))
    second, _ = sample(sampler, logits, [1] * draws, range(shift, draws + shift))
    pairs = np.bincount(np.array(first) * vocab + second, minlength=vocab**2)
    check_counts(pairs, np.full(vocab**2, draws / vocab**2))


# --- what survives --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (0, 0.3, 0.0),
        (0, 0.95, 0.0),
        (0, 1.0, 0.05),
        (50, 0.9, 0.0),
        (50, 0.9, 0.02),
        (0, 0.9, 0.01),
    ],
)
def test_same_survivors_as_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    from transformers.generation import logits_process as warpers

    chain: list[Any] = [warpers.TemperatureLogitsWarper(temperature)]
    chain += [warpers.MinPLogitsWarper(min_p)] if min_p else []
    chain += [warpers.TopKLogitsWarper(top_k)] if top_k else []
    chain += [warpers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    logits = random_logits(20, 1003, seed=top_k)
    scores = logits.clone()
    for warper in chain:
        scores = warper(None, scores)
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()
    for row in range(len(logits)):
        kept = truncated(weights[row], top_k, top_p, min_p)
        assert kept == scores[row].isfinite().nonzero().flatten().tolist()


@given(
    # Steps of an eighth, so that ties are common, as they are among bf16 logits.
    logits=st.lists(st.integers(-900, 0), min_size=1, max_size=60),
    top_k=st.integers(0, 70),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0, exclude_min=True)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
def test_radix_selection_equals_sorting(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    exponents = (np.array(logits) - max(logits)) / 8
    weights = np.exp(exponents).astype(np.float32)
    # The reference compares as the sampler does: 32-bit weights with a 32-bit min_p.
    kept = survivors(weights.astype(np.float64), top_k, top_p, float(np.float32(min_p)))
    kept = kept[weights[kept] >= 1e-38]
    assert truncated(weights, top_k, top_p, min_p) == kept.tolist()


def test_ties() -> None:
    weights = [0.5, 1.0, 0.5, 0.25, 0.5]
    assert truncated(weights, 2, 1.0, 0.0) == [0, 1, 2, 4]
    assert truncated(weights, 0, 0.6, 0.0) == [0, 1, 2]
    assert truncated(weights, 2, 0.6, 0.0) == [0, 1]
    assert truncated([1.0] * 10, 0, 0.5, 0.0) == [0, 1, 2, 3, 4]
    assert truncated(weights, 0, 1.0, 1.0) == [1]
    assert truncated(weights, 0, 1e-300, 0.0) == [1]


def test_top_k_beyond_the_vocabulary_is_all() -> None:
    logits = random_logits(300, 10, scale=1.0)
    all_tokens, _ = sample(make(10, SamplingParams(seed=1)), logits, [0] * 300, range(300))
    for top_k in (-1, 10, 2**31 - 1):
        sampler = make(10, SamplingParams(seed=1, top_k=top_k))
        assert sample(sampler, logits, [0] * 300, range(300))[0] == all_tokens


# --- greedy and temperature -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_takes_the_lowest_id_of_the_likeliest(dtype: torch.dtype) -> None:
    logits = random_logits(6, 1003).to(dtype)
    logits[:, [1002, 700, 77]] = 50.0
    sampler = make(1003, *[SamplingParams(temperature=0)] * 6)
    assert sample(sampler, logits)[0] == [77] * 6


@pytest.mark.parametrize("temperature", [1e-300, 9e-6, 1e-5, 1e-4])
def test_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    logits = random_logits(50, 1003, scale=30.0)
    sampler = make(1003, *[SamplingParams(temperature=temperature, seed=i) for i in range(50)])
    assert sample(sampler, logits)[0] == logits.argmax(-1).tolist()


def test_a_huge_temperature_is_even_and_respects_what_is_impossible() -> None:
    logits = random_logits(1, 8).repeat(20_000, 1)
    logits[:, 3] = -torch.inf
    sampler = make(8, SamplingParams(temperature=1e308, seed=1))
    tokens, _ = sample(sampler, logits, [0] * 20_000, range(20_000))
    expected = np.full(8, 20_000 / 7)
    expected[3] = 0
    check_counts(np.bincount(tokens, minlength=8), expected)


# --- batches --------------------------------------------------------------------------------------


def mixed_params() -> list[SamplingParams]:
    mixed: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {"seed": 1},
        {"seed": -1, "temperature": 0.7},
        {"seed": -(2**63), "top_k": 5},
        {"seed": 2**63 - 1, "top_p": 0.9},
        {"seed": 4, "min_p": 0.1, "logprobs": 0},
        {"seed": 5, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "min_tokens": 9},
    ]
    return [SamplingParams(**options) for options in mixed] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_samples_alone_as_in_any_batch(dtype: torch.dtype) -> None:
    params = mixed_params()
    sampler = make(1003, *params, choices=[row // 8 for row in range(32)])
    logits = random_logits(32, 1003).to(dtype)
    positions = np.arange(32) + PROMPT
    together, _ = sample(sampler, logits, range(32), positions)
    order = np.random.default_rng(0).permutation(32)
    shuffled, _ = sample(sampler, logits[torch.from_numpy(order)], order, positions[order])
    alone = [
        sample(sampler, logits[row : row + 1], [row], [positions[row]])[0][0] for row in range(32)
    ]
    assert together == alone
    assert shuffled == [together[row] for row in order]


def test_greedy_rows_are_not_disturbed_by_random_ones() -> None:
    params = mixed_params()
    logits = random_logits(32, 1003)
    tokens, _ = sample(make(1003, *params), logits)
    greedy = [row for row in range(32) if params[row].greedy]
    assert [tokens[row] for row in greedy] == logits[greedy].argmax(-1).tolist()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_row_costs_only_itself(poison: float) -> None:
    params = mixed_params()
    sampler = make(1003, *params)
    logits = random_logits(32, 1003)
    healthy, _ = sample(sampler, logits)
    for row in range(8):
        poisoned = logits.clone()
        poisoned[row] = poison
        if row % 2:
            poisoned[row, :500] = 0.0
        tokens, _ = sample(sampler, poisoned)
        assert 0 <= tokens[row] < 1003
        assert tokens[:row] + tokens[row + 1 :] == healthy[:row] + healthy[row + 1 :]


def test_an_empty_step() -> None:
    assert sample(make(10, SamplingParams(seed=1)), torch.empty(0, 10)) == ([], None)


def test_a_row_is_given_out_again() -> None:
    sampler = make(10, SamplingParams(temperature=0, min_tokens=9, stop_token_ids=(1, 3, 4)))
    logits = torch.tensor([[0.0, 9, 8, 7, 6, 5, 4, 3, 2, 1]])
    assert sample(sampler, logits)[0] == [5]
    again = SamplingParams(temperature=0, min_tokens=9, stop_token_ids=(1,))
    sampler.enter(new_sequence(0, again))
    assert sample(sampler, logits)[0] == [3]
    sampler.enter(new_sequence(0, SamplingParams(temperature=0)))
    assert sample(sampler, logits) == ([1], None)


# --- min_tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.5}])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_stop_token_before_min_tokens(options: dict[str, Any], ignore_eos: bool) -> None:
    params = SamplingParams(
        min_tokens=3, stop_token_ids=(7, 10_000), ignore_eos=ignore_eos, **options
    )
    logits = torch.zeros(5, 10)
    logits[:, [EOS, 7]] = 100.0
    tokens, _ = sample(make(10, params), logits, [0] * 5, range(PROMPT, PROMPT + 5))
    assert not {EOS, 7} & set(tokens[:3])
    assert set(tokens[3:]) <= {EOS, 7}


# --- logprobs -------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = [
        SamplingParams(temperature=0, logprobs=2, min_tokens=4),
        SamplingParams(temperature=0),
        SamplingParams(seed=1, temperature=5.0, top_k=500, logprobs=0),
        SamplingParams(seed=2, temperature=5.0, top_p=0.9, logprobs=4),
    ]
    logits = random_logits(4, 1003).bfloat16()
    logits[0, EOS] = 90.0  # masked by min_tokens, and still the likeliest of the raw distribution
    tokens, out = sample(make(1003, *params), logits)
    assert out is not None
    assert out.width == 5
    assert codec.ints(out.index).tolist() == [0, 2, 3]
    ids = codec.ints(out.token_ids).reshape(3, 5)
    logprobs = codec.floats(out.logprobs).reshape(3, 5)
    raw = logits.float().log_softmax(-1).numpy()
    for m, (row, asked) in enumerate([(0, 2), (2, 0), (3, 4)]):
        assert ids[m, 0] == tokens[row]
        assert (ids[m, asked + 1 :] == -1).all()
        shown = ids[m, : asked + 1]
        assert logprobs[m, : asked + 1] == pytest.approx(raw[row, shown], abs=1e-5)
        likeliest = np.sort(raw[row])[::-1][:asked]
        assert logprobs[m, 1 : asked + 1] == pytest.approx(likeliest, abs=1e-5)
        assert codec.ints(out.rank)[m] == 1 + (raw[row] > raw[row, tokens[row]]).sum()
    assert ids[0, 1] == EOS
    assert codec.ints(out.rank)[0] == 2


def test_more_logprobs_than_tokens() -> None:
    _, out = sample(make(3, SamplingParams(temperature=0, logprobs=5)), torch.zeros(1, 3))
    assert out is not None
    assert out.width == 6
    ids = codec.ints(out.token_ids).tolist()
    assert ids[0] == 0
    assert sorted(ids[1:4]) == [0, 1, 2]
    assert ids[4:] == [-1, -1]
    assert codec.floats(out.logprobs)[:4] == pytest.approx(-np.log(3))


def test_no_logprobs_when_no_row_of_the_step_asked() -> None:
    sampler = make(10, SamplingParams(seed=1), SamplingParams(seed=1, logprobs=1))
    assert sample(sampler, torch.zeros(1, 10), [0])[1] is None
    assert sample(sampler, torch.zeros(1, 10), [1])[1] is not None
