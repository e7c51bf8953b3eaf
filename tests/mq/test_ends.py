"""The races of going to sleep, forced: the other side acts exactly where the fence stands."""

from __future__ import annotations

import pytest

from ringcast.mq import ends
from ringcast.mq import ring as ring_module
from ringcast.mq.errors import PeerDeadError


@pytest.fixture
def at_the_fence(monkeypatch):
    """Arrange that `act` happens when the next fence is passed, once."""

    def arrange(act):
        class Interruption:
            def __enter__(self):
                monkeypatch.undo()
                act()

            def __exit__(self, *exception):
                pass

        monkeypatch.setattr(ends, "FENCE", Interruption())

    return arrange


def test_a_record_published_while_its_reader_falls_asleep(ring, at_the_fence):
    made = ring()
    sender, receiver = made.sender(), made.receiver()
    at_the_fence(lambda: sender.try_send(b"just in time"))
    assert not receiver.arm()
    assert made.owner.bells[1].drain()  # the mark was up, so the bell was rung as well
    assert receiver.try_receive() == b"just in time"


def test_a_reader_that_falls_asleep_while_a_record_is_published(ring, at_the_fence):
    made = ring()
    sender, receiver = made.sender(), made.receiver()
    slept = []
    at_the_fence(lambda: slept.append(receiver.arm()))
    assert sender.try_send(b"just in time")
    assert slept == [False]


def test_a_commit_while_the_writer_falls_asleep(ring, at_the_fence):
    made = ring(capacity=1024)
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(bytes(1000))
    assert not sender.try_send(b"")
    assert receiver.try_receive() == bytes(1000)
    at_the_fence(receiver.commit)
    assert not sender.arm()
    assert made.owner.bells[0].drain()
    assert sender.try_send(b"")


def test_a_writer_that_falls_asleep_while_a_reader_commits(ring, at_the_fence):
    made = ring(capacity=1024)
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(bytes(1000))
    assert not sender.try_send(b"")
    assert receiver.try_receive() == bytes(1000)
    slept = []
    at_the_fence(lambda: slept.append(sender.arm()))
    receiver.commit()
    assert slept == [False]


def test_a_death_while_a_reader_falls_asleep(ring, at_the_fence):
    made = ring()
    made.sender()
    receiver = made.receiver()
    at_the_fence(lambda: made.owner.mark_dead("writer.0"))
    assert not receiver.arm()


def test_an_untested_processor_rings_for_everything(ring, monkeypatch):
    made = ring()
    sender, receiver = made.sender(), made.receiver()
    monkeypatch.setattr(ends, "WEAK", True)
    assert sender.try_send(b"")
    assert receiver.try_receive() == b""
    receiver.commit()
    assert [bell.drain() for bell in made.owner.bells] == [True, True]


def test_an_untested_processor_gets_everything_too(ring, monkeypatch):
    for module in (ends, ring_module):
        monkeypatch.setattr(module, "WEAK", True)
    made = ring(capacity=1024)
    sender, receiver = made.sender(), made.receiver()
    payloads = [b"1", bytes(5000), b"", bytes(1000)] * 20
    left, got = list(payloads), []
    while len(got) < len(payloads):
        while left and sender.try_send(left[0]):
            left.pop(0)
        while (record := receiver.try_receive()) is not None:
            got.append(record)
        receiver.commit()
    assert got == payloads
    made.owner.mark_dead("writer.0")
    with pytest.raises(PeerDeadError):
        receiver.try_receive()
