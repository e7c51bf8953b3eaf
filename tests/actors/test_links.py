"""An actor's channels on its event loop, over every transport."""

import asyncio

import pytest

from ringcast.actors.links import Links
from ringcast.mq import messages
from ringcast.mq.endpoint import ChannelOwner

RING_BYTES = 65536


@pytest.fixture(params=["ring", "zmq"])
def owners(request, tmp_path):
    tmp_path.chmod(0o700)
    made = [
        ChannelOwner.create(request.param, f"{a}>{b}", a, [b], union, RING_BYTES, str(tmp_path))
        for a, b, union in (
            ("client.0", "tokenizer.0", "ClientToTokenizer"),
            ("tokenizer.0", "client.0", "TokenizerToClient"),
        )
    ]
    yield made
    for owner in made:
        owner.close()


def rejected(number: int, size: int = 0) -> messages.Rejected:
    return messages.Rejected(str(number), 0, messages.ErrorInfo("x" * size))


def run(owners, body):
    async def main():
        got, sent = [], asyncio.Event()

        def on_batch(batch):
            got.extend(batch)
            sent.set()

        client = Links([o.endpoint("client.0") for o in owners], on_batch)
        tokenizer = Links([o.endpoint("tokenizer.0") for o in owners], lambda batch: None)
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


def test_a_dead_peer_is_left_alone(owners):
    async def body(client, tokenizer, got, sent):
        client.start()
        tokenizer.send("client.0", rejected(1))
        for owner in owners:
            owner.mark_dead("tokenizer.0")
        await until(lambda: len(got) == 1, sent)  # what it sent before its death is still heard
        client.send("tokenizer.0", messages.Abort("x", 0))
        await asyncio.sleep(0.05)

    run(owners, body)
