"""An event loop on a thread of its own, for callers that aren't asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

import uvloop

from ..mq.errors import EngineDeadError

T = TypeVar("T")

_SLICE_SECONDS = 0.25


class LoopThread:
    """`run` waits for a coroutine, `iterate` for an item at a time; Ctrl-C cancels that.

    Both raise EngineDeadError once this is stopped.
    """

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        # A daemon: an interpreter that ends joins others before an exit handler can stop this one.
        self._thread = threading.Thread(target=self._serve, name="ringcast", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. KeyboardInterrupt cancels it, waits for it, and goes on."""
        assert threading.current_thread() is not self._thread, "this would wait for itself"
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: ended.set())

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError:  # it is closed
            work.close()
            raise _stopped() from None
        try:
            self._wait(ended)
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            self._wait(ended)
            raise
        return tasks[0].result()

    def iterate(self, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The generator's items. It is closed when this iterator is."""
        try:
            while True:
                try:
                    item = self.run(_next(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            with contextlib.suppress(EngineDeadError):  # it was closed when this was stopped
                self.run(source.aclose())

    def stop(self) -> None:
        """End the thread. Idempotent; nothing may run any more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _wait(self, ended: threading.Event) -> None:
        # In slices: a signal that comes just before the thread falls asleep doesn't wake it.
        while not ended.wait(_SLICE_SECONDS):
            if not self._thread.is_alive() and not ended.is_set():
                raise _stopped()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


async def _next(source: AsyncGenerator[T, None]) -> T:
    return await anext(source)


def _stopped() -> EngineDeadError:
    return EngineDeadError("this LLM has been shut down")
