"""Questions for a Status: one answer is everybody's, and an end, too."""

from __future__ import annotations

import asyncio

import pytest

from ringcast.actors.status_asks import StatusAsks
from ringcast.mq.errors import EngineDeadError
from ringcast.mq.messages import Message
from ringcast.mq.supervision import Status, StatusRequest


def test_an_answer_is_everybodys() -> None:
    async def main() -> None:
        sent: list[Message] = []
        asks, status = StatusAsks(sent.append), Status([], [], {"a": 1.0})
        both = asyncio.gather(asks.ask(), asks.ask())
        await asyncio.sleep(0)
        assert sent == [StatusRequest(), StatusRequest()]
        asks.answered(status)
        assert await both == [status, status]
        asks.answered(status)  # the second one's

    asyncio.run(main())


def test_nobody_waits_for_the_dead() -> None:
    async def main() -> None:
        asks = StatusAsks(lambda message: False)
        early = asyncio.create_task(asks.ask())
        await asyncio.sleep(0)
        asks.fail("it has died")
        for late in (early, asks.ask()):
            with pytest.raises(EngineDeadError, match="it has died"):
                async with asyncio.timeout(5):
                    await late

    asyncio.run(main())
