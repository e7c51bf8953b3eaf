"""Groups over NCCL, with threads for processes and a stand-in for the library."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from executor.gpu.fake_nccl import FakeNccl

from ringcast.executor.gpu import nccl
from ringcast.executor.gpu.nccl import NcclError, connect, prepare
from ringcast.executor.parallel import HostGroup, map_memory
from ringcast.kernels.cpu import exchange
from ringcast.mq.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch):
    library = FakeNccl()
    monkeypatch.setattr(nccl, "library", lambda: library)
    return library


def on_all(size, act):
    """What `act` gives on every rank, each a thread: act(its HostGroup)."""
    memory_fd, results, errors = os.memfd_create("ranks"), [None] * size, []

    def run(rank):
        try:
            memory = map_memory(memory_fd, exchange.memory_bytes(size))
            results[rank] = act(HostGroup(rank, size, memory, 30))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(memory_fd)
    if errors:
        raise errors[0]
    return results


def test_groups_of_some_of_the_ranks(fake):
    """Of five: 0 and 3, 4 and 1 in that order, and 2 alone."""
    groups = {0: (0, 3), 3: (0, 3), 4: (4, 1), 1: (4, 1), 2: (2,)}

    def act(host):
        ranks = connect(host, groups[host.rank], CPU, 30)
        if ranks is None:
            return None
        x = torch.full((3,), 10.0**host.rank)
        ranks.all_reduce(x)
        return ranks.rank, ranks.size, x.tolist()

    assert on_all(5, act) == [
        (0, 2, [1001.0] * 3),
        (1, 2, [10010.0] * 3),
        None,
        (1, 2, [1001.0] * 3),
        (0, 2, [10010.0] * 3),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.uint8])
def test_what_ranks_do(fake, dtype):
    def act(host):
        ranks, rank = connect(host, (0, 1, 2), CPU, 30), host.rank
        own = torch.arange(6).view(2, 3).to(dtype) + 10 * rank
        every = torch.zeros(6, 3, dtype=dtype)
        ranks.all_gather(every, own)
        told = own.clone()
        ranks.broadcast(told, 2)
        heard = torch.zeros_like(own)
        with ranks.together():
            ranks.send(own, (rank + 1) % 3)
            ranks.receive(heard, (rank + 2) % 3)
        ranks.all_reduce(own)
        return [x.tolist() for x in (every, told, heard, own)]

    parts = [(torch.arange(6).view(2, 3) + 10 * rank).tolist() for rank in range(3)]
    for rank, (every, told, heard, total) in enumerate(on_all(3, act)):
        assert every == [row for part in parts for row in part]
        assert told == parts[2]
        assert heard == parts[(rank + 2) % 3]
        assert total == np.sum(parts, 0).tolist()


def test_what_cant_be_exchanged(fake):
    def act(host):
        ranks = connect(host, (0, 1), CPU, 30)
        with pytest.raises(ValueError, match=r"float32 \(2, 2\) of strides \(4, 1\)"):
            ranks.all_reduce(torch.zeros(2, 4)[:, :2])
        with pytest.raises(ValueError, match="complex64"):
            ranks.send(torch.zeros(2, dtype=torch.complex64), 0)

    on_all(2, act)


def test_what_nccl_refuses_is_told(fake):
    fake.fails.add("ncclCommInitRank")
    with pytest.raises(NcclError, match=r"ncclCommInitRank: remote process exited.*: no route"):
        on_all(2, lambda host: connect(host, (0, 1), CPU, 30))


def test_who_doesnt_come_is_waited_for_so_long(fake, monkeypatch):
    come = threading.Event()
    monkeypatch.setattr(fake, "ncclCommInitRank", lambda *_: come.wait(60) and 0)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib7")
    reason = r"workers 0, 1 over NCCL \(NCCL_SOCKET_IFNAME: =ib7\) have waited 0.1 s .* on any port"
    try:
        with pytest.raises(TimeoutError, match=reason):
            on_all(2, lambda host: connect(host, (0, 1), CPU, 0.1))
    finally:
        monkeypatch.setattr(fake, "ncclAllReduce", lambda *_: 6)
        come.set()
        for thread in threading.enumerate():
            if thread.name == "connect":
                thread.join(10)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(nccl, "LIBRARY", "libnothing.so.2")
    with pytest.raises(ConfigError, match=r"several hosts need NCCL, and libnothing\.so\.2: "):
        nccl.library.__wrapped__()


def test_its_network_is_the_one_towards_the_master(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    prepare("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    assert (os.environ["NCCL_RUNTIME_CONNECT"], os.environ["NCCL_NVLS_ENABLE"]) == ("0", "0")
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "eth7"})
    prepare("no such host")  # which nobody asks for
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
