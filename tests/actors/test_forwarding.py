"""A gateway's channels carry whole records, of which it knows when they have left its hands."""

from __future__ import annotations

import asyncio

import pytest

from ringcast.actors.forwarding import ForwardLinks
from ringcast.actors.links import Links
from ringcast.mq import codec, messages
from ringcast.mq.endpoint import ChannelOwner
from ringcast.mq.link_core import Record

EDGES = (
    ("tokenizer.0>scheduler.1", "gateway.1", "scheduler.1", "TokenizerToScheduler"),
    ("detokenizer.0>scheduler.1", "gateway.1", "scheduler.1", "DetokenizerToScheduler"),
    ("scheduler.1>detokenizer.0", "scheduler.1", "gateway.1", "SchedulerToDetokenizer"),
)
PING = messages.Ping(0, 1, 1)


@pytest.fixture
def owners():
    made = [
        ChannelOwner.create("ring", edge, writer, [reader], union, 65536, folder="")
        for edge, writer, reader, union in EDGES
    ]
    yield made
    for owner in made:
        owner.close()


def run(owners, body):
    async def main():
        out, handed_on, heard, changed = [], [], [], asyncio.Event()

        def note(into):
            def on(things):
                into.extend(things)
                changed.set()

            return on

        def ends(name):
            return [o.endpoint(name) for o in owners if name in (o.writer, *o.readers)]

        gateway = ForwardLinks(ends("gateway.1"), note(out), lambda r: note(handed_on)([r]))
        scheduler = Links(ends("scheduler.1"), note(heard))

        async def until(condition):
            async with asyncio.timeout(10):
                while not condition():
                    changed.clear()
                    await changed.wait()

        try:
            await body(gateway, scheduler, out, handed_on, heard, until)
        finally:
            gateway.close()
            scheduler.close()

    asyncio.run(main())


def test_records_keep_their_bytes_and_their_edge(owners):
    async def body(gateway, scheduler, out, handed_on, heard, until):
        gateway.start()
        scheduler.start()
        scheduler.send("detokenizer.0", PING)
        await until(lambda: out)
        assert out == [("scheduler.1>detokenizer.0", codec.encode(PING))]
        stop = messages.StopStream(1, 2)
        gateway.put(Record("detokenizer.0>scheduler.1", codec.encode(stop)))
        await until(lambda: heard)
        assert heard == [("detokenizer.0", stop)]
        assert len(handed_on) == 1
        assert gateway.has("tokenizer.0>scheduler.1")
        assert not gateway.has("tokenizer.0>scheduler.2")
        with pytest.raises(KeyError):
            gateway.put(Record("tokenizer.0>scheduler.2", b""))

    run(owners, body)


def test_what_waits_is_not_handed_on_yet_and_what_is_our_own_never(owners):
    async def body(gateway, scheduler, out, handed_on, heard, until):
        reset = messages.ResetPrefixCache(0, "x" * 20_000, 1)
        record = Record("tokenizer.0>scheduler.1", codec.encode(reset))
        for _ in range(10):
            gateway.put(record)
        gateway.put(record, own=True)
        waiting = gateway.num_waiting()
        assert waiting > 5
        assert len(handed_on) == 11 - waiting
        scheduler.start()
        await until(lambda: len(heard) == 11)
        assert len(handed_on) == 10

    run(owners, body)


def test_what_waits_for_the_dead_is_handed_on(owners):
    async def body(gateway, scheduler, out, handed_on, heard, until):
        record = Record("tokenizer.0>scheduler.1", bytes(50_000))
        for _ in range(3):
            gateway.put(record)
        assert len(handed_on) == 1
        for owner in owners:
            owner.mark_dead("scheduler.1")
        gateway.lose(["scheduler.1"])
        assert len(handed_on) == 3

    run(owners, body)
