"""An event loop on a thread of its own, driven from another."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from ringcast.frontend.loop_thread import LoopThread
from ringcast.mq.errors import EngineDeadError


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()
    thread.stop()


def test_results_and_errors_come_back(thread: LoopThread) -> None:
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        if x < 0:
            raise ValueError("negative")
        return 2 * x

    assert thread.run(double(4)) == 8
    with pytest.raises(ValueError, match="negative"):
        thread.run(double(-1))


def test_ctrl_c_cancels_and_waits(thread: LoopThread) -> None:
    seen: list[str] = []

    async def work() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            seen.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    assert seen == ["cleaned up"]


def test_an_iterator_closes_its_generator(thread: LoopThread) -> None:
    seen: list[str] = []

    async def count() -> AsyncGenerator[int, None]:
        try:
            for i in range(3):
                yield i
                await asyncio.sleep(0)
        finally:
            seen.append("closed")

    assert list(thread.iterate(count())) == [0, 1, 2]
    numbers = thread.iterate(count())
    assert next(numbers) == 0
    numbers.close()
    assert seen == ["closed", "closed"]


def test_an_iterators_error_is_raised(thread: LoopThread) -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("broken")

    numbers = thread.iterate(broken())
    assert next(numbers) == 1
    with pytest.raises(ValueError, match="broken"):
        next(numbers)


def test_once_stopped_it_says_so(thread: LoopThread) -> None:
    seen: list[str] = []

    async def count() -> AsyncGenerator[int, None]:
        try:
            for i in range(3):
                yield i
        finally:
            seen.append("closed")

    begun, closed = thread.iterate(count()), thread.iterate(count())
    assert (next(begun), next(closed)) == (0, 0)
    thread.stop()
    assert seen == ["closed", "closed"]
    closed.close()
    for numbers in (begun, thread.iterate(count())):
        with pytest.raises(EngineDeadError, match="has been shut down"):
            next(numbers)
