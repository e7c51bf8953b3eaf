"""A mailbox, and the taker that may have its chunks before its task does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ringcast.frontend.mailbox import Mailbox
from ringcast.mq.errors import RequestFailedError
from ringcast.mq.messages import Chunk


def chunk(number: int) -> Chunk:
    return Chunk("r", 0, 0, number, b"")


class Taker:
    """Takes the chunks until it is told to refuse."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.refuses = False

    def __call__(self, chunk: Chunk) -> bool:
        if not self.refuses:
            self.taken.append(chunk.first_index)
        return not self.refuses


@pytest.fixture
def mailbox() -> Mailbox:
    made = Mailbox()
    made.num_open = 1
    return made


async def waiting(mailbox: Mailbox) -> asyncio.Task[list[Chunk]]:
    task = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    return task


def numbers(chunks: list[Chunk]) -> list[int]:
    return [chunk.first_index for chunk in chunks]


async def test_the_taker_has_what_comes_while_the_task_waits(mailbox: Mailbox) -> None:
    mailbox.taker = taker = Taker()
    task = await waiting(mailbox)
    for number in range(3):
        mailbox.put(chunk(number))
    await asyncio.sleep(0)
    assert taker.taken == [0, 1, 2]
    assert not task.done()
    mailbox.close_one()
    assert await task == []


async def test_what_the_taker_refuses_wakes_the_task_and_keeps_its_place(mailbox: Mailbox) -> None:
    mailbox.taker = taker = Taker()
    task = await waiting(mailbox)
    mailbox.put(chunk(0))
    taker.refuses = True
    mailbox.put(chunk(1))
    taker.refuses = False
    mailbox.put(chunk(2))  # must not pass the one before
    assert taker.taken == [0]
    assert numbers(await task) == [1, 2]


async def test_the_taker_has_nothing_while_nobody_waits(mailbox: Mailbox) -> None:
    mailbox.taker = taker = Taker()
    mailbox.put(chunk(0))
    assert taker.taken == []
    assert numbers(await mailbox.take()) == [0]


async def test_an_error_comes_after_what_was_taken(mailbox: Mailbox) -> None:
    mailbox.taker = taker = Taker()
    task: Any = await waiting(mailbox)
    mailbox.put(chunk(0))
    mailbox.close_one(RequestFailedError("broken"))
    with pytest.raises(RequestFailedError, match="broken"):
        await task
    assert taker.taken == [0]


async def test_a_cancelled_task_leaves_chunks_to_the_next(mailbox: Mailbox) -> None:
    mailbox.taker = taker = Taker()
    task = await waiting(mailbox)
    task.cancel()
    mailbox.put(chunk(0))
    with pytest.raises(asyncio.CancelledError):
        await task
    mailbox.put(chunk(1))
    assert taker.taken == []
    assert numbers(await mailbox.take()) == [0, 1]
