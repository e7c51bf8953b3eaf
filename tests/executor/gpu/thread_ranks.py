"""Ranks as threads of one process, with references of all kernels: what stands for the memory that
their devices would map, and the runners of all.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from executor.gpu.conftest import TwoRunners, load

from executor.gpu import conftest
from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import runner
from ringcast.executor.gpu.parallel import Shape
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.kernels.gpu.all_reduce import all_reduce_add_rms_norm_reference, all_reduce_reference
from ringcast.kernels.gpu.blocks import copy_blocks_reference


def on_all(act, things):
    """What act(thing) returns, of all at once; the first exception is raised."""
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


class Meeting:
    """Where the threads of all ranks wait for each other, and show what they have."""

    def __init__(self, size: int) -> None:
        self.size, self._shown = size, [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    @contextlib.contextmanager
    def of_all(self, rank, thing):
        """What all ranks show, until the last one has done with it."""
        self._shown[rank] = thing
        self._barrier.wait()
        yield list(self._shown)
        self._barrier.wait()


class ThreadGroup:
    """A DeviceGroup by references. calls: what this rank has done with others."""

    def __init__(self, rank: int, meeting: Meeting, shape: Shape) -> None:
        self.rank, self.size, self._meeting, self._shape = rank, meeting.size, meeting, shape
        self.most_tokens, self.programmatic = shape.tokens, True
        self._parts = torch.full((3, shape.tokens, shape.hidden), torch.nan, dtype=shape.dtype)
        self._logits = torch.full((shape.samples, shape.vocab), torch.nan, dtype=shape.dtype)
        self.calls: list[str] = []

    def place(self, which, update_TH):
        return self._parts[which, : len(update_TH)]

    def sum(self, part_TH, out_TH, add_to_TH=None, pdl=False):
        self.calls.append("sum")
        with self._meeting.of_all(self.rank, part_TH) as parts:
            all_reduce_reference(parts, out_TH, add_to_TH)

    def sum_add_rms_norm(self, part_TH, norm, pdl):
        self.calls.append("norm")
        with self._meeting.of_all(self.rank, part_TH) as parts:
            all_reduce_add_rms_norm_reference(parts, *norm)

    def own_logits(self, count):
        return self._logits[:count]

    def gather(self, own_NV, out, pdl):
        self.calls.append("gather")
        with self._meeting.of_all(self.rank, own_NV) as parts:
            if out is not None:
                out.copy_(torch.cat(parts, 1))

    def broadcast(self, values_N, pdl):
        self.calls.append("broadcast")
        with self._meeting.of_all(self.rank, values_N) as values:
            if self.rank:
                values_N.copy_(values[0])

    @contextlib.contextmanager
    def at_rest(self):
        yield

    def leave(self):
        self.calls.append("leave")


class ThreadCarrier:
    """A Carrier, of ranks that all come. carried: bytes that this one got."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting
        self.carried = 0

    def broadcast(self, values):
        with self._meeting.of_all(self._rank, values) as shown:
            if self._rank:
                values.copy_(shown[0])

    def exchange(self, sent, received):
        with self._meeting.of_all(self._rank, sent) as shown:
            mine = [
                iter([parcel.tensor for parcel in parcels if parcel.rank == self._rank])
                for parcels in shown
            ]
            for tensor, rank in received:
                tensor.copy_(next(mine[rank]))
                self.carried += tensor.nbytes
            assert not any(list(left) for left in mine)


class Threads:
    """Runners of all ranks, which launch a plan together. What rank 0 has launched is returned."""

    def __init__(self, spec, size=2, **options) -> None:
        self.groups, meeting, carriers = [None] * size, Meeting(size), Meeting(size)
        self.carriers = [ThreadCarrier(rank, carriers) for rank in range(size)]
        options |= {"tensor_parallel_size": size}

        def make(rank):
            def join(shape):
                self.groups[rank] = ThreadGroup(rank, meeting, shape)
                return self.groups[rank]

            place = rank, torch.device("cpu"), -1, join, 0, None, None, self.carriers[rank]
            return load(spec, GpuModelRunner, *place, **options)

        self.runners = on_all(make, range(size))

    def launch(self, plan):
        pending = on_all(lambda runner: runner.launch(plan), self.runners)
        outputs = [each.read() for each in pending]
        for output in outputs[1:]:
            assert output.token_ids == outputs[0].token_ids
            assert (output.logprobs, output.prompt_logprobs, output.experts) == (None, [], None)
        return pending[0]


@pytest.fixture
def threads(specs, monkeypatch):
    def make(name, size=2, **options):
        conftest.take_references(monkeypatch)
        conftest.take_routing_references(monkeypatch)
        monkeypatch.setattr(runner, "copy_blocks", copy_blocks_reference)
        mine = Threads(specs[name], size, **options)
        for option in ("enable_expert_parallel", "enable_eplb", "eplb_config"):
            options.pop(option, None)
        reference = load(specs[name], CpuModelRunner, **options)
        return TwoRunners(mine, reference, 16, len(mine.runners[0]._decoder.groups))

    return make
