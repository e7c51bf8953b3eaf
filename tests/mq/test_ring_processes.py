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

        def start(owner, what, instance, *options):
            endpoint = owner.endpoint(instance)
            child = subprocess.Popen(
                [sys.executable, "-P", str(PEER), what, hexed(endpoint), *map(str, options)],
                pass_fds=endpoint.fds,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            return child

        yield start


def hexed(endpoint):
    return msgspec.msgpack.encode(endpoint).hex()


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
    readers = [spawn(made.owner, "read", f"reader.{i}") for i in range(2)]
    spawn(made.owner, "write", "writer.0", 0, 2000)
    for reader in readers:
        assert reader.communicate(timeout=PATIENCE)[0] == digest(range(2000))
        assert reader.returncode == 0


def test_a_killed_reader_is_an_error_and_its_successor_misses_nothing(ring, spawn):
    made = ring(num_readers=2, capacity=16384)
    small = [number for number in range(300) if len(record(number)) < 1500]
    victim = spawn(made.owner, "take", "reader.0", 3)
    other = spawn(made.owner, "read", "reader.1")
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
    successor = spawn(made.owner, "read", "reader.0")
    sender.send(record(1000), PATIENCE)
    sender.send(b"", PATIENCE)
    for reader in (successor, other):
        assert reader.communicate(timeout=PATIENCE)[0] == digest([*sent, 1000])


def test_a_writer_killed_anywhere_leaves_whole_records(ring, spawn):
    made = ring(capacity=16384)
    receiver, expected = made.receiver(), 0
    for life in range(4):
        writer = spawn(made.owner, "write", "writer.0", expected, 10**9)
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
