"""A topology as its maker sees it: launch it, talk to it, close it.

What `LLM` and `AsyncLLM` stand on.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from typing import Any

import msgspec

from ..mq import messages, supervision
from ..mq.config import EngineConfig, ModelSpec
from ..mq.endpoint import received
from ..mq.errors import ConfigError, EngineDeadError
from .control import Control
from .embedded import Order
from .links import Links
from .linux import start_process
from .profiling import ProfileAsks
from .status_asks import StatusAsks

Details = dict[str, str | int | float]


class EngineConnection:
    """A running topology whose client is this process.

    Everything happens on the event loop that launched it.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: Control) -> None:
        self.details: Details = {}
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._links: Links | None = None
        self._deliver: Callable[[str, Any], None] | None = None
        self._on_death: Callable[[EngineDeadError], None] | None = None
        self._on_lost: Callable[[supervision.PeersLost], None] | None = None
        self._on_back: Callable[[list[str]], None] | None = None
        # What comes before `attach`.
        self._early: list[supervision.PeersLost | supervision.PeersBack] = []
        self._on_progress: Callable[[str, supervision.Progress], None] | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._status = StatusAsks(control.send)
        self._profiles = ProfileAsks(control.send)
        self._death: Exception | None = None
        self._closed = False

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        spec: ModelSpec,
        on_progress: Callable[[str, supervision.Progress], None] | None = None,
    ) -> EngineConnection:
        """Start a topology and wait until it's ready.

        Raises ConfigError or EngineDeadError, and then nothing is left.
        """
        try:
            process, control = _start(config, spec)
        except OSError as error:
            raise EngineDeadError(f"the engine's process can't be started: {error}") from error
        connection = cls(process, control)
        connection._on_progress = on_progress
        connection._loop.add_reader(control.fileno(), connection._read_control)
        try:
            await connection._ready
        except BaseException:
            await connection.close(timeout=10.0)
            raise
        return connection

    def attach(
        self,
        deliver: Callable[[str, Any], None],
        on_death: Callable[[EngineDeadError], None],
        on_lost: Callable[[supervision.PeersLost], None],
        on_back: Callable[[list[str]], None],
    ) -> None:
        """Say who gets the messages, with their source, and who is told of deaths: of the topology
        (`on_death`), of actors that come again (`on_lost`, after the last that they had sent), and
        of their return (`on_back`)."""
        assert self._links is not None
        self._deliver = deliver
        self._on_death = on_death
        self._on_lost, self._on_back = on_lost, on_back
        early, self._early = self._early, []
        for message in early:
            self._tell(message)
        self._links.start()

    def send(self, to: str, message: messages.Message) -> None:
        """Raises EngineDeadError after the topology's death."""
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        assert self._links is not None
        self._links.send(to, message)

    async def status(self) -> supervision.Status:
        """Raises EngineDeadError."""
        return await self._status.ask()

    async def profile(self, start: bool) -> str:
        """Start or stop the workers' profilers. Returns their report, once they are stopped.

        Raises as ProfileAsks.ask.
        """
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        return await self._profiles.ask(start)

    async def close(self, timeout: float) -> None:
        """End the topology: within `timeout` seconds it is gone, killed if need be. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._fail_asks("this engine has been shut down")
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        if self._links is not None:
            self._links.close()
        gone = asyncio.ensure_future(self._wait_for_exit())
        _, late = await asyncio.wait([gone], timeout=timeout)
        if late:
            self._process.kill()  # its children die with it
            await gone

    async def _wait_for_exit(self) -> None:
        pidfd = os.pidfd_open(self._process.pid)
        exited: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(pidfd, exited.set_result, None)
        try:
            await exited
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._process.wait()

    def _read_control(self) -> None:
        try:
            while (packet := self._control.receive()) is not None:
                self._on_message(*packet)
        except EOFError:
            self._loop.remove_reader(self._control.fileno())
            self._die(EngineDeadError(f"the supervisor (pid {self._process.pid}) died"))

    def _on_message(self, message: Any, fds: list[int]) -> None:
        match message:
            case supervision.Attach(endpoints=encoded):
                self._links = Links(received(encoded, fds), self._on_batch)
                for fd in fds:  # the channels' ends have their own by now
                    os.close(fd)
                self._control.send(supervision.ActorReady())
            case supervision.ActorProgress(actor=actor, progress=progress):
                if self._on_progress is not None:
                    self._on_progress(actor, progress)
            case supervision.TopologyReady(details=details):
                self.details = details
                self._control.send(supervision.Listening("in process"))
                if not self._ready.done():
                    self._ready.set_result(None)
            case supervision.Status():
                self._status.answered(message)
            case supervision.Profiled():
                self._profiles.answered(message)
            case supervision.PeersLost(lost=lost, death=death):
                assert self._links is not None
                self._links.lose(lost)
                self._tell(message)
                self._control.send(supervision.PeersForgotten(death))
            case supervision.PeersBack(names=names):
                assert self._links is not None
                self._links.regain(names)
                self._tell(message)
            case supervision.TopologyFailed(error=error, traceback=text, user_error=user_error):
                self._die(ConfigError(error) if user_error else EngineDeadError(error, text))
                self._control.send(supervision.Drained())

    def _tell(self, message: supervision.PeersLost | supervision.PeersBack) -> None:
        if self._on_lost is None or self._on_back is None:
            self._early.append(message)
        elif isinstance(message, supervision.PeersLost):
            self._on_lost(message)
        else:
            self._on_back(message.names)

    def _on_batch(self, batch: list[tuple[str, Any]]) -> None:
        assert self._deliver is not None
        for source, message in batch:
            self._deliver(source, message)

    def _die(self, error: Exception) -> None:
        if self._death is not None:
            return
        self._death = error
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self._on_death is not None:
            self._on_death(
                error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
            )
        self._fail_asks(str(error))

    def _fail_asks(self, error: str) -> None:
        self._status.fail(error)
        self._profiles.fail(error)


def _start(config: EngineConfig, spec: ModelSpec) -> tuple[subprocess.Popen[bytes], Control]:
    ours, theirs = Control.pair()
    try:
        order = Order(engine=config, spec=spec, control_fd=theirs.fileno())
        encoded = msgspec.msgpack.encode(order)
        process = start_process("ringcast.actors.embedded", encoded, {theirs.fileno()})
        return process, Control(ours, supervision.SupervisorToActor)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
