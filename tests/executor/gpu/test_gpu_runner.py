"""Tiny models through the device's runner, token by token against the CPU's on the same plans. Here
under Triton's interpreter where there is no device.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from executor.gpu.conftest import GREEDY, MODELS, SHAPE, random_tokens
from kernels.gpu.devices import DEVICE

from ringcast.executor.gpu import batch_linears
from ringcast.executor.gpu.warm_up import WarmUp
from ringcast.kernels.gpu import batch_linear_table
from ringcast.mq import codec
from ringcast.mq.sampling_params import SamplingParams

SLOW_BUT_QWEN3 = [
    name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel(name, pair):
    s = pair(name, kernels=True)
    s.enter(3, random_tokens(1, 14))
    s.run({3: 14})
    s.run({3: 1})  # alone: a way of its own
    s.enter(0, random_tokens(2, 9))
    s.run({0: 9, 3: 1})
    s.run({0: 1, 3: 1})
    assert [len(s.known[row]) for row in (0, 3)] == [11, 18]


TILE = batch_linear_table.Config(32, 16, 32, 1, 4, 2, 1, swap=False, tma=True)


@pytest.mark.parametrize(
    ("name", "which"),
    [*itertools.product(MODELS, ["all", "updates", "others"]), ("qwen3", "tiles")],
)
def test_products_of_few_tokens(name, which, pair, monkeypatch):
    """As if they had been measured to be faster: all, those that are added, the others; and all by
    the other kernel.
    """

    def configuration(rows, inputs, gated, tokens, itemsize):
        if which == "tiles":
            return TILE
        chosen = which == "all" or (which == "updates") == (rows == 32)
        return batch_linear_table.rule(rows, inputs, gated, tokens, 4) if chosen else None

    monkeypatch.setattr(batch_linears, "configuration", configuration)
    monkeypatch.setattr(
        batch_linears, "batch_linear", counted := Counted(batch_linears.batch_linear)
    )
    # Graphs call nothing when they are replayed.
    s = pair(name, **({"enforce_eager": True} if DEVICE.type == "cuda" else {}))
    counted.calls = 0  # of the warm-up
    s.enter(3, random_tokens(1, 14))
    s.enter(0, random_tokens(2, 9))
    s.run({3: 14, 0: 9})
    assert not counted.calls  # prefill is cuBLAS's
    for _ in range(3):
        s.run({0: 1, 3: 1})
    layers = (SHAPE | MODELS[name])["num_hidden_layers"]
    added = 2 * layers * (name != "gemma3")  # whose updates have a norm of their own
    others = 2 * layers + 1
    assert counted.calls == 3 * ((which != "others") * added + (which != "updates") * others)


class Counted:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        self.function(*args, **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_chunks_and_decode_together(name, pair):
    s = pair(name)
    s.enter(3, random_tokens(1, 43))
    s.run({3: 43})
    s.run({3: 1})
    s.enter(0, random_tokens(2, 37))
    s.enter(5, random_tokens(3, 1))
    s.run({0: 10, 3: 1, 5: 1})  # a chunk, a decode step, a prompt of one token
    s.run({5: 1, 0: 1, 3: 1})  # another order; a chunk of one token is not sampled
    s.run({3: 1, 0: 26, 5: 1})
    for _ in range(3):  # into the next block
        s.run({0: 1, 3: 1, 5: 1})
    assert [len(s.known[row]) for row in (0, 3, 5)] == [41, 51, 7]


def test_two_steps_are_launched_ahead(pair):
    s = pair("qwen3")
    s.enter(1, random_tokens(4, 15))
    s.enter(2, random_tokens(5, 3))
    s.launch({1: 15, 2: 3})
    for _ in range(3):  # beyond the first block
        s.launch({1: 1, 2: 1})
        s.read()
    s.launch({2: 1})
    s.launch({1: 1})
    for _ in range(3):
        s.read()
    assert [len(s.known[row]) for row in (1, 2)] == [20, 8]


def test_a_preempted_sequence_comes_back_and_its_row_is_given_out_again(pair):
    s = pair("llama")
    s.enter(0, random_tokens(6, 12))
    s.run({0: 12})
    s.run({0: 1})
    known = s.known[0]
    s.remove(0)
    s.enter(0, random_tokens(7, 5))
    s.enter(4, known, num_prompt=12)
    s.run({0: 5, 4: len(known)})
    s.run({0: 1, 4: 1})


def test_forks_copy_their_partial_block(pair):
    s = pair("llama")
    prompt = random_tokens(8, 20)
    s.enter(1, prompt)
    s.run({1: 20})
    forked = [s.blocks[1][0], s.copy(s.blocks[1][1])]
    s.enter(2, [*prompt, 17], computed=20, blocks=forked)
    for _ in range(2):
        s.run({1: 1, 2: 1})
    assert s.known[1] != s.known[2]


def test_a_prefix_from_the_cache_leaves_one_token(pair):
    s = pair("qwen3")
    prompt = random_tokens(9, 33)
    s.enter(0, prompt)
    s.run({0: 33})
    s.enter(3, [*prompt[:32], 5], computed=32, blocks=s.blocks[0][:2])
    s.run({3: 1})  # enters with a step that is all decode
    s.run({0: 1, 3: 1})


class Replayed:
    """Stands where the graphs are: a replay launches what is captured."""

    def __init__(self, launcher) -> None:
        self._launcher, self.replays = launcher, []

    def find(self, *kind):
        self.replays.append(kind)
        return SimpleNamespace(replay=lambda: self._launcher.run_decode(*kind))


@pytest.mark.interpreted  # a device has real graphs
@pytest.mark.parametrize("name", SLOW_BUT_QWEN3)
def test_what_graphs_are_captured_from(name, pair):
    s = pair(name)
    graphs = s.mine._launcher.graphs = Replayed(s.mine._launcher)
    for row, length in ((3, 15), (0, 5), (1, 2)):
        s.enter(row, random_tokens(row, length))
    s.run({3: 15, 0: 5, 1: 2})
    assert graphs.replays == []
    s.launch({1: 1})
    for _ in range(3):
        s.launch({3: 1, 1: 1, 0: 1})
        s.read()
    s.enter(5, random_tokens(5, 1))
    s.launch({3: 1, 5: 1})
    s.read()
    s.read()
    sizes = [size for size, _, _ in graphs.replays]
    assert sizes == [1, 4, 4, 4, 2]
    s.enter(2, random_tokens(6, 1), params=SamplingParams(temperature=0.0, logprobs=1))
    s.run({2: 1, 0: 1})
    assert graphs.replays[-1] == (2, 129, False)


@pytest.mark.interpreted  # on a device it runs at every load
def test_a_warm_up_touches_nothing(pair, monkeypatch):
    s = pair("gemma3")
    mine = s.mine
    monkeypatch.setattr(mine._sampler, "warm_up", lambda logits: None)  # slow under the interpreter
    parts = (mine._batch, mine._decoder, mine._sampler, mine._launcher.bounds_of)
    warm_up = WarmUp(*parts, programmatic=True)
    jobs = []
    with torch.inference_mode():
        warm_up.run(lambda done, total: jobs.append((done, total)))
        warm_up.copy_nothing()
    assert jobs[-1] == (len(jobs) - 1, len(jobs) - 1)
    assert not mine._batch.tokens_RL.any()
    assert not mine._batch.tables_GRB.any()
    assert not mine._decoder.cache[:, :, 1:].any()
    s.enter(3, random_tokens(3, 9))
    s.run({3: 9})
    s.run({3: 1})


def test_plans_without_rows(pair):
    s = pair("llama")
    empty = s.run({})
    assert (empty.rows, empty.token_ids) == (b"", b"")
    s.enter(2, random_tokens(10, 4))
    s.run({})
    s.run({2: 4})


def test_changes_that_no_slot_holds(pair, monkeypatch):
    s = pair("llama")
    for slot in s.mine._batch._slots:
        monkeypatch.setattr(slot, "room", lambda: 12)
    s.enter(2, random_tokens(10, 19))
    s.run({2: 19})
    s.run({2: 1})


def test_options_beside_plain_rows(pair):
    s = pair("llama", against=False)
    s.enter(0, random_tokens(11, 6), params=SamplingParams(temperature=0.0, logprobs=2))
    s.enter(1, random_tokens(12, 4), params=SamplingParams(temperature=0.0, allowed_token_ids=[9]))
    s.enter(2, random_tokens(13, 4), params=GREEDY)
    first = s.run({0: 6, 1: 4, 2: 4})
    assert first.logprobs is not None
    index = codec.ints(first.logprobs.index).tolist()
    assert [codec.ints(first.rows)[i] for i in index] == [0]
    second = s.run({0: 1, 1: 1, 2: 1})
    assert second.logprobs.width == 3
    assert s.known[1][-2:] == [9, 9]
    s.remove(0)
    s.remove(1)
    assert s.run({2: 1}).logprobs is None
    plain = pair("llama")
    plain.enter(2, random_tokens(13, 4))
    plain.run({2: 4})
    plain.run({2: 1})
    assert plain.known[2] == s.known[2][:6]


def test_prompt_logprobs_are_the_cpus(pair):
    s = pair("qwen3", max_num_batched_tokens=24)
    reference = s._reference
    outputs, execute = [], reference.execute
    reference.execute = lambda plan: outputs.append(execute(plan)) or outputs[-1]
    s.enter(4, random_tokens(14, 21), params=SamplingParams(temperature=0.0, prompt_logprobs=3))
    s.enter(1, random_tokens(15, 2))
    mine = [s.run({4: 11, 1: 2}), s.run({4: 1, 1: 1}), s.run({4: 9, 1: 1}), s.run({4: 1, 1: 1})]
    for output, expected in zip(mine, outputs, strict=True):
        # Tables may be cut elsewhere.
        assert _flat(output) == pytest.approx(_flat(expected), abs=1e-4)
    assert [len(_flat(output)) for output in mine] == [11 * 10, 10, 8 * 10, 0]


def _flat(output) -> list[float]:
    """(row, place, rank, and four of token id and log-probability) of each token, in a row."""
    numbers = []
    for part in output.prompt_logprobs:
        table = part.logprobs
        ids = codec.ints(table.token_ids).reshape(-1, table.width)
        logprobs = np.frombuffer(table.logprobs, np.float32).reshape(ids.shape)
        for i, rank in zip(codec.ints(table.index), codec.ints(table.rank), strict=True):
            numbers += [part.first + i, rank, *ids[i], *logprobs[i]]
    return [float(number) for number in numbers]
