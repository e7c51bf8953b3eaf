"""An actor's channels on its event loop, over every transport."""

import asyncio
import os
import time

import pytest

from ringcast.actors.links import Links
from ringcast.mq import messages
from ringcast.mq.endpoint import ChannelOwner

RING_BYTES = 65536


def make_owners(transport, folder):
    return [
        ChannelOwner.create(transport, f"{a}>{b}", a, [b], union, RING_BYTES, folder)
        for a, b, union in (
            ("client.0", "tokenizer.0", "ClientToTokenizer"),
            ("tokenizer.0", "client.0", "TokenizerToClient"),
        )
    ]


@pytest.fixture(params=["ring", "zmq"])
def owners(request, tmp_path):
    tmp_path.chmod(0o700)
    made = make_owners(request.param, str(tmp_path))
    yield made
    for owner in made:
        owner.close()


def rejected(number: int, size: int = 0) -> messages.Rejected:
    return messages.Rejected(str(number), 0, messages.ErrorInfo("x" * size))


def run(owners, body, senders=None):
    async def main():
        got, sent = [], asyncio.Event()

        def on_batch(batch):
            got.extend(batch)
            sent.set()

        client = Links([o.endpoint("client.0") for o in owners], on_batch)
        ends = [o.endpoint("tokenizer.0") for o in senders or owners]
        tokenizer = Links(ends, lambda batch: None)
        try:
            await body(client, tokenizer, got, sent)
        finally:
            client.close()
            tokenizer.close()

    asyncio.run(main())


async def until(condition, event):
    async with asyncio.timeout(10):
        while not condition():
            event.clear()
            await event.wait()


def test_messages_arrive_in_order_with_their_source(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        for number in range(1000):
            tokenizer.send("client.0", rejected(number))
        await until(lambda: len(got) == 1000, sent)
        assert got == [("tokenizer.0", rejected(n)) for n in range(1000)]

    run(owners, body)


def test_what_does_not_fit_waits_and_goes_on_when_there_is_space(owners):
    async def body(client, tokenizer, got, sent):
        for number in range(100):  # a hundred times 10 kB into a ring of 64 kB
            tokenizer.send("client.0", rejected(number, 10_000))
        tokenizer.send("client.0", rejected(100, 1_000_000))  # and one larger than the ring
        client.start()
        await until(lambda: len(got) == 101, sent)
        assert [m.request_id for _, m in got] == [str(n) for n in range(101)]
        assert tokenizer.num_waiting() == 0

    run(owners, body)


def test_a_sleeping_reader_wakes_for_each_message(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        for number in range(50):
            await asyncio.sleep(0.002)  # long enough that the reader has gone to sleep
            tokenizer.send("client.0", rejected(number))
            await until(lambda n=number: len(got) == n + 1, sent)

    run(owners, body)


def test_a_stranger_is_refused(owners):
    async def body(client, tokenizer, got, sent):
        with pytest.raises(KeyError):
            client.send("scheduler.0", messages.Abort("x", 0))

    run(owners, body)


def mark(owners, dead, name="tokenizer.0"):
    for owner in owners:
        (owner.mark_dead if dead else owner.mark_alive)(name)


def restart(owners, old, name="tokenizer.0"):
    """What the supervisor does between two incarnations."""
    old.close()
    for owner in owners:
        if name in owner.readers:
            owner.reset(name)
    mark(owners, dead=False, name=name)
    return Links([o.endpoint(name) for o in owners], lambda batch: None)


def test_all_that_a_dead_peer_sent_is_heard_before_it_is_lost(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        for number in range(600):  # more than a batch
            tokenizer.send("client.0", rejected(number))
        await asyncio.sleep(0.05)
        mark(owners, dead=True)
        client.lose(["tokenizer.0", "a stranger"])
        assert [m.request_id for _, m in got] == [str(n) for n in range(600)]

    run(owners, body)


def test_who_came_and_died_without_being_announced_is_heard_too(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        mark(owners, dead=True)
        client.lose(["tokenizer.0"])
        mark(owners, dead=False)
        tokenizer.send("client.0", rejected(1))
        mark(owners, dead=True)
        client.lose(["tokenizer.0"])
        assert got == [("tokenizer.0", rejected(1))]

    run(owners, body)


def test_what_is_sent_to_a_dead_peer_is_dropped(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        for number in range(100):  # more than fits
            client.send("tokenizer.0", messages.Abort("x" * 10_000, number))
        assert client.num_waiting() > 0
        mark(owners, dead=True)
        client.lose(["tokenizer.0"])
        assert client.num_waiting() == 0
        client.send("tokenizer.0", messages.Abort("y", 0))
        assert client.num_waiting() == 0

    run(owners, body)


def test_a_new_incarnation_gets_what_is_sent_to_it_and_nothing_from_before(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        tokenizer.start()
        for number in range(20):
            client.send("tokenizer.0", messages.Abort("x" * 10_000, number))
        mark(owners, dead=True)
        client.lose(["tokenizer.0"])
        new = restart(owners, tokenizer)
        try:
            heard, event = [], asyncio.Event()
            new._on_batch = lambda batch: (heard.extend(batch), event.set())
            client.send("tokenizer.0", messages.Abort("early", 0))  # before it is ready
            new.start()
            new.send("client.0", rejected(7))
            client.regain(["tokenizer.0"])
            client.send("tokenizer.0", messages.Abort("z" * 200_000, 1))  # larger than the ring
            await until(lambda: got, sent)
            await until(lambda: len(heard) == 2, event)
            assert got == [("tokenizer.0", rejected(7))]
            assert [(m.request_id[0], m.incarnation) for _, m in heard] == [("e", 0), ("z", 1)]
        finally:
            new.close()

    run(owners, body)


@pytest.mark.parametrize("told", [True, False])
def test_a_dead_peer_costs_nothing(owners, told):
    async def body(client, tokenizer, got, sent):
        client.start()
        tokenizer.send("client.0", rejected(1))
        mark(owners, dead=True)
        if told:
            client.lose(["tokenizer.0"])
        await until(lambda: len(got) == 1, sent)
        await asyncio.sleep(0.2)  # ZeroMQ's readers need 0.1 s to be sure
        before = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before < 0.1

    run(owners, body)


def test_who_starts_while_a_peer_is_dead_hears_its_next_incarnation(owners):
    async def body(client, tokenizer, got, sent):
        tokenizer.send("client.0", rejected(1))
        mark(owners, dead=True)
        client.start()
        await until(lambda: len(got) == 1, sent)
        await asyncio.sleep(0.15)
        new = restart(owners, tokenizer)
        try:
            new.send("client.0", rejected(2))
            client.lose(["tokenizer.0"])  # told late
            client.regain(["tokenizer.0"])
            await until(lambda: len(got) == 2, sent)
        finally:
            new.close()

    run(owners, body)


def test_losing_a_peer_that_lives_again_waits_for_nothing(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        tokenizer.send("client.0", rejected(1))
        client.lose(["tokenizer.0"])
        tokenizer.send("client.0", rejected(2))
        await until(lambda: len(got) == 2, sent)

    run(owners, body)


def test_many_deaths_leave_no_descriptors(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        new, times = tokenizer, 300 if owners[0].transport == "ring" else 40
        before = len(os.listdir("/proc/self/fd"))
        try:
            for _ in range(times):
                mark(owners, dead=True)
                client.lose(["tokenizer.0"])
                new = restart(owners, new)
                client.regain(["tokenizer.0"])
                await asyncio.sleep(0)
            # ZeroMQ's thread closes in its own time.
            assert len(os.listdir("/proc/self/fd")) < before + times // 2
        finally:
            new.close()

    run(owners, body)


@pytest.mark.parametrize("transport", ["ring", "zmq"])
def test_a_message_touches_no_other_channels_bell(transport, tmp_path):
    tmp_path.chmod(0o700)
    made = [
        ChannelOwner.create(
            transport, f"{a}>client.0", a, ["client.0"], union, RING_BYTES, str(tmp_path)
        )
        for a, union in (
            ("tokenizer.0", "TokenizerToClient"),
            ("detokenizer.0", "DetokenizerToClient"),
        )
    ]

    async def body(client, tokenizer, got, sent):
        client.start()
        await asyncio.sleep(0.01)  # both are armed
        others = client._inbound[1].receiver
        assert client._inbound[1].source == "detokenizer.0"
        others.disarm = None  # to call it would raise
        for number in range(20):
            tokenizer.send("client.0", rejected(number))
            await until(lambda n=number: len(got) == n + 1, sent)
        del others.disarm
        others_sender = Links([made[1].endpoint("detokenizer.0")], lambda batch: None)
        try:
            others_sender.send("client.0", messages.Ping(0, 1))  # it is armed still
            await until(lambda: len(got) == 21, sent)
        finally:
            others_sender.close()

    try:
        run(made, body, senders=made[:1])
    finally:
        for owner in made:
            owner.close()


def test_while_paused_nothing_is_taken_in_except_what_the_dead_had_sent(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        client.pause()
        tokenizer.send("client.0", rejected(1))
        for _ in range(20):  # a loop that would take it in has had its chance
            await asyncio.sleep(0)
        assert not got
        client.resume()
        await until(lambda: len(got) == 1, sent)
        client.pause()
        tokenizer.send("client.0", rejected(2))
        owners[1].mark_dead("tokenizer.0")
        client.lose(["tokenizer.0"])
        assert got[-1] == ("tokenizer.0", rejected(2))

    run(owners, body)


def test_channels_come_and_go_while_it_runs(owners, tmp_path):
    """Of a removed peer nothing is left, and what is still sent there is dropped."""

    async def one_life(client, made, got, sent):
        client.add([owner.endpoint("client.0") for owner in made])
        tokenizer = Links([owner.endpoint("tokenizer.0") for owner in made], lambda batch: None)
        tokenizer.send("client.0", rejected(1))
        await until(lambda: got, sent)
        client.send("tokenizer.0", messages.Abort("x", 0))
        mark(made, dead=True)
        client.lose(["tokenizer.0"])
        client.remove(["tokenizer.0"])
        tokenizer.close()
        client.send("tokenizer.0", messages.Abort("y", 0))
        assert client.num_waiting() == 0
        with pytest.raises(KeyError):
            client.send("scheduler.0", messages.Abort("x", 0))

    async def main():
        got, sent = [], asyncio.Event()
        client = Links([], lambda batch: (got.extend(batch), sent.set()))
        client.start()
        try:
            for made in (owners, more):
                got.clear()
                await one_life(client, made, got, sent)
                assert got == [("tokenizer.0", rejected(1))]
        finally:
            client.close()

    more = make_owners(owners[0].transport, str(tmp_path))
    try:
        asyncio.run(main())
    finally:
        for owner in more:
            owner.close()
