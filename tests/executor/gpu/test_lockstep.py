"""Replicas that share experts, on devices: what they agree on, and two of them as threads with
references of all kernels, each token by token against a CPU's runner that is alone.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch
from executor.gpu.conftest import TwoRunners, load, random_tokens, with_defaults
from executor.gpu.one_replica import DP, MODEL, make_order, run_replicas
from executor.gpu.test_parallel import Meeting, ThreadCarrier, ThreadGroup

from executor.gpu import conftest
from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import nccl, replica_joining, runner
from ringcast.executor.gpu import replicas as replicas_module
from ringcast.executor.gpu.batch import HEADER, REPLICAS
from ringcast.executor.gpu.graphs import LARGEST, at_least, batch_sizes
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
from ringcast.executor.gpu.parallel import FEED_FORWARD, Alone, Layout, Memory, Shape, map_peers
from ringcast.executor.gpu.replica_joining import Joined, Plan
from ringcast.executor.gpu.replicas import Long, LongRows, PeerRows, Ranks, RowLayout
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.runner import OtherHosts
from ringcast.kernels.gpu.all_reduce import (
    FLAGS_BYTES,
    all_reduce_add_rms_norm_reference,
    all_reduce_reference,
)
from ringcast.kernels.gpu.blocks import copy_blocks_reference
from ringcast.kernels.gpu.decode_plan import DecodeConfig
from ringcast.kernels.gpu.norm import add_rms_norm_reference
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError
from ringcast.mq.messages import StepPlan, WaveStep

pytestmark = pytest.mark.interpreted  # test_lockstep_on_device.py has devices


class ThreadRows:
    """A RowGroup by references. seen: the rows of each exchange."""

    programmatic = True

    def __init__(self, ranks: Ranks, across: Meeting, everyone: Meeting, shape: Shape) -> None:
        self.rank, self.size = ranks.engine, ranks.replicas
        self._worker, self._across, self._everyone = ranks.worker, across, everyone
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
        with self._across.of_all(self.rank, x_PH) as parts:
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
        with self._everyone.of_all(self._worker, self._parts) as shown:
            all_reduce_reference(self._all_parts(part_TH, shown), out_TH, add_to_TH)

    def sum_add_rms_norm(self, part_TH, residual_TH, weight_H, out_TH, eps, update_weight_H, pdl):
        with self._everyone.of_all(self._worker, self._parts) as shown:
            all_reduce_add_rms_norm_reference(
                self._all_parts(part_TH, shown), residual_TH, weight_H, out_TH, eps,
                update_weight_H=update_weight_H,
            )  # fmt: skip

    def check_exchanges(self, mixtures):
        count, self._exchanges = self._exchanges, 0
        assert count == 2 * mixtures

    def leave(self):
        pass


class HostRows(LongRows):
    """As of replicas on several hosts, with references in the place of NCCL."""

    def __init__(self, ranks: Ranks, across: Meeting, shape: Shape, own: object) -> None:
        long = Long(self._from_all, self._to_all)
        super().__init__(ranks, shape, own, torch.device("cpu"), long)
        for buffer in (self._all_x, self._all_y, self._own_y):
            buffer.fill_(torch.nan)
        self._meeting, self.seen = across, []

    def _from_all(self, out, x_PH):
        self.seen.append(len(x_PH))
        with self._meeting.of_all(self.rank, x_PH) as parts:
            out.copy_(torch.cat(parts))

    def _to_all(self, out, part):
        with self._meeting.of_all(self.rank, part) as shown:
            out.copy_(sum(shown)[self.rank * len(out) : (self.rank + 1) * len(out)])


class Side:
    """The runners of one replica's ranks, which launch a plan together."""

    def __init__(self, runners) -> None:
        self.runners = runners

    def launch(self, plan):
        pending = on_all(lambda runner: runner.launch(plan), self.runners)
        outputs = [each.read() for each in pending]
        assert all(output.token_ids == outputs[0].token_ids for output in outputs)
        return pending[0]


def on_all(act, things):
    results, errors = [None] * len(things), []

    def run(i):
        try:
            results[i] = act(things[i])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(things))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Replicas:
    """Two replicas, whose runners are threads. Each has a scheduler by hand, and a CPU's runner to
    compare with.
    """

    def __init__(self, spec, monkeypatch, ranks=1, hosts=False, **options) -> None:
        conftest.take_references(monkeypatch)
        conftest.take_routing_references(monkeypatch)
        monkeypatch.setattr(runner, "copy_blocks", copy_blocks_reference)
        monkeypatch.setattr(replicas_module, "add_rms_norm", add_rms_norm_reference)
        self.rows, memory_fd = {}, os.memfd_create("replicas")
        self.engines = range(2)
        everyone, across = Meeting(2 * ranks), [Meeting(2) for _ in range(ranks)]
        within, carriers = [Meeting(ranks) for _ in self.engines], Meeting(2 * ranks)
        self.carriers = [ThreadCarrier(worker, carriers) for worker in range(2 * ranks)]

        def make(worker):
            engine, rank = divmod(worker, ranks)
            place = Ranks(rank, ranks, engine, 2)

            def join(shape):
                own = ThreadGroup(rank, within[engine], shape) if ranks > 1 else Alone()
                if hosts:
                    rows = HostRows(place, across[rank], shape, own)
                else:
                    rows = ThreadRows(place, across[rank], everyone, shape)
                self.rows[worker] = rows
                return Joined(own, rows)

            more = (torch.device("cpu"), memory_fd, join, engine, None, None)
            parallel = {"tensor_parallel_size": ranks, **DP}
            carrier = self.carriers[worker]
            return load(spec, GpuModelRunner, rank, *more, carrier, **options, **parallel)

        self.runners = on_all(make, range(2 * ranks))
        os.close(memory_fd)
        groups = len(self.runners[0]._decoder.groups)
        options = {k: v for k, v in options.items() if "eplb" not in k}
        self.hands = [
            TwoRunners(Side(mine), load(spec, CpuModelRunner, **options), 16, groups)
            for mine in (self.runners[:ranks], self.runners[ranks:])
        ]

    def on_all(self, act):
        return on_all(act, self.engines)

    def run(self, *lengths):
        """A step of both. Returns the rows that each layer's exchange had."""
        for rows in self.rows.values():
            rows.seen.clear()
        self.outputs = self.on_all(lambda engine: self.hands[engine].run(lengths[engine]))
        seen = {(*rows.seen,) for rows in self.rows.values()}
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
    words = np.array([[NOTHING, 0, 0], [DECODE, 3, 4], [MIXED, 2, 16]], np.int32)
    assert agree(words, []) == Agreed(MIXED, 16, pytest.approx([0, 3, 2]))


# --- memory and exchanges


def test_ranks_of_one_number_and_of_one_replica():
    ranks = Ranks(1, 2, 2, 3)
    assert (ranks.worker, ranks.workers, ranks.dealt) == (5, 6, (5, 6))
    assert ranks.across == [[0, 2, 4], [1, 3, 5]]
    assert ranks.within == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("has_long", [False, True])
def test_rows_and_parts_lie_behind_flags_of_their_own(has_long):
    shape = Shape(4096, 2048, 100, 8, torch.bfloat16)
    layout = RowLayout(shape, 4, 2, has_long)
    assert layout.most_tokens == LARGEST
    assert layout.sums - FLAGS_BYTES == LARGEST * 4096
    assert layout.num_bytes - layout.sums - FLAGS_BYTES == 4 * LARGEST * 4096
    plan = Plan(Ranks(0, 2, 1, 4), shape, has_long)
    assert plan.num_bytes == Layout(shape, 2, has_long).num_bytes + layout.num_bytes
    assert Plan(Ranks(0, 1, 1, 4), shape, has_long).num_bytes == layout.num_bytes
    with pytest.raises(ConfigError, match="rows of 20 bytes"):
        RowLayout(shape._replace(hidden=10), 2, 1, has_long)


def test_who_reads_whose_memory():
    """Of the second rank of the second replica: its replica's, those of its number, and all."""
    plan = Plan(Ranks(1, 2, 1, 2), Shape(4, 8, 16, 4, torch.float32), has_long=False)
    addresses = [1000, 2000, 3000, 4000]
    own = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    group, rows = plan.place(Memory(own, addresses))
    first, sums = plan.own.num_bytes, plan.rows.sums
    peers = group._peers, rows._gathering, rows._summing
    assert [each.rank for each in peers] == [1, 1, 3]
    assert peers[0].addresses.tolist() == [3000, 4000]
    assert peers[1].addresses.tolist() == [2000 + first, 4000 + first]
    assert peers[2].addresses.tolist() == [address + first + sums for address in addresses]
    update = torch.zeros(4, 8)
    places = [rows.place_rows(update), rows.place_all(4), group.place(FEED_FORWARD, update)]
    starts = [each.data_ptr() - own.data_ptr() for each in places]
    assert starts == [first + FLAGS_BYTES, first + sums + FLAGS_BYTES, plan.own.sums[FEED_FORWARD]]
    ends = [start + each.nbytes for start, each in zip(starts, places, strict=True)]
    assert (ends[0] <= first + sums, ends[1] <= plan.num_bytes) == (True, True)


def test_long_exchanges_are_somebody_elses():
    memory_fd, ranks = os.memfd_create("replicas"), Ranks(0, 1, 1, 2)
    shape = Shape(4, 8, 0, 0, torch.float32)
    plan = Plan(ranks, shape._replace(tokens=2), has_long=True)
    memory = map_peers(1, 2, memory_fd, plan.num_bytes)
    os.close(memory_fd)
    made = {"gather": 0, "scatter": 0}

    def gather(out, x):
        made["gather"] += 1
        out.copy_(torch.cat([x * 10, x]))

    def scatter(out, part):
        made["scatter"] += 1
        out.copy_(2 * part[len(out) :])

    group = PeerRows(ranks, shape, Alone(), plan.rows, memory, Long(gather, scatter))
    assert group.most_tokens == 2
    x, out = torch.arange(24.0).view(3, 8), torch.full((3, 8), torch.nan)
    assert group.place_rows(x) is x
    assert torch.equal(group.gather_rows(x, False), torch.cat([x * 10, x]))
    part = group.place_all(3)
    part.copy_(torch.cat([x, x + 1]))
    own = group.own_rows(part)
    group.sum(own, out)
    assert torch.equal(out, 2 * (x + 1))
    group.sum(own, out, x)
    assert torch.equal(out, 3 * x + 2)
    group.check_exchanges(1)
    with pytest.raises(AssertionError, match="0 exchanges of 1"):
        group.check_exchanges(1)
    with group.at_rest():
        group.gather_rows(x, False)
        group.own_rows(part)
    assert made == {"gather": 1, "scatter": 1}
    start = memory.own.data_ptr()
    assert group.place_rows(x[:2]).data_ptr() == start + FLAGS_BYTES
    own = group.own_rows(group.place_all(2))
    assert own.shape == (2, 8)
    assert own.data_ptr() == start + plan.rows.sums + FLAGS_BYTES + 2 * 32
    assert made == {"gather": 1, "scatter": 1}


def test_what_a_replicas_ranks_have_added_up_they_add_up_among_themselves():
    """Of several hosts: their own sums go through the replica's group, and aren't programmatic."""
    own, ranks, shape = (
        mock.MagicMock(most_tokens=3),
        Ranks(1, 2, 0, 2),
        Shape(4, 8, 0, 0, torch.float32),
    )
    own.place.side_effect = lambda which, x: x
    long = Long(mock.Mock(), mock.Mock())
    group = LongRows(ranks, shape, own, torch.device("cpu"), long)
    assert group.most_tokens == 3
    part = group.own_rows(group.place_all(3))
    assert part.shape == (3, 8)
    assert own.place.call_args.args[0] == FEED_FORWARD
    assert long.scatter.call_args.args[0] is part
    x, weight = torch.ones(3, 8), torch.ones(8)
    group.sum(part, x, x, pdl=True)
    assert own.sum.call_args == mock.call(part, x, x)
    group.sum_add_rms_norm(part, x, weight, x, 1e-6, None, True)
    assert own.sum_add_rms_norm.call_args == mock.call(part, x, weight, x, 1e-6, None, False)
    with group.at_rest():
        group.gather_rows(x, False)
    own.at_rest.return_value.__enter__.assert_called_once()
    long.gather.assert_not_called()
    group.leave()
    own.leave.assert_called_once()


@pytest.mark.parametrize("spans", [False, True])
def test_where_replicas_are_says_which_way_they_take(spans, monkeypatch):
    """Of two ranks each: all on one host, or a replica on each of two."""
    taken = []

    def note(name, result):
        return lambda *arguments: taken.append((name, arguments)) or result

    own, between = mock.Mock(most_tokens=4), mock.Mock()
    monkeypatch.setattr(replica_joining, "join_devices", note("all", "all"))
    monkeypatch.setattr(replica_joining.parallel, "join_devices", note("own", own))
    monkeypatch.setattr(nccl, "prepare", note("prepare", None))
    monkeypatch.setattr(nccl, "connect", note("connect", between))
    shape, ranks = Shape(4, 8, 0, 0, torch.float32), Ranks(1, 2, 1, 2)
    lockstep = mock.Mock(ranks=ranks, timeout=9.0)
    lockstep.share_file.side_effect = lambda owner: 100 + owner
    device = mock.Mock(type="cuda")
    if not spans:
        others = OtherHosts(0, 4)
        assert replica_joining.join(lockstep, shape, device, others) == "all"
        assert taken == [("all", (ranks, 100, shape, device, 9.0))]
        return
    monkeypatch.setattr(replica_joining, "LongRows", lambda *given: given)
    others = OtherHosts(1, 2, "10.0.0.1", 2)
    group, rows = replica_joining.join(lockstep, shape, device, others)
    assert group is own
    assert taken == [
        ("prepare", ("10.0.0.1",)),
        ("own", (1, 2, 102, shape, device, 9.0)),
        ("connect", (lockstep.host, [1, 3], device, 9.0)),
    ]
    long = Long(between.all_gather, between.reduce_scatter)
    assert rows == (ranks, shape, own, device, long)


@pytest.mark.parametrize(("first", "number"), [(0, 7), (4, 3)])
def test_a_hosts_devices_are_its_own_workers(first, number, specs, monkeypatch):
    """Rank 1 of replica 3, where the host has all replicas of two ranks, or from replica 2 on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number + 1)
    options = with_defaults({"tensor_parallel_size": 2, "data_parallel_size": 4})
    config = build(EngineConfig, options | {"enable_expert_parallel": True})
    others = OtherHosts(1, 8 - first, "10.0.0.1", first)
    made = GpuModelRunner(config, specs[MODEL], 1, engine=3, others=others)
    assert made._device == torch.device("cuda", number)


def test_too_many_ranks_on_one_host_are_refused():
    device, shape = torch.device("cuda", 0), Shape(4, 8, 0, 0, torch.float32)
    what = "^tensor_parallel_size x data_parallel_size = 16: device 'cuda' takes 8 at most$"
    with pytest.raises(ConfigError, match=what):
        replica_joining.join_devices(Ranks(0, 4, 0, 4), -1, shape, device, 1.0)
    with pytest.raises(ConfigError, match=r"^data_parallel_size = 9: device 'cuda' takes 8"):
        replica_joining.join_devices(Ranks(0, 1, 0, 9), -1, shape, device, 1.0)


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
