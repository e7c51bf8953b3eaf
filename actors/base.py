"""The shell around a core: one process, one event loop, its channels, its beginning and end.

A subclass says which core it has (`make_core`); clients, which have an outside world of their own,
override more. The shell's life: open channels, `start`, ActorReady, then messages until Shutdown or
until the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Coroutine
from typing import Any

import uvloop

from ..mq import supervision
from ..mq.endpoint import received
from .boot import Boot
from .control import Control
from .core import Core, PeerAdded, PeerLost, Send
from .links import Links

STATISTICS_SECONDS = 1.0


class Actor:
    """An asyncio actor.

    Raises out of `run` whatever broke it; the process's entry reports that to the supervisor.
    """

    def __init__(self, boot: Boot, control: Control) -> None:
        self.boot = boot
        self.control = control
        self.core: Core | None = None
        self.links: Links

    def run(self) -> None:
        uvloop.run(self._main())

    def make_core(self) -> Core:
        raise NotImplementedError

    def make_links(self) -> Links:
        return Links(self.boot.endpoints, self.on_batch)

    def now(self) -> float:
        """`time.monotonic()` by the clock of the host whose clients are served."""
        cluster = self.boot.cluster
        return time.monotonic() + (0.0 if cluster is None else cluster.clock_offset)

    async def start(self) -> dict[str, str | int | float]:
        """Get ready for work; what it returns is shown to the user."""
        self.core = self.make_core()
        return {}

    def on_batch(self, batch: list[tuple[str, Any]]) -> None:
        """Act on messages that arrived together."""
        core = self.core
        assert core is not None
        now = self.now()
        for source, message in batch:
            self.send_all(core.handle(source, message, now))
        self.send_all(core.flush(now))

    def on_control(self, message: Any) -> None:
        """Act on a message of the supervisor."""
        match message:
            case supervision.Shutdown():
                self.stop()
            case supervision.PeersLost():
                self._lose(message)
            case supervision.PeersBack(names=names):
                self.links.regain(names)
                self.on_back(names)

    def on_lost(self, message: supervision.PeersLost) -> None:
        """Act on a death, after everything that the dead had sent."""

    def on_back(self, names: list[str]) -> None:
        """Act on the return of peers."""

    def statistics(self) -> dict[str, float]:
        """A few named numbers for people to look at."""
        return self.core.statistics() if self.core is not None else {}

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on beside the messages until the actor ends."""
        return [self._publish_statistics()]

    async def end(self) -> None:
        """Put away what `start` made."""

    def stop(self, error: BaseException | None = None) -> None:
        """Leave `run`, by raising `error` if there is one."""
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def send_all(self, effects: Any) -> None:
        send: Send
        for send in effects:
            self.links.send(send.to, send.message)

    def _lose(self, message: supervision.PeersLost) -> None:
        self.links.lose(message.lost)
        if self.core is not None:
            now = self.now()
            for source in message.lost:
                self.send_all(self.core.handle(source, PeerLost(), now))
            self.send_all(self.core.flush(now))
        self.on_lost(message)
        if message.removed:
            self.links.remove(message.lost)
        self.control.send(supervision.PeersForgotten(message.death))

    def _add(self, message: supervision.PeersAdded, fds: list[int]) -> None:
        self.links.add(received(message.endpoints, fds))
        for fd in fds:  # the channels' ends have their own by now
            os.close(fd)
        if self.core is not None:
            for source in message.names:
                self.send_all(self.core.handle(source, PeerAdded(), self.now()))
        self.control.send(supervision.PeersForgotten(message.number))

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        # An exception in a callback (a core's broken invariant) ends the actor instead of being
        # logged and forgotten.
        loop.set_exception_handler(lambda _, context: self.stop(_exception_of(context)))
        self.links = self.make_links()
        loop.add_reader(self.control.fileno(), self._read_control)
        try:
            details = await self.start()
            gc.freeze()  # all that stays: no collection need look at it again
            self.links.start()
            self.control.send(supervision.ActorReady(details))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(task) for task in self.background()]
                try:
                    await self._ended
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            loop.remove_reader(self.control.fileno())
            await self.end()
            self.links.close()

    def _read_control(self) -> None:
        try:
            while (packet := self.control.receive()) is not None:
                message, fds = packet
                if isinstance(message, supervision.PeersAdded):
                    self._add(message, fds)
                else:
                    self.on_control(message)
        except EOFError:
            asyncio.get_running_loop().remove_reader(self.control.fileno())
            self.stop()

    async def _publish_statistics(self) -> None:
        last: dict[str, float] = {}
        while True:
            values = {**self.statistics(), "outbox": self.links.num_waiting()}
            if values != last:
                self.control.send(supervision.Statistics(values))
                last = values
            await asyncio.sleep(STATISTICS_SECONDS)


def _exception_of(context: dict[str, Any]) -> BaseException:
    error = context.get("exception")
    return error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))
