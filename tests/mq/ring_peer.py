"""A process at one end of a ring, for test_ring_processes.py.

Its arguments are what to do, its endpoints in hex, and numbers:

write FROM COUNT: send records FROM, FROM + 1, ... as `record` makes them, and then an empty one.
read [SPIN]: receive and commit up to the empty record, and print how many there were and their
    digest. SPIN seconds before it sleeps; without it, now none and now the usual.
echo COUNT: send back COUNT records, sleeping before each.
take COUNT: receive COUNT records without a commit, say so, and wait to be killed.
"""

from __future__ import annotations

import hashlib
import random
import signal
import sys

import msgspec

from ringcast.mq.endpoint import Endpoint, open_receiver, open_sender

PATIENCE = 30.0
SIZES = (8, 8, 24, 100, 1000, 4000, 20000)


def record(number: int) -> bytes:
    rng = random.Random(number)
    return number.to_bytes(8, "little") + rng.randbytes(rng.choice(SIZES))


def write(endpoint: Endpoint, first: float, count: float) -> None:
    sender = open_sender(endpoint)
    for number in range(int(first), int(first + count)):
        if number % 3 == 0:
            sender.spin_seconds = 0.0 if number % 2 else 20e-6
        sender.send(record(number), PATIENCE)
    sender.send(b"", PATIENCE)
    sender.close()


def read(endpoint: Endpoint, spin: float | None = None) -> None:
    receiver, digest, count = open_receiver(endpoint), hashlib.sha256(), 0
    while payload := receiver.receive(PATIENCE):
        receiver.spin_seconds = (0.0 if count % 2 else 20e-6) if spin is None else spin
        digest.update(payload)
        receiver.commit()
        count += 1
    receiver.close()
    print(count, digest.hexdigest())


def echo(inbound: Endpoint, outbound: Endpoint, count: float) -> None:
    receiver, sender = open_receiver(inbound), open_sender(outbound)
    receiver.spin_seconds = sender.spin_seconds = 0.0
    for _ in range(int(count)):
        sender.send(receiver.receive(PATIENCE), PATIENCE)
        receiver.commit()


def take(endpoint: Endpoint, count: float) -> None:
    receiver = open_receiver(endpoint)
    for _ in range(int(count)):
        receiver.receive(PATIENCE)
    print("taken", flush=True)
    signal.pause()


if __name__ == "__main__":
    endpoints = msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=list[Endpoint])
    role = {"write": write, "read": read, "echo": echo, "take": take}[sys.argv[1]]
    role(*endpoints, *map(float, sys.argv[3:]))
