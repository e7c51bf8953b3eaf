"""How much shared memory a topology reserves by default. Docker gives a container 64 MiB."""

from __future__ import annotations

import contextlib
import os

import pytest

from ringcast.actors import topology
from ringcast.mq.board import board_bytes
from ringcast.mq.config import EngineConfig
from ringcast.mq.endpoint import ChannelOwner

MIB = 1 << 20


@pytest.mark.parametrize(("counts", "most"), [({}, 16), ({"worker": 8}, 32)])
def test_a_topology_reserves_little(counts, most):
    ring_bytes = EngineConfig().ring_bytes
    reserved = computed = 0
    with contextlib.ExitStack() as stack:
        for channel in topology.channels(counts):
            owner = ChannelOwner.create(
                "ring", channel.name, channel.writer, channel.readers, "Any", ring_bytes, ""
            )
            stack.callback(owner.close)
            reserved += os.fstat(owner.fds[0]).st_blocks * 512
            computed += board_bytes(len(channel.readers)) + owner.stats().capacity
    assert computed <= reserved < most * MIB
