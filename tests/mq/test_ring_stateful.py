"""The ring against a model that is a list: any interleaving of sending, receiving and dying."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ringcast.mq.endpoint import ChannelOwner, open_receiver, open_sender

CAPACITY = 256
SIZES = st.one_of(st.integers(0, 64), st.integers(CAPACITY - 40, CAPACITY + 40), st.just(1000))


class RingMachine(RuleBasedStateMachine):
    """`sent` is all that was accepted; a reader has `received` so many and `committed` so many."""

    def __init__(self):
        super().__init__()
        self.sent = []
        self.refused = None  # the payload that try_send refused last
        self.serial = 0

    @initialize(num_readers=st.integers(1, 3), start=st.sampled_from([0, 2**32 - 128, 2**63 - 128]))
    def make(self, num_readers, start):
        names = tuple(f"r.{i}" for i in range(num_readers))
        self.owner = ChannelOwner.create("ring", "e", "w", names, "Any", CAPACITY, "", start)
        self.sender = open_sender(self.owner.endpoint("w"))
        self.readers = [open_receiver(self.owner.endpoint(name)) for name in names]
        self.received = [0] * num_readers
        self.committed = [0] * num_readers

    def offer(self, payload):
        if self.sender.try_send(payload):
            self.sent.append(payload)
            self.refused = None
        else:
            self.refused = payload

    @rule(size=SIZES)
    def send(self, size):
        self.serial += 1
        self.offer(random.Random(self.serial).randbytes(size))

    @precondition(lambda self: self.refused is not None)
    @rule()
    def send_again(self):
        self.offer(self.refused)

    @rule(data=st.data())
    def receive(self, data):
        reader = self.pick(data)
        record = self.readers[reader].try_receive()
        if record is None:
            assert self.received[reader] == len(self.sent)
        else:
            assert record == self.sent[self.received[reader]]
            self.received[reader] += 1

    @rule(data=st.data())
    def commit(self, data):
        reader = self.pick(data)
        self.readers[reader].commit()
        self.committed[reader] = self.received[reader]

    @precondition(lambda self: self.refused is None)
    @rule(data=st.data())
    def reincarnate_reader(self, data):
        reader = self.pick(data)
        # What travels in parts is received once at most, so none may be between commits.
        between = self.sent[self.committed[reader] :]
        if all(len(payload) <= CAPACITY - 16 for payload in between):
            self.readers[reader].close()
            self.readers[reader] = open_receiver(self.owner.endpoint(f"r.{reader}"))
            self.received[reader] = self.committed[reader]

    @rule(data=st.data())
    def reset_reader(self, data):
        reader = self.pick(data)
        self.readers[reader].close()
        self.owner.reset(f"r.{reader}")
        self.received[reader] = self.committed[reader] = len(self.sent)
        if data.draw(st.booleans(), label="send before it opens"):
            self.send(data.draw(SIZES, label="size"))
        self.readers[reader] = open_receiver(self.owner.endpoint(f"r.{reader}"))

    @rule()
    def reincarnate_writer(self):
        self.sender.close()
        self.sender = open_sender(self.owner.endpoint("w"))
        self.refused = None

    @rule()
    def arm_sender(self):
        if self.sender.arm():
            assert self.refused is not None
            assert not self.sender.try_send(self.refused)
        self.sender.disarm()

    @rule(data=st.data())
    def arm_receiver(self, data):
        reader = self.pick(data)
        if self.readers[reader].arm():
            assert self.readers[reader].try_receive() is None
        self.readers[reader].disarm()

    @rule(data=st.data())
    def sleep_and_send(self, data):
        reader = self.pick(data)
        if self.readers[reader].arm():
            before = len(self.sent)
            self.send(8)
            assert self.owner.bells[1 + reader].drain() == (len(self.sent) > before)
        self.readers[reader].disarm()

    def pick(self, data):
        return data.draw(st.integers(0, len(self.readers) - 1), label="reader")

    @invariant()
    def counts_agree(self):
        if hasattr(self, "owner"):
            stats = self.owner.stats()
            assert 0 <= stats.used <= CAPACITY
            assert stats.records == len(self.sent)

    def teardown(self):
        if hasattr(self, "owner"):
            for end in (*self.readers, self.sender, self.owner):
                end.close()


RingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestRing = RingMachine.TestCase
