"""Two replicas that share experts, whose ranks are threads of one process, with references of all
kernels: what stands for the ways that their rows take, and the runners of all.
"""

from __future__ import annotations

import os

import pytest
import torch
from executor.gpu.conftest import TwoRunners, load
from executor.gpu.one_replica import DP, MODEL
from executor.gpu.thread_ranks import Meeting, ThreadCarrier, ThreadGroup, on_all

from executor.gpu import conftest
from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import replicas as replicas_module
from ringcast.executor.gpu import runner
from ringcast.executor.gpu.parallel import Alone, Shape
from ringcast.executor.gpu.replica_joining import Joined
from ringcast.executor.gpu.replicas import Long, LongRows, Ranks
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.kernels.gpu.all_reduce import all_reduce_add_rms_norm_reference, all_reduce_reference
from ringcast.kernels.gpu.blocks import copy_blocks_reference
from ringcast.kernels.gpu.norm import add_rms_norm_reference


class ThreadRows:
    """A RowGroup by references. seen: the rows of each exchange."""

    programmatic, alike = True, False

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

    def sum_add_rms_norm(self, part_TH, norm, pdl):
        with self._everyone.of_all(self._worker, self._parts) as shown:
            all_reduce_add_rms_norm_reference(self._all_parts(part_TH, shown), *norm)

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
