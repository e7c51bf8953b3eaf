"""A ring whose writer and readers are killed at random: `python tests/mq/torture.py SEED SECONDS`.

One process that only forks, kills and judges; it has no threads, and so may fork. The writer sends
records of all sizes, many of them larger than the ring, each with its life (how many writers were
before it), its number in that life and the hash of its content. Two readers check what they
receive, and log it in files of their own before they commit. Every few milliseconds one of the
three is killed with SIGKILL and started again: reader 1 with a reset or without, as chance will
have it, reader 0 always without. What the logs must say in the end:

1. Every record is whole, and its hash is right.
2. At one position of the ring both readers saw the same record.
3. Reader 0 got every record of every life, from number 0 to the last that the writer logged.
4. An incarnation begins where the one before it had committed, or where the reset put it, and from
   there on gets every record there is. The one exception: where the beginning of a record in parts
   died with its reader, there is a CorruptRecordError in its place.
5. Nobody waited in vain for PATIENCE seconds, and at the end everything has been received.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import random
import signal
import struct
import sys
import tempfile
import time

from ringcast.mq.endpoint import ChannelOwner, open_receiver, open_sender
from ringcast.mq.errors import CorruptRecordError, PeerDeadError

CAPACITY = 16384
SIZES = (0, 0, 8, 100, 1000, 4000, CAPACITY - 60, CAPACITY, 3 * CAPACITY)
PATIENCE = 20.0
PAUSE = 0.02  # seconds between two kills, at most
LAST = 2**64 - 1  # the number of the record that ends everything
HEAD = struct.Struct("<QQ32s")
LINE = struct.Struct("<c7xQQQ")  # what, and three numbers; never on two pages
READERS = ("reader.0", "reader.1")


def record(life: int, number: int) -> bytes:
    rng = random.Random(life << 32 | number)
    content = rng.randbytes(rng.choice(SIZES))
    return HEAD.pack(life, number, hashlib.sha256(content).digest()) + content


class Log:
    """Lines that survive their writer's death: each is one write(), which SIGKILL may cut short
    only between two pages."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, what: bytes, *numbers: int) -> None:
        os.write(self._fd, LINE.pack(what, *numbers, *[0] * (3 - len(numbers))))


# --- the processes --------------------------------------------------------------------------------


def write(owner: ChannelOwner, log: Log, life: int, ending: bool) -> None:
    """Send for ever, or, at the end, a few and the last one. "s": sent; "d": met a dead reader."""
    sender, rng, number = open_sender(owner.endpoint("writer.0")), random.Random(life), 0
    while True:
        sender.spin_seconds = rng.choice([0.0, 20e-6])
        last = ending and number == 20
        try:
            sender.send(record(life, LAST if last else number), PATIENCE)
        except PeerDeadError:
            log.add(b"d")
            time.sleep(0.0002)
            continue
        log.add(b"s", life, number)
        if last:
            return
        number += 1


def read(owner: ChannelOwner, log: Log, reader: int, incarnation: int) -> None:
    """Receive up to the last record. "o": opened at; "r": received; "x": lost; "c": committed."""
    receiver = open_receiver(owner.endpoint(READERS[reader]))
    rng = random.Random(incarnation << 1 | reader)

    def commit() -> None:
        receiver.commit()
        log.add(b"c", receiver._position)

    log.add(b"o", receiver._position, incarnation)
    while True:
        receiver.spin_seconds = rng.choice([0.0, 20e-6])
        try:
            payload = receiver.try_receive()
            if payload is None:
                commit()
                payload = receiver.receive(PATIENCE)
        except PeerDeadError:
            time.sleep(0.0002)
            continue
        except CorruptRecordError as error:
            if "a part of it" not in str(error):
                raise
            log.add(b"x", receiver._position)
            continue
        life, number, digest = HEAD.unpack_from(payload)
        assert hashlib.sha256(payload[HEAD.size :]).digest() == digest, (life, number)
        log.add(b"r", receiver._position, life, number)
        if number == LAST or rng.random() < 0.4:
            commit()
        if number == LAST:
            return


# --- who kills them -------------------------------------------------------------------------------


class Torture:
    def __init__(self, seed: int, folder: str) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        start = 2**32 - self.rng.randrange(1 << 20) * 16
        names = list(READERS)
        self.owner = ChannelOwner.create("ring", "e", "writer.0", names, "A", CAPACITY, "", start)
        self.pids: dict[str, int] = {}
        self.lives = dict.fromkeys(("writer.0", *READERS), 0)
        self.resets: dict[int, int] = {}  # reader 1's incarnation: where it was to begin

    def start(self, name: str, ending: bool = False) -> None:
        life = self.lives[name]
        self.lives[name] += 1
        pid = os.fork()
        if pid:
            self.pids[name] = pid
            return
        status = 1
        try:
            log = Log(f"{self.folder}/{name}")
            if name == "writer.0":
                write(self.owner, log, life, ending)
            else:
                read(self.owner, log, READERS.index(name), life)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def kill(self, name: str) -> None:
        pid = self.pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"{name} ended with {status}: {self.owner.describe()}"
        self.owner.mark_dead(name)

    def strike(self) -> None:
        """Kill one, or two, and start them again."""
        victims = self.rng.sample(list(self.lives), self.rng.choice([1, 1, 1, 2]))
        for name in victims:
            self.kill(name)
        if "reader.1" in victims and self.rng.random() < 0.5:
            if "writer.0" not in victims:
                self.wait_until_the_writer_knows()
            self.owner.reset("reader.1")
            self.resets[self.lives["reader.1"]] = self.owner.progress()[1][2]
        for name in victims:
            self.owner.mark_alive(name)
            self.start(name)

    def wait_until_the_writer_knows(self) -> None:
        """Its answer is a "d" in its log, after the death."""
        path, deadline = f"{self.folder}/writer.0", time.monotonic() + PATIENCE
        before = os.path.getsize(path) if os.path.exists(path) else 0
        while True:
            lines = list(lines_of(path, before))
            if any(what == b"d" for what, *_ in lines):
                return
            assert time.monotonic() < deadline, self.owner.describe()
            time.sleep(0.0002)

    def run(self, seconds: float) -> int:
        """Returns how many were killed."""
        for name in self.lives:
            self.start(name)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self.rng.uniform(0, PAUSE))
            self.strike()
        self.kill("writer.0")
        self.owner.mark_alive("writer.0")
        self.start("writer.0", ending=True)
        for name in list(self.lives):
            assert os.waitpid(self.pids.pop(name), 0)[1] == 0, f"{name}: {self.owner.describe()}"
        assert self.owner.stats().used == 0
        return sum(self.lives.values()) - 3

    def close(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.owner.close()


# --- what the logs say ----------------------------------------------------------------------------


def lines_of(path: str, offset: int = 0) -> list[tuple[bytes, int, int, int]]:
    with open(path, "rb") as file:
        file.seek(offset)
        whole = file.read()
    return list(LINE.iter_unpack(whole[: len(whole) // LINE.size * LINE.size]))


def judge(folder: str, resets: dict[int, int]) -> dict[str, int]:
    """Check everything that the file's docstring promises. Returns counts."""
    logs = [lines_of(f"{folder}/{name}") for name in READERS]
    at: dict[
        int, tuple[int, int]
    ] = {}  # which record ends at a position; (-1, -1): only known lost
    for what, position, *which in (line for log in logs for line in log):
        if what == b"r":
            assert at.get(position, (-1, -1)) in ((-1, -1), tuple(which)), (position, which)
            at[position] = (which[0], which[1])
        elif what == b"x":
            at.setdefault(position, (-1, -1))
    ends = sorted(at)
    check_lives([at[end] for end in ends], lines_of(f"{folder}/writer.0"))
    for log, put in zip(logs, ({}, resets), strict=True):
        check_reader(log, ends, put)
    counts = {what: sum(line[0] == what.encode() for log in logs for line in log) for what in "rxc"}
    return {
        "records": len(ends),
        "received": counts["r"],
        "lost": counts["x"],
        "commits": counts["c"],
    }


def check_lives(records: list[tuple[int, int]], written: list[tuple[bytes, int, int, int]]) -> None:
    """Numbers follow one another in each life, and what was logged as sent is there."""
    life, number = 0, -1
    newest: dict[int, int] = {}
    for this, at in records:
        if (this, at) == (-1, -1):  # both readers lost it: it can only be the next
            number += 1
            continue
        assert at == LAST or (this == life and at == number + 1) or (this > life and at <= 1), (
            f"{this}:{at} after {life}:{number}"
        )
        life, number = this, at
        newest[life] = number
    for what, of, last in ((line[0], line[1], line[2]) for line in written):
        assert what != b"s" or newest.get(of, -1) >= last - 1, f"{of}:{last} was sent"


def check_reader(
    log: list[tuple[bytes, int, int, int]], ends: list[int], resets: dict[int, int]
) -> None:
    """One reader's incarnations each begin where they should, and miss nothing."""
    place = {end: index for index, end in enumerate(ends)}
    committed, last = 0, -1
    following: int | None = None  # the index of the record that must come next
    may_lack_a_beginning = False
    for what, position, incarnation, _ in log:
        if what == b"o":
            # One that was killed before this line has done nothing, but may have been reset.
            put = [at for life, at in resets.items() if last < life <= incarnation]
            begins = bisect.bisect_right(ends, position)
            if put:
                assert position == max(put)
            else:
                assert committed <= position
                assert following is None or begins <= following, (position, ends[following])
            committed, last, following = position, incarnation, begins
            may_lack_a_beginning = not put
        elif what == b"c":
            committed = position
        else:
            assert place[position] == following, (position, place[position], following)
            assert what == b"r" or may_lack_a_beginning
            following, may_lack_a_beginning = following + 1, False


def main(seed: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torture = Torture(seed, folder)
        try:
            killed = torture.run(seconds)
        finally:
            torture.close()
        print(f"killed {killed}, resets {len(torture.resets)}, {judge(folder, torture.resets)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
