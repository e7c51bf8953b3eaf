"""A writer or reader that is killed at any instruction wedges and corrupts nobody.

An end's call is run again and again on a fresh ring, and killed before its first instruction in mq
that can change what others see (a store into something, a call), before its second, and so on,
until it gets through: so the others see each state that a death can leave. (A copy of many bytes
that stops in the middle is seen by nobody: it lies beyond what is published.)
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import random
import select
import sys
import threading
import types
from pathlib import Path

import pytest

from ringcast import mq
from ringcast.mq import ends
from ringcast.mq.endpoint import ChannelOwner, open_receiver, open_sender
from ringcast.mq.errors import CorruptRecordError, PeerDeadError

FOLDER = str(Path(mq.__file__).parent)
CAPACITY = 256
START = 2**32 - 32  # so that records wrap around, and positions pass 2**32
SMALL, AFTER = b"small", b"after"
LARGE = random.Random(1).randbytes(300)  # seven parts, of which the ring holds four
FULL = bytes(CAPACITY - 16)


class Killed(BaseException):
    pass


@functools.cache
def changes(code: types.CodeType) -> frozenset[int]:
    """The offsets of the instructions that can change more than local variables."""
    return frozenset(
        instruction.offset
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith(("STORE_SUBSCR", "STORE_SLICE", "CALL"))
    )


def survives(instruction: int, call) -> bool:
    """Run `call`, and kill it before the instruction of this number. Whether it ended before."""
    passed = 0

    def trace(frame, event, argument):
        nonlocal passed
        if event == "call":
            if not frame.f_code.co_filename.startswith(FOLDER):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        elif event == "opcode" and frame.f_lasti in changes(frame.f_code):
            passed += 1
            if passed == instruction:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Killed:
        ends.FENCE = threading.Lock()  # the one it may have held has died with it
        return False
    finally:
        sys.settrace(before)
    return True


class Ring:
    """A ring with its writer and two readers, all in this process."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.owner = ChannelOwner.create("ring", "e", "w", ("r", "s"), "Any", CAPACITY, "", START)
        stack.callback(self.owner.close)
        self.sender = self.writer()
        self.receivers = [self.reader("r"), self.reader("s")]

    def writer(self):
        return self._keep(open_sender(self.owner.endpoint("w")))

    def reader(self, name):
        return self._keep(open_receiver(self.owner.endpoint(name)))

    def _keep(self, end):
        return self._stack.enter_context(contextlib.closing(end))

    def carry(self, payloads, readers=(0, 1)):
        """Send and receive everything. Returns what each reader received, errors as their type."""
        left, got = list(payloads), [[] for _ in readers]
        for _ in range(100):
            while left and self.sender.try_send(left[0]):
                left.pop(0)
            for records, reader in zip(got, readers, strict=True):
                records += take(self.receivers[reader])
        assert not left
        return got


def take(receiver):
    """Everything that is there, committed."""
    got = []
    while True:
        try:
            payload = receiver.try_receive()
        except CorruptRecordError as error:
            payload = type(error)
        if payload is None:
            receiver.commit()
            return got
        got.append(payload)


def take_all_of_the_dead(receiver):
    got = []
    with contextlib.suppress(PeerDeadError):
        while True:
            got.append(receiver.try_receive())
            receiver.commit()
    return got


def rung(end):
    return bool(select.select([end], [], [], 0)[0])


@contextlib.contextmanager
def fresh():
    """A ring, and nothing left of it or of those who died while they opened an end."""
    before = set(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        yield Ring(stack)
    for fd in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(OSError):
            if "eventfd" in os.readlink(f"/proc/self/fd/{fd}"):
                os.close(int(fd))


# What the writer was doing: how it comes to that, the call, and what readers may get of it.


def nothing(ring):
    pass


def a_reader_sleeps(ring):
    assert ring.receivers[0].arm()


def a_large_record_is_under_way(ring):
    assert not ring.sender.try_send(LARGE)
    assert [take(receiver) for receiver in ring.receivers] == [[], []]
    a_reader_sleeps(ring)


def it_is_full(ring):
    assert ring.sender.try_send(FULL)
    assert not ring.sender.try_send(SMALL)


def the_writer_sleeps(ring):
    it_is_full(ring)
    assert ring.sender.arm()


WRITER = {
    "a record": (a_reader_sleeps, lambda ring: ring.sender.try_send(SMALL), SMALL),
    "the first parts": (a_reader_sleeps, lambda ring: ring.sender.try_send(LARGE), LARGE),
    "the last parts": (
        a_large_record_is_under_way,
        lambda ring: ring.sender.try_send(LARGE),
        LARGE,
    ),
    "another record": (
        a_large_record_is_under_way,
        lambda ring: ring.sender.try_send(SMALL),
        SMALL,
    ),
    "a refusal": (it_is_full, lambda ring: ring.sender.try_send(SMALL), SMALL),
    "arm": (it_is_full, lambda ring: ring.sender.arm(), b""),
    "disarm": (the_writer_sleeps, lambda ring: ring.sender.disarm(), b""),
    "opening": (a_reader_sleeps, lambda ring: open_sender(ring.owner.endpoint("w")).close(), b""),
    "reopening": (it_is_full, lambda ring: open_sender(ring.owner.endpoint("w")).close(), b""),
}


@pytest.mark.parametrize("what", WRITER)
def test_a_writer_killed_anywhere(what):
    comes_to, call, record = WRITER[what]
    survived, instruction, seen = False, 0, set()
    while not survived:
        instruction += 1
        with fresh() as ring:
            comes_to(ring)
            sleeps = comes_to in (a_reader_sleeps, a_large_record_is_under_way)
            survived = survives(instruction, lambda: call(ring))
            ring.owner.mark_dead("w")
            assert not sleeps or rung(ring.receivers[0])
            got = [take_all_of_the_dead(receiver) for receiver in ring.receivers]
            assert got[0] == got[1]
            before = [FULL] if comes_to in (it_is_full, the_writer_sleeps) else []
            assert got[0] in (before, [*before, record])
            seen.add(len(got[0]))
            ring.owner.mark_alive("w")
            ring.sender = ring.writer()
            assert ring.carry([AFTER, LARGE, AFTER]) == [[AFTER, LARGE, AFTER]] * 2
            assert ring.owner.stats().used == 0
            assert "full for" not in ring.owner.describe()
    assert instruction > 1
    assert len(seen) == 1 + (what in ("a record", "the last parts", "another record"))


# What the reader was doing: how it comes to that, the call, and what was sent and not committed.


def records_wait(ring):
    for record in (SMALL, b""):
        assert ring.sender.try_send(record)


def records_are_received(ring):
    records_wait(ring)
    assert [ring.receivers[0].try_receive() for _ in range(2)] == [SMALL, b""]


def the_writer_waits_for_a_commit(ring):
    the_writer_sleeps(ring)
    take(ring.receivers[1])
    assert ring.receivers[0].try_receive() == FULL


def parts_wait(ring):
    assert not ring.sender.try_send(LARGE)


def the_last_parts_wait(ring):
    parts_wait(ring)
    assert [take(receiver) for receiver in ring.receivers] == [[], []]
    assert ring.sender.try_send(LARGE)


def reopen(ring):
    open_receiver(ring.owner.endpoint("r")).close()


READER = {
    "a record": (records_wait, lambda ring: ring.receivers[0].try_receive(), [SMALL, b""]),
    "nothing": (nothing, lambda ring: ring.receivers[0].try_receive(), []),
    "parts": (parts_wait, lambda ring: ring.receivers[0].try_receive(), []),
    "the last parts": (
        the_last_parts_wait,
        lambda ring: ring.receivers[0].try_receive(),
        [CorruptRecordError],
    ),
    "commit": (records_are_received, lambda ring: ring.receivers[0].commit(), [SMALL, b""]),
    "commit for the writer": (
        the_writer_waits_for_a_commit,
        lambda ring: ring.receivers[0].commit(),
        [FULL],
    ),
    "arm": (nothing, lambda ring: ring.receivers[0].arm(), []),
    "disarm": (a_reader_sleeps, lambda ring: ring.receivers[0].disarm(), []),
    "opening": (records_wait, reopen, [SMALL, b""]),
    "opening after sleep": (a_reader_sleeps, reopen, []),
}


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("what", READER)
def test_a_reader_killed_anywhere(what, resets):
    comes_to, call, uncommitted = READER[what]
    survived, instruction = False, 0
    while not survived:
        instruction += 1
        with fresh() as ring:
            comes_to(ring)
            survived = survives(instruction, lambda: call(ring))
            ring.owner.mark_dead("r")
            assert comes_to is not the_writer_waits_for_a_commit or rung(ring.sender)
            with pytest.raises(PeerDeadError):
                ring.sender.try_send(AFTER)
            expected = [uncommitted]
            if "commit" in what:
                expected.append([])
            if resets:
                ring.owner.reset("r")
                expected = [[]]
            ring.owner.mark_alive("r")
            ring.receivers[0] = ring.reader("r")
            assert take(ring.receivers[0]) in expected
            take(ring.receivers[1])  # or it would be the one that has no space
            assert ring.carry([AFTER, LARGE, AFTER]) == [[AFTER, LARGE, AFTER]] * 2
            assert ring.owner.stats().used == 0
            assert ring.owner.progress()[0][1] == ring.owner.progress()[1][1]
    assert instruction > 1
