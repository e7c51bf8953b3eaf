"""The control connection, between two ends in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ringcast.actors.control import MAX_PACKET, Control
from ringcast.mq import supervision
from ringcast.mq.supervision import PeersAdded, Statistics, Status


@pytest.fixture
def ends() -> Iterator[tuple[Control, Control]]:
    """(the supervisor's, the actor's)"""
    ours, theirs = Control.pair()
    supervisor = Control(ours, supervision.ActorToSupervisor)
    actor = Control(theirs, supervision.SupervisorToActor)
    yield supervisor, actor
    supervisor.close()
    actor.close()


def many_statistics() -> dict[str, float]:
    return {f"scheduler.{i}.scheduled_tokens": i + 0.5 for i in range(10_000)}


def test_a_message_may_be_larger_than_a_packet(ends: tuple[Control, Control]) -> None:
    supervisor, actor = ends
    status = Status([], [], many_statistics())
    num_fds = len(os.listdir("/proc/self/fd"))
    assert supervisor.send(status)
    assert supervisor.send(supervision.Shutdown())
    assert actor.receive() == (status, [])
    assert actor.receive() == (supervision.Shutdown(), [])
    assert actor.receive() is None
    assert actor.send(Statistics(status.statistics))
    assert supervisor.receive() == (Statistics(status.statistics), [])
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_descriptors_come_with_a_message_of_any_size(ends: tuple[Control, Control]) -> None:
    supervisor, actor = ends
    reading, writing = os.pipe()
    for endpoints in (b"", bytes(2 * MAX_PACKET)):
        message = PeersAdded(1, ["worker.1"], endpoints)
        assert supervisor.send(message, [writing])
        packet = actor.receive()
        assert packet is not None
        received, (fd,) = packet
        assert received == message
        os.write(fd, b"x")
        os.close(fd)
        assert os.read(reading, 10) == b"x"
    os.close(reading)
    os.close(writing)
