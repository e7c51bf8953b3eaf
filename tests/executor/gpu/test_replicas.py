"""How replicas that share experts find each other on their devices, and which ways rows take."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from executor.gpu.conftest import with_defaults
from executor.gpu.one_replica import MODEL

from ringcast.executor.gpu import nccl, replica_joining
from ringcast.executor.gpu.graphs import LARGEST
from ringcast.executor.gpu.parallel import FEED_FORWARD, Alone, Layout, Memory, Shape, map_peers
from ringcast.executor.gpu.replica_joining import Plan
from ringcast.executor.gpu.replicas import Long, LongRows, PeerRows, Ranks, RowLayout
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.runner import OtherHosts
from ringcast.kernels.gpu.all_reduce import FLAGS_BYTES
from ringcast.kernels.gpu.norm import AddNorm
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError

pytestmark = pytest.mark.interpreted  # test_lockstep_on_device.py has devices


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
    norm = AddNorm(x, weight, x, 1e-6)
    group.sum_add_rms_norm(part, norm, True)
    assert own.sum_add_rms_norm.call_args == mock.call(part, norm, False)
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
