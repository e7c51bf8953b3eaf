"""Endpoints: what travels to an actor, and what it opens from it."""

from __future__ import annotations

import os
import sys

import msgspec
import pytest

from ringcast.mq.endpoint import ChannelOwner, Endpoint, open_receiver, open_sender
from ringcast.mq.errors import ConfigError


@pytest.fixture
def owner():
    made = ChannelOwner.create("ring", "w>rs", "w", ("r", "s"), "SchedulerToWorker", 4000, "")
    yield made
    made.close()


def test_each_end_has_what_it_needs(owner):
    segment, writer_bell, r_bell, s_bell = owner.fds
    assert owner.endpoint("w") == Endpoint(
        edge="w>rs",
        messages="SchedulerToWorker",
        role="send",
        peers=("r", "s"),
        transport="ring",
        reader=0,
        num_readers=2,
        fds=[segment, writer_bell, r_bell, s_bell],
    )
    assert owner.endpoint("s") == Endpoint(
        edge="w>rs",
        messages="SchedulerToWorker",
        role="receive",
        peers=("w",),
        transport="ring",
        reader=1,
        num_readers=2,
        fds=[segment, s_bell, writer_bell],
    )


def test_an_endpoint_travels_and_its_descriptors_may_change(owner):
    def travelled(instance):
        sent = msgspec.msgpack.encode(owner.endpoint(instance))
        endpoint = msgspec.msgpack.decode(sent, type=Endpoint)
        return msgspec.structs.replace(endpoint, fds=[os.dup(fd) for fd in endpoint.fds])

    ends = travelled("w"), travelled("s")
    sender, receiver = open_sender(ends[0]), open_receiver(ends[1])
    for endpoint in ends:
        for fd in endpoint.fds:
            os.close(fd)
    assert sender.try_send(b"across")
    assert receiver.try_receive() == b"across"
    sender.close()
    receiver.close()


def test_closing_everything_closes_every_descriptor():
    before = sorted(os.listdir("/proc/self/fd"))
    owner = ChannelOwner.create("ring", "e", "w", ("r",), "Any", 4096, "")
    ends = open_sender(owner.endpoint("w")), open_receiver(owner.endpoint("r"))
    for end in (*ends, owner):
        end.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_size_is_rounded_up(owner):
    assert owner.stats().capacity == 4032


def test_descriptors_are_not_inherited_by_accident(owner):
    assert not any(os.get_inheritable(fd) for fd in owner.fds)


def test_an_unknown_transport_is_refused(owner):
    with pytest.raises(ConfigError, match="transport must be one of ring, zmq, got 'smoke'"):
        ChannelOwner.create("smoke", "e", "w", ("r",), "Any", 4096, "")
    with pytest.raises(ConfigError):
        open_sender(msgspec.structs.replace(owner.endpoint("w"), transport="smoke"))


def test_a_refused_channel_leaves_nothing(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="1 to 64"):
        ChannelOwner.create("ring", "e", "w", (), "Any", 4096, "")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_description_for_people(owner):
    sender = open_sender(owner.endpoint("w"))
    assert owner.describe() == (
        "w>rs: 0 of 4032 bytes, 0 records; every reader has read everything"
    )
    assert sender.try_send(bytes(16))
    assert owner.describe() == (
        "w>rs: 32 of 4032 bytes, 1 records; reader 0 r (not opened yet) is 32 bytes behind, "
        "reader 1 s (not opened yet) is 32 bytes behind"
    )
    sender.close()


def test_rings_do_without_zeromq(owner):
    code = (
        "import sys; from ringcast.mq import endpoint, inproc, ring; "
        "sys.exit(any(name in sys.modules for name in ('zmq', 'torch', 'numpy')))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-P", "-c", code]) == 0
