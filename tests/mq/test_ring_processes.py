"""The ring between processes: content by digest, and peers killed in the middle of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ringcast.mq.errors import PeerDeadError

PEER = Path(__file__).with_name("ring_peer.py")
record = runpy.run_path(str(PEER))["record"]
PATIENCE = 30.0


@pytest.fixture
def spawn():
    """Start ring_peer.py as a process of its own. What still runs after the test is killed."""
    with contextlib.ExitStack() as stack:

        def start(endpoints, what, *options):
            child = subprocess.Popen(
                [sys.executable, "-P", str(PEER), what, hexed(endpoints), *map(str, options)],
                pass_fds={fd for endpoint in endpoints for fd in endpoint.fds},
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            return child

        yield start


def hexed(endpoints):
    return msgspec.msgpack.encode(endpoints).hex()


def digest(numbers):
    numbers = list(numbers)
    whole = hashlib.sha256(b"".join(record(number) for number in numbers))
    return f"{len(numbers)} {whole.hexdigest()}\n"


def drain(receiver):
    """What a dead writer has left."""
    left = []
    with contextlib.suppress(PeerDeadError):
        while True:
            left.append(receiver.receive(PATIENCE))
            receiver.commit()
    return left


def ours():
    mine = f"ringcast-{os.getpid()}-"
    return [name for name in os.listdir("/dev/shm") if name.startswith(mine)]


def test_two_readers_get_the_same(ring, spawn):
    made = ring(num_readers=2, capacity=16384)
    assert ours() == []
    readers = [spawn([made.owner.endpoint(f"reader.{i}")], "read") for i in range(2)]
    spawn([made.owner.endpoint("writer.0")], "write", 0, 2000)
    for reader in readers:
        assert reader.communicate(timeout=PATIENCE)[0] == digest(range(2000))
        assert reader.returncode == 0


def test_no_wake_up_is_lost_between_processes_that_always_sleep(ring, spawn):
    there, back = ring(capacity=1024), ring(capacity=1024)
    ends = [there.owner.endpoint("reader.0"), back.owner.endpoint("writer.0")]
    echo = spawn(ends, "echo", 5000)
    sender, receiver = there.sender(), back.receiver()
    sender.spin_seconds = receiver.spin_seconds = 0.0
    for number in range(5000):
        sender.send(b"%d" % number, PATIENCE)
        assert receiver.receive(PATIENCE) == b"%d" % number
        receiver.commit()
    assert echo.wait(PATIENCE) == 0


def test_no_wake_up_is_lost_when_the_ring_is_always_full(ring, spawn):
    """Each side waits for the other all the time: a ring of one or two records."""
    made = ring(capacity=128)
    reader = spawn([made.owner.endpoint("reader.0")], "read", 0.0)
    sender, numbers = made.sender(), range(1500)
    sender.spin_seconds = 0.0
    for number in numbers:
        sender.send(record(number)[:64], PATIENCE)
    sender.send(b"", PATIENCE)
    whole = hashlib.sha256(b"".join(record(number)[:64] for number in numbers))
    assert reader.communicate(timeout=PATIENCE)[0] == f"{len(numbers)} {whole.hexdigest()}\n"


def test_a_killed_reader_is_an_error_and_its_successor_misses_nothing(ring, spawn):
    made = ring(num_readers=2, capacity=16384)
    small = [number for number in range(300) if len(record(number)) < 1500]
    victim = spawn([made.owner.endpoint("reader.0")], "take", 3)
    other = spawn([made.owner.endpoint("reader.1")], "read")
    sender = made.sender()
    sent = []
    for number in small:
        if not sender.try_send(record(number)):
            break
        sent.append(number)
    assert victim.stdout.readline() == "taken\n"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    made.owner.mark_dead("reader.0")
    with pytest.raises(PeerDeadError, match=rf"reader\.0 \(pid {victim.pid}\) is dead"):
        sender.send(record(1000), PATIENCE)
    made.owner.mark_alive("reader.0")
    successor = spawn([made.owner.endpoint("reader.0")], "read")
    sender.send(record(1000), PATIENCE)
    sender.send(b"", PATIENCE)
    for reader in (successor, other):
        assert reader.communicate(timeout=PATIENCE)[0] == digest([*sent, 1000])


def test_a_writer_killed_anywhere_leaves_whole_records(ring, spawn):
    made = ring(capacity=16384)
    receiver, expected = made.receiver(), 0
    for life in range(4):
        writer = spawn([made.owner.endpoint("writer.0")], "write", expected, 10**9)
        for _ in range(50 + 37 * life):
            assert receiver.receive(PATIENCE) == record(expected)
            receiver.commit()
            expected += 1
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        made.owner.mark_dead("writer.0")
        left = drain(receiver)
        assert left == [record(expected + i) for i in range(len(left))]
        expected += len(left)
        made.owner.mark_alive("writer.0")
    assert expected > 400
    assert made.owner.stats().used == 0
