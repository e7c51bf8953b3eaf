"""Replicas that share experts, on devices: what they agree on, and two of them as threads with
references of all kernels, each token by token against a CPU's runner that is alone.
"""

from __future__ import annotations

import os
import threading
from functools import partial

import numpy as np
import pytest
import torch
from executor.gpu.conftest import TwoRunners, load, random_tokens
from executor.gpu.one_replica import DP, MODEL, make_order, run_replicas
from executor.gpu.test_parallel import Meeting, ThreadCarrier

from executor.gpu import conftest
from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import runner
from ringcast.executor.gpu.graphs import LARGEST, at_least, batch_sizes
from ringcast.executor.gpu.lockstep import DECODE, MIXED, NOTHING, Agreed, agree, fit, words_of
from ringcast.executor.gpu.mixed_graphs import MixedGraphs
from ringcast.executor.gpu.parallel import Memory, Shape
from ringcast.executor.gpu.replicas import Long, PeerRows, RowLayout, join_process_rows
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.kernels.gpu.all_reduce import (
    all_reduce_add_rms_norm_reference,
    all_reduce_reference,
)
from ringcast.kernels.gpu.blocks import copy_blocks_reference
from ringcast.mq.errors import ConfigError
from ringcast.mq.messages import StepPlan, WaveStep

pytestmark = pytest.mark.interpreted  # test_lockstep_on_device.py has devices


class ThreadRows:
    """A RowGroup by references. seen: the rows of each exchange."""

    def __init__(self, rank: int, meeting: Meeting, shape: Shape) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting
        self.most_tokens = shape.tokens
        self._rows = torch.full((shape.tokens, shape.hidden), torch.nan, dtype=shape.dtype)
        self._parts = torch.full((self.size * shape.tokens, shape.hidden), torch.nan)
        self._all = torch.full_like(self._parts, torch.nan)
        self._exchanges, self.seen = 0, []

    def place_rows(self, x_TH):
        return self._rows[: len(x_TH)]

    def gather_rows(self, x_PH, pdl):
        self._exchanges += 1
        self.seen.append(len(x_PH))
        out = self._all[: self.size * len(x_PH)]
        with self._meeting.of_all(self.rank, x_PH) as parts:
            out.copy_(torch.cat(parts))
        return out

    def place_all(self, tokens):
        return self._parts[: self.size * tokens]

    def own_rows(self, part):
        self._exchanges += 1
        tokens = len(part) // self.size
        return part[self.rank * tokens : (self.rank + 1) * tokens]

    def _all_parts(self, part_TH, shown):
        rows = slice(self.rank * len(part_TH), (self.rank + 1) * len(part_TH))
        return [whole[rows] for whole in shown]

    def sum(self, part_TH, out_TH, add_to_TH=None, pdl=False):
        with self._meeting.of_all(self.rank, self._parts) as shown:
            all_reduce_reference(self._all_parts(part_TH, shown), out_TH, add_to_TH)

    def sum_add_rms_norm(self, part_TH, residual_TH, weight_H, out_TH, eps, update_weight_H, pdl):
        with self._meeting.of_all(self.rank, self._parts) as shown:
            all_reduce_add_rms_norm_reference(
                self._all_parts(part_TH, shown), residual_TH, weight_H, out_TH, eps,
                update_weight_H=update_weight_H,
            )  # fmt: skip

    def check_exchanges(self, mixtures):
        count, self._exchanges = self._exchanges, 0
        assert count == 2 * mixtures

    def leave(self):
        pass


class Replicas:
    """Two runners in threads. Each has a scheduler by hand, and a CPU's runner to compare with."""

    def __init__(self, spec, monkeypatch, **options) -> None:
        conftest.take_references(monkeypatch)
        conftest.take_routing_references(monkeypatch)
        monkeypatch.setattr(runner, "copy_blocks", copy_blocks_reference)
        self.rows, meeting, memory_fd = [None, None], Meeting(2), os.memfd_create("replicas")
        carriers = Meeting(2)
        self.carriers = [ThreadCarrier(engine, carriers) for engine in range(2)]

        def make(engine):
            def join(shape):
                self.rows[engine] = ThreadRows(engine, meeting, shape)
                return self.rows[engine]

            place = 0, torch.device("cpu"), memory_fd, join, engine, None, self.carriers[engine]
            return load(spec, GpuModelRunner, *place, **options, **DP)

        self.runners = self.on_all(make)
        os.close(memory_fd)
        groups = len(self.runners[0]._decoder.groups)
        options = {k: v for k, v in options.items() if "eplb" not in k}
        self.hands = [
            TwoRunners(mine, load(spec, CpuModelRunner, **options), 16, groups)
            for mine in self.runners
        ]
        for rows in self.rows:
            rows.seen.clear()

    def on_all(self, act):
        results, errors = [None, None], []

        def run(engine):
            try:
                results[engine] = act(engine)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(engine,)) for engine in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def run(self, *lengths):
        """A step of both. Returns the rows that each layer's exchange had."""
        for rows in self.rows:
            rows.seen.clear()
        self.outputs = self.on_all(lambda engine: self.hands[engine].run(lengths[engine]))
        seen = {(*rows.seen,) for rows in self.rows}
        assert len(seen) == 1, seen
        return seen.pop()

    def leave(self):
        for each in self.runners:
            each.leave()


@pytest.fixture
def replicas(specs, monkeypatch):
    made = []

    def make(name=MODEL, **options):
        made.append(Replicas(specs[name], monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        each.leave()


def test_each_has_the_tokens_that_it_has_alone(replicas):
    """Prompts beside decoding, beside nothing, both with prompts, one alone on either side."""
    r = replicas()
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
    batch = runner.GpuBatch(
        max_num_seqs=20,
        max_tokens=64,
        max_model_len=100,
        block_size=16,
        num_groups=1,
        num_slots=1,
        pad=partial(at_least, batch_sizes(20)),
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
        assert len(fitted.rows) == (0 if step is None else len(step.rows))
        slot = batch.take_slot()
        batch.fill(slot, fitted)
        assert slot.numbers[16:18].tolist() == tokens
        if kind == MIXED:
            graph = graphs.kind_of(fitted)
            found.add(None if graph is None else graph.tokens)
    if kind == MIXED:
        assert found == {rows if rows in counts else None}


def test_kinds_count_in_their_order():
    assert NOTHING < DECODE < MIXED
    words = np.array([[NOTHING, 0, 0], [DECODE, 3, 4], [MIXED, 2, 16]], np.int32)
    assert agree(words, []) == Agreed(MIXED, 16, pytest.approx([0, 3, 2]))


# --- memory and exchanges


@pytest.mark.parametrize("has_long", [False, True])
def test_rows_and_parts_lie_side_by_side(has_long):
    shape = Shape(4096, 2048, 0, 0, torch.bfloat16)
    layout = RowLayout(shape, 4, has_long)
    assert layout.most_tokens == LARGEST
    assert layout.parts - layout.rows == LARGEST * 4096
    assert layout.num_bytes - layout.parts == 4 * LARGEST * 4096
    with pytest.raises(ConfigError, match="rows of 20 bytes"):
        RowLayout(shape._replace(hidden=10), 2, has_long)


def test_long_exchanges_are_somebody_elses():
    memory_fd = os.memfd_create("replicas")
    shape = Shape(4, 8, 0, 0, torch.float32)
    short = join_process_rows(1, 2, memory_fd, shape)
    os.close(memory_fd)
    memory = short._own
    layout = RowLayout(shape._replace(tokens=2), 2, True)
    made = {"gather": 0, "sum": 0}

    def gather(out, x):
        made["gather"] += 1
        out.copy_(torch.cat([x * 10, x]))

    def add(part):
        made["sum"] += 1
        part.mul_(2)

    peers = Memory(memory, [memory.data_ptr()] * 2)
    group = PeerRows(1, shape, layout, peers, Long(gather, add))
    x, out = torch.arange(24.0).view(3, 8), torch.full((3, 8), torch.nan)
    assert group.place_rows(x) is x
    assert torch.equal(group.gather_rows(x, False), torch.cat([x * 10, x]))
    part = group.place_all(3)
    part.copy_(torch.cat([x, x + 1]))
    own = group.own_rows(part)
    group.sum(own, out)
    assert torch.equal(out, 2 * (x + 1))
    group.check_exchanges(1)
    with pytest.raises(AssertionError, match="0 exchanges of 1"):
        group.check_exchanges(1)
    with group.at_rest():
        group.gather_rows(x, False)
        group.own_rows(part)
    assert made == {"gather": 1, "sum": 1}
    assert group.place_rows(x[:2]).data_ptr() == memory.data_ptr() + layout.rows
    own = group.own_rows(group.place_all(2))
    assert (own.shape, group._place_of(own)) == ((2, 8), layout.parts + 2 * 32)


@pytest.mark.slow
def test_replicas_as_processes_with_every_kernel(specs):
    order = make_order(specs[MODEL], {"device": "cpu"}, [[9], [3]], num_tokens=3)
    answers = run_replicas(order, timeout=280)
    for engine, answer in enumerate(answers):
        assert answer.tokens == order.alone(CpuModelRunner, engine)
