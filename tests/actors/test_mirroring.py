"""The mirrors of two hosts, each on a loop of its own, and ranks as threads beside them."""

from __future__ import annotations

import asyncio
import os
import threading

import numpy as np
import pytest
import torch

from ringcast.actors.mirroring import Mirroring
from ringcast.executor.mirror import Exchange
from ringcast.executor.parallel import HostGroup, map_parts
from ringcast.mq.errors import PeerDeadError


class Host:
    """A rank, and the mirror to the other one's host."""

    def __init__(self, rank):
        self.rank = rank
        self.fd = os.memfd_create("ranks")
        self.other: Host
        self.is_full = False
        self.failed = []

    def start(self, act):
        self.mirroring = Mirroring(self.fd, {1 - self.rank}, 0, 1, self._send, lambda: self.is_full)
        self.task = asyncio.create_task(self.mirroring.run())
        self.thread = threading.Thread(target=self._run, args=(act,))

    def _send(self, payload):
        asyncio.get_running_loop().call_soon(self.other.mirroring.take, payload)

    def _run(self, act):
        torch.set_num_threads(1)
        try:
            (memory,) = map_parts(self.fd, [Exchange((0, 1))], 1)
            act(self, HostGroup(self.rank, 2, memory, 30.0))
        except BaseException as error:
            self.failed.append(error)

    async def join(self):
        await asyncio.to_thread(self.thread.join)


async def on_two_hosts(act, meanwhile):
    hosts = [Host(0), Host(1)]
    for host in hosts:
        host.other = hosts[1 - host.rank]
        host.start(act)
    try:
        hosts[0].thread.start()
        await asyncio.sleep(
            0.02
        )  # the other one's ranks come late, and the greeting waits for them
        hosts[1].thread.start()
        await meanwhile(hosts)
        for host in hosts:
            await host.join()
    finally:
        for host in hosts:
            host.task.cancel()
            os.close(host.fd)
    for host in hosts:
        if host.failed:
            raise host.failed[0]
    return hosts


def test_ranks_of_two_hosts_step_together():
    def act(host, group):
        for step in range(50):
            x = torch.full((3, 5), float(step + host.rank))
            (launch,) = group.sum(np.array([3]), x)
            launch()
            group.check()
            assert x.eq(2 * step + 1).all()
        group.barrier()

    async def meanwhile(hosts):
        hosts[0].is_full = True  # nothing goes out, so nobody gets anywhere
        await asyncio.sleep(0.05)
        sent = hosts[0].mirroring.sent_bytes
        assert sent < 1000
        hosts[0].is_full = False

    hosts = asyncio.run(on_two_hosts(act, meanwhile))
    assert all(host.mirroring.sent_bytes > 50 * 60 for host in hosts)
    assert all(host.mirroring.sent_bytes < 50 * 600 for host in hosts)  # not whole slots


def test_who_leaves_is_missed_on_the_other_host():
    def act(host, group):
        if host.rank == 0:
            group.leave()
            return
        with pytest.raises(PeerDeadError, match="another rank has left"):
            group.barrier()

    async def meanwhile(hosts):
        pass

    asyncio.run(on_two_hosts(act, meanwhile))
