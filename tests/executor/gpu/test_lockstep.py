"""Replicas that share experts, on devices: what they agree on, and two of them as threads with
references of all kernels, each token by token against a CPU's runner that is alone.
"""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest
import torch
from executor.gpu.conftest import random_tokens
from executor.gpu.one_replica import MODEL, make_order, run_replicas
from executor.gpu.thread_ranks import on_all
from executor.gpu.thread_replicas import replicas

from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import graphs as graphs_module
from ringcast.executor.gpu import step_launcher
from ringcast.executor.gpu.batch import HEADER, REPLICAS, GpuBatch
from ringcast.executor.gpu.graphs import at_least, batch_sizes
from ringcast.executor.gpu.lockstep import (
    DECODE,
    MIXED,
    NOTHING,
    Agreed,
    Lockstep,
    agree,
    fit,
    words_of,
)
from ringcast.executor.gpu.mixed_graphs import MixedGraphs
from ringcast.executor.gpu.replicas import Ranks
from ringcast.kernels.gpu.decode_plan import DecodeConfig
from ringcast.mq.config import EngineConfig
from ringcast.mq.errors import ConfigError
from ringcast.mq.messages import StepPlan, WaveStep
from ringcast.mq.sampling_params import SamplingParams

pytestmark = pytest.mark.interpreted  # test_lockstep_on_device.py has devices
__all__ = ["replicas"]  # a fixture


@pytest.mark.parametrize(
    ("ranks", "hosts"), [(1, False), (1, True), (2, False), (2, True)], ids=str
)
def test_each_has_the_tokens_that_it_has_alone(ranks, hosts, replicas):
    """Prompts beside decoding, beside nothing, both with prompts, one alone on either side."""
    r = replicas(ranks=ranks, hosts=hosts)
    held = [each._decoder.config.experts for each in r.runners]
    assert [(e.first, e.held) for e in held] == [
        (i * 2 // ranks, 2 // ranks) for i in range(2 * ranks)
    ]
    a, b = r.hands
    a.enter(3, random_tokens(1, 30))
    assert r.run({3: 30}, {}) == (32, 32)
    b.enter(0, random_tokens(2, 20))
    assert r.run({3: 1}, {0: 20}) == (32, 32)
    assert r.run({3: 1}, {0: 1}) == (1, 1)
    for row in (1, 2, 4):
        a.enter(row, random_tokens(row, 2))
    assert r.run({1: 2, 2: 2, 4: 2, 3: 1}, {0: 1}) == (16, 16)
    assert r.run({1: 1, 2: 1, 4: 1, 3: 1}, {0: 1}) == (4, 4)
    assert r.run({}, {0: 1}) == (1, 1)
    assert r.run({1: 1, 3: 1}, {}) == (2, 2)
    assert r.run({}, {}) == ()
    b.enter(5, random_tokens(9, 40))
    assert r.run({1: 1}, {0: 1, 5: 40}) == (48, 48)
    assert r.run({1: 1}, {0: 1, 5: 1}) == (2, 2)
    assert [len(a.known[row]) for row in (1, 3)] == [7, 36]
    assert [len(b.known[row]) for row in (0, 5)] == [27, 42]


def test_dense_layers_exchange_nothing(replicas):
    r = replicas("qwen3 experts of 4")
    r.hands[1].enter(2, random_tokens(1, 3))
    assert r.run({}, {2: 3}) == (16,)
    assert r.run({}, {2: 1}) == (1,)


def note_replays(runner):
    """What graphs it replays, which launch what they would be captured from."""
    launcher, replayed = runner._launcher, []
    graphs, mixed = launcher.plan_graphs()

    def replay(run, kind):
        replayed.append(kind)
        run(kind)

    def stand_ins(kinds, run):
        return {kind: SimpleNamespace(replay=partial(replay, run, kind)) for kind in kinds}

    graphs._graphs = stand_ins(graphs.kinds(), lambda kind: launcher.run_decode(*kind))
    mixed._graphs = stand_ins(mixed.kinds(), launcher.run_mixed)
    launcher.graphs, launcher.mixed_graphs = graphs, mixed
    runner._lockstep.counts = mixed.counts
    return replayed


@pytest.mark.parametrize("hosts", [True, False])
def test_over_nccl_all_replay_the_same_graphs(hosts, replicas, monkeypatch):
    """Whether sampling is plain, contexts are short, or prompts come alone. Elsewhere each takes
    the one that suits it.
    """
    monkeypatch.setattr(graphs_module, "BOUNDS", (20,))
    monkeypatch.setattr(step_launcher, "launches_of", lambda size, bound, *_: (size == 1, bound))
    r = replicas(hosts=hosts)
    replayed = [note_replays(each) for each in r.runners]
    assert [each._launcher.fuses for each in r.runners] == [not hosts] * 2
    a, b = r.hands
    a.enter(0, random_tokens(1, 30))
    b.enter(0, random_tokens(2, 9), params=SamplingParams(temperature=0.0, logprobs=1))
    r.run({0: 30}, {0: 8})
    r.run({0: 1}, {0: 1})
    r.run({}, {0: 1})
    a.enter(1, random_tokens(3, 7))
    r.run({0: 1, 1: 7}, {0: 1})
    b.enter(3, random_tokens(4, 12))
    r.run({}, {3: 5})
    r.run({0: 1}, {3: 7})
    r.run({0: 1, 1: 1}, {0: 1, 3: 1})
    sizes = [[kind[0] for kind in each] for each in replayed]
    assert sizes == [[64, 1, 1, 64, 64, 64, 2]] * 2
    assert (replayed[0] == replayed[1]) == hosts


def test_outputs_say_whether_any_has_work(replicas):
    r = replicas()

    def launch(engine, place):
        plan = StepPlan(engine, b"", [], b"", b"", b"", b"", b"", b"", wave=place)
        return r.runners[engine].launch(plan).read().any_work

    for work, any_work in (((True, False), True), ((False, False), False)):
        places = [WaveStep(1, 1, has_work) for has_work in work]
        said = r.on_all(lambda engine, places=places: launch(engine, places[engine]))
        assert said == [any_work, any_work]
    with pytest.raises(AssertionError, match="parted: replica 0 is in step 1 of wave 1"):
        r.on_all(lambda engine: launch(engine, WaveStep(1, 1 + engine, False)))


def test_what_differs_at_start_is_found(replicas):
    r = replicas()
    alike = [each._lockstep.check_alike for each in r.runners]
    r.on_all(lambda engine: alike[engine]("graphs", [1, 2]))
    with pytest.raises(AssertionError, match="replicas differ in graphs"):
        r.on_all(lambda engine: alike[engine]("graphs", [1, engine]))


# --- what they agree on


def step_of(lengths: list[int], known: int = 5):
    """Of the device's batch, of 24 rows."""
    batch = GpuBatch(
        max_num_seqs=20,
        max_tokens=64,
        max_model_len=100,
        block_size=16,
        num_groups=1,
        num_slots=1,
        pad=partial(at_least, batch_sizes(20)),
        windows=[0],
        decode=DecodeConfig(4, 16, 4, 2),
        device=torch.device("cpu"),
    )
    rows = np.arange(len(lengths), dtype=np.int32)
    batch.num_known[rows] = np.array(lengths, np.int32) + known
    batch.num_computed[rows] = known
    return batch, batch.lay_out(rows, np.array(lengths, np.int32))


@pytest.mark.parametrize(
    ("lengths", "counts", "kind", "rows"),
    [
        ([[], []], [64], None, 0),
        ([[1, 1, 1], []], [64], DECODE, 4),
        ([[1], [1] * 9], [64], DECODE, 16),
        ([[1], [7]], [], MIXED, 16),
        ([[1], [7]], [32, 64], MIXED, 32),
        ([[1] * 20, [3]], [32, 64], MIXED, 32),
        ([[1] * 20, [3]], [], MIXED, 24),
        ([[33], [40, 1]], [32], MIXED, 48),
    ],
)
def test_all_take_the_largest_step(lengths, counts, kind, rows):
    made = [step_of(each) if each else (step_of([1])[0], None) for each in lengths]
    agreed = agree(np.array([words_of(step) for _, step in made], np.int32), counts)
    if kind is None:
        assert agreed is None
        return
    tokens = [sum(each) for each in lengths]
    assert (agreed.kind, agreed.rows, agreed.num_tokens.tolist()) == (kind, rows, tokens)
    graphs = MixedGraphs(counts, 24, 2)
    found = set()
    for batch, step in made:
        fitted = fit(step, agreed, batch.pad)
        assert (fitted.is_decode, fitted.tokens) == (kind == DECODE, rows)
        assert fitted.decodes <= rows
        if kind == DECODE:
            assert fitted.longest == 6
        assert len(fitted.rows) == (0 if step is None else len(step.rows))
        slot = batch.take_slot()
        batch.fill(slot, fitted)
        assert slot.numbers[REPLICAS : REPLICAS + 2].tolist() == tokens
        if kind == MIXED:
            graph = graphs.kind_of(fitted)
            found.add(None if graph is None else graph.tokens)
    if kind == MIXED:
        assert found == {rows if rows in counts else None}


def test_there_is_room_for_as_many_replicas_as_there_can_be():
    (limits,) = get_type_hints(EngineConfig, include_extras=True)["data_parallel_size"].__metadata__
    assert REPLICAS + limits.le <= HEADER


def test_kinds_count_in_their_order():
    assert NOTHING < DECODE < MIXED
    words = np.array([[NOTHING, 0, 0, 0], [DECODE, 3, 4, 9], [MIXED, 2, 16, 0]], np.int32)
    assert agree(words, []) == Agreed(MIXED, 16, 9, pytest.approx([0, 3, 2]))


def test_files_are_shared_by_owner_and_rows_are_alike():
    """Of two replicas of two ranks: a file for each, as on two hosts, and one for all."""
    memory_fd = os.memfd_create("replicas")

    def meet(worker):
        ranks = Ranks(worker % 2, 2, worker // 2, 2)
        return Lockstep(ranks, memory_fd, lambda sequences: sequences, timeout=20.0)

    made = on_all(meet, range(4))
    os.close(memory_fd)
    own = on_all(lambda one: os.fstat(one.share_file(2 * one.ranks.engine)).st_ino, made)
    assert own[0] == own[1] != own[2] == own[3]
    on_all(lambda one: one.check_rows(torch.bfloat16, 64), made)
    with pytest.raises(ConfigError, match="replica 1 has rows of 65 numbers of 2 bytes"):
        on_all(lambda one: one.check_rows(torch.bfloat16, 64 + one.ranks.engine), made)
    for one in made:
        one.leave()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_as_processes_with_every_kernel(ranks, specs):
    options = {"device": "cpu", "tensor_parallel_size": ranks}
    order = make_order(specs[MODEL], options, [[9], [3]], num_tokens=3)
    answers = run_replicas(order, timeout=280 * ranks)
    for engine, answer in enumerate(answers):
        assert answer.tokens == order.alone(CpuModelRunner, engine)
