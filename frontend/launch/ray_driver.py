"""The launcher: a process beside the master's supervisor, with Ray in it.

    python -P -m ringcast.frontend.launch.ray_driver FD

The inherited descriptor FD is its end of a socket pair with the master; mq/launching.py has what
they say. It decides nothing (fleet.py does), and calls Ray in threads, so that it hears at once
when the master ends, whatever way that is. It ends everything then. If it is itself killed, Ray
does so: actors and room belong to the process that asked for them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ...actors.control import Control, shorten
from ...mq.errors import ConfigError, RingcastError
from ...mq.launching import (
    CannotLaunch,
    HostEnded,
    Launch,
    MasterToLauncher,
    Notice,
    Place,
    Placed,
)
from . import fleet as fx
from .ask import lack
from .fleet import Fleet
from .ray_cluster import RayCluster, RayError

_CONNECT_SECONDS = 30.0
_PATIENCE_SECONDS = 3.0  # until people are told what they wait for
_LOOK_SECONDS = 2.0  # between looks at where Ray has the ranks


class Driver:
    def __init__(self, control: Control) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[Any] = asyncio.Queue()  # None: the master is gone
        self._cluster: RayCluster | None = None
        self._loop.add_reader(control.fileno(), self._on_control)

    async def run(self) -> None:
        """Until the master closes its end. Raises RingcastError for what can't be done."""
        order = await self._heard.get()
        if order is None:
            return
        assert isinstance(order, Place)
        placing = asyncio.create_task(self._place(order))
        ending = asyncio.create_task(self._heard.get())  # or Launch
        await asyncio.wait({placing, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():  # the master has gone meanwhile
            return
        fleet = placing.result()
        launch = await ending
        if launch is None:
            return
        assert isinstance(launch, Launch)
        self._fleet, self._order, self._launch = fleet, order, launch
        self._apply(fleet.launch(time.monotonic()))
        looking = asyncio.create_task(self._look())
        ending = asyncio.create_task(self._heard.get())
        await asyncio.wait({looking, ending}, return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            looking.result()

    def end(self) -> None:
        if self._cluster is not None:
            self._cluster.end()

    def say(self, message: Any) -> None:
        self._control.send(message)

    def _on_control(self) -> None:
        try:
            while (packet := self._control.receive()) is not None:
                self._heard.put_nowait(packet[0])
        except EOFError:
            self._loop.remove_reader(self._control.fileno())
            self._heard.put_nowait(None)

    # Placing

    async def _place(self, order: Place) -> Fleet:
        deadline = time.monotonic() + order.timeout
        cluster = self._cluster = await self._connect(order)
        for rank in order.ranks:
            await self._in_thread(cluster.reserve, rank, order.ask)
        waiting = await self._wait(cluster, order.ranks, time.monotonic() + _PATIENCE_SECONDS)
        if waiting:
            text = await self._in_thread(_lack, cluster, waiting, order.ask)
            self.say(Notice(f"{text}; waiting for {order.timeout:g} s (--startup-timeout)"))
            waiting = await self._wait(cluster, waiting, deadline)
        if waiting:
            text = await self._in_thread(_lack, cluster, waiting, order.ask)
            raise RayError(f"{text}: given up after {order.timeout:g} s (--startup-timeout)")
        places = {rank: await self._in_thread(cluster.place, rank) for rank in order.ranks}
        for rank, place in places.items():
            self.say(Notice(f"rank {rank} is placed on {place}"))
        self.say(Placed(cluster.address))
        return Fleet({rank: place or "a lost node" for rank, place in places.items()})

    async def _connect(self, order: Place) -> RayCluster:
        starts_one = order.ray_address == "local"
        limit = order.timeout if starts_one else min(_CONNECT_SECONDS, order.timeout)
        try:
            async with asyncio.timeout(limit):  # Ray itself asks for ever
                cluster: RayCluster = await self._in_thread(RayCluster, order.ray_address)
                return cluster
        except TimeoutError:
            raise RayError(
                f"no answer from a Ray cluster at --ray-address {order.ray_address} for {limit:g} s"
            ) from None

    async def _wait(self, cluster: RayCluster, ranks: Sequence[int], deadline: float) -> list[int]:
        """Those that have no room when the time is over."""
        return [
            rank
            for rank in ranks
            if not await self._in_thread(cluster.wait, rank, max(0.1, deadline - time.monotonic()))
        ]

    # Running

    def _apply(self, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Run(rank=rank):
                    self._run_host(rank)
                case fx.Timer(rank=rank, seconds=seconds):
                    self._loop.call_later(seconds, self._on_timer, rank)
                case fx.Ended(rank=rank, error=error, hopeless=hopeless, seconds=seconds):
                    self.say(HostEnded(rank, shorten(error), hopeless, seconds))
                case fx.Moved(rank=rank, place=place):
                    self.say(Notice(f"rank {rank} moves to {place}: its node of Ray is lost"))

    def _on_timer(self, rank: int) -> None:
        self._apply(self._fleet.timer(rank, time.monotonic()))

    def _run_host(self, rank: int) -> None:
        """In a thread of its own: as many as there are ranks last as long as they do."""
        launch, cluster = self._launch, self._cluster
        assert cluster is not None
        options = {**launch.options, "data_parallel_start_rank": rank}
        call = (rank, self._order.ask, options, launch.secret, launch.variables)

        def run() -> None:
            try:
                status, said = cluster.run(*call)
            except Exception as error:  # of whatever kind: the rank is tried again
                self._from_thread(self._on_given_up, rank, str(error) or type(error).__name__)
            else:
                self._from_thread(self._on_ended, rank, status, said)

        threading.Thread(target=run, daemon=True).start()

    def _from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _on_ended(self, rank: int, status: int, said: str) -> None:
        self._apply(self._fleet.ended(rank, status, said, time.monotonic()))

    def _on_given_up(self, rank: int, error: str) -> None:
        self._apply(self._fleet.given_up(rank, error, time.monotonic()))

    async def _look(self) -> None:
        """Where Ray has the ranks, again and again: it tells nobody when that changes."""
        cluster = self._cluster
        assert cluster is not None
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for rank in self._order.ranks:
                place = await self._in_thread(cluster.place, rank)
                effects = self._fleet.seen(rank, place, time.monotonic())
                self._apply(effects)
                if fx.NoRoom(rank) in effects:
                    text = await self._in_thread(_lack, cluster, [rank], self._order.ask)
                    self.say(Notice(f"{text}; its node of Ray is lost"))

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(call, *arguments)


def _lack(cluster: RayCluster, ranks: Sequence[int], ask: dict[str, float]) -> str:
    return lack(ranks, ask, cluster.nodes(), cluster.free())


async def _main(control: Control) -> int:
    driver = Driver(control)
    try:
        await driver.run()
    except RingcastError as error:
        driver.say(CannotLaunch(shorten(str(error)), isinstance(error, ConfigError)))
        return 1
    finally:
        driver.end()
    return 0


def main() -> int:
    control = Control(socket.socket(fileno=int(sys.argv[1])), MasterToLauncher)
    # Not asyncio.run, which waits for threads that wait for Ray.
    return asyncio.new_event_loop().run_until_complete(_main(control))


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc()  # whose end the master shows
        code = 1
    sys.stderr.flush()
    os._exit(code)  # likewise
